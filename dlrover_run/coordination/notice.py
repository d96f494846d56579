"""What a person is told whose node has other rules than the job that it joins."""

from __future__ import annotations

from dataclasses import fields

from dlrover_run.coordination.rules import CHECK_ALWAYS, CHECK_NEVER, CHECK_ONCE, Rules

_FLAGS = {
    "least": "--nnodes (least)",
    "most": "--nnodes (most)",
    "unit": "--node-unit",
    "spares": "--spares",
    "max_restarts": "--max-restarts",
    "check": "--network-check",
    "straggler_threshold": "--straggler-threshold",
    "exclude_stragglers": "--exclude-straggler",
    "measure_links": "--comm-perf-test",
}
_WORDS: dict[str, dict[int, str]] = {
    "check": {CHECK_NEVER: "off", CHECK_ONCE: "once", CHECK_ALWAYS: "always"},
    "exclude_stragglers": {0: "off", 1: "on"},
    "measure_links": {0: "off", 1: "on"},
}
"""What a person wrote for a number, where that was a word."""


def differences(job: Rules, node: Rules) -> str:
    """One sentence that names what differs; empty when nothing does."""
    # Those that nobody can set follow from others.
    names = [field.name for field in fields(Rules) if field.name not in ("store", "unnoticed")]
    names = [name for name in names if getattr(job, name) != getattr(node, name)]
    if not names:
        return ""
    said = (f"{_FLAGS.get(name, name)} is {_shown(job, name)}, not {_shown(node, name)}" for name in names)
    return f"the rules of the job's first node hold: {'; '.join(said)}"[:2000]


def _shown(rules: Rules, name: str) -> object:
    value = getattr(rules, name)
    return _WORDS.get(name, {}).get(value, value)
