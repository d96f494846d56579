"""What a person is told whose node has other rules than the job that it joins."""

from __future__ import annotations

from dataclasses import fields

from dlrover_run.coordination.rules import Rules

_FLAGS = {
    "least": "--nnodes (least)",
    "most": "--nnodes (most)",
    "unit": "--node-unit",
    "spares": "--spares",
    "max_restarts": "--max-restarts",
}


def differences(job: Rules, node: Rules) -> str:
    """One sentence that names what differs; empty when nothing does."""
    # Those that nobody can set follow from others.
    names = [field.name for field in fields(Rules) if field.name not in ("store", "unnoticed")]
    names = [name for name in names if getattr(job, name) != getattr(node, name)]
    if not names:
        return ""
    said = (f"{_FLAGS.get(name, name)} is {getattr(job, name)}, not {getattr(node, name)}" for name in names)
    return f"the rules of the job's first node hold: {'; '.join(said)}"[:2000]
