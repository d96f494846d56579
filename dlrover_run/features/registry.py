"""The features that take part in decisions, one line each. A feature is imported only by jobs that have it.

The order is that in which a decision asks them.

A package has `rules.RECORDS`, its classes of `coordination.parts`, each with the feature's name as the tag; `text`,
which registers its codes, with that name as the prefix; and a module named after the `kind` of its rules, with its
class of that protocol: `observer.OBSERVER`, `gate.GATE` or `engine.ENGINE`.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from dlrover_run.coordination.parts import Part
from dlrover_run.coordination.rules import JobRules
from dlrover_run.words import reasons

if TYPE_CHECKING:
    from dlrover_run.coordination.job import Job

FEATURES = {
    "health": "dlrover_run.features.node_check.decision",
    "parameter_servers": "tf_ps_runner.cluster",
    "stall": "dlrover_run.features.hangs.stalls",
    "straggler": "dlrover_run.features.hangs.stragglers",
    "survivors": "dlrover_run.features.survivors",
    "autoscale": "dlrover_run.features.autoscale",
}

reasons.TEXTS.update((name, f"{package}.text") for name, package in FEATURES.items())


@lru_cache(maxsize=64)
def job_of(rules: JobRules) -> Job:
    """The job with these rules, and with the features that they ask for, in the order of `FEATURES`."""
    # Imported by what decides; a node of a job only reads the records.
    from dlrover_run.coordination.gate import OpenGate
    from dlrover_run.coordination.job import Job
    from dlrover_run.coordination.rounds import ROUNDS, RoundEngine

    applied = {part.feature: part for part in rules.parts if part.applies and not (rules.engine and part.needs_rounds)}
    kinds = {name: applied[name].kind for name in FEATURES if name in applied}
    classes = {name: getattr(import_module(f"{FEATURES[name]}.{kind}"), kind.upper()) for name, kind in kinds.items()}
    observers = {name: classes[name](rules) for name, kind in kinds.items() if kind == "observer"}
    if rules.engine:
        return Job(rules, observers, classes[rules.engine](rules), rules.engine)
    gate = next((classes[name](rules) for name, kind in kinds.items() if kind == "gate"), None)
    return Job(rules, observers, RoundEngine(rules, gate or OpenGate(rules)), ROUNDS)


def decode_part(kind: type[Any], value: Any) -> Any:
    """Decode a part of a record; the `dec_hook` of every decoder of a record that has parts. Raises ValueError if no
    feature has that part."""
    assert issubclass(kind, Part), "only a part of a feature needs this hook"
    name = value.get("type") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise ValueError("a part of a record names no feature")
    records = import_module(f"{FEATURES[name]}.rules").RECORDS if name in FEATURES else ()
    record: type[Part] | None = next((record for record in records if issubclass(record, kind)), None)
    if record is None:
        raise ValueError(f"no feature {name[:100]!r} with a {kind.__name__}")
    return msgspec.convert(value, record)
