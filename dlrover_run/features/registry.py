"""What the features of the list bring to the records and to the decisions of a job, imported where a job has it."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from dlrover_run.coordination.records.parts import Part
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features import FEATURES, Feature
from dlrover_run.words import reasons

if TYPE_CHECKING:
    from dlrover_run.coordination.decide import Job


class Source(NamedTuple):
    """Where a part of the records comes from: `name` is that of the part, and `feature` the one that has it."""

    name: str
    feature: Feature

    def module(self, name: str) -> str:
        """The full name of one of its modules."""
        return self.feature.deciding_module(self.name, name)


PARTS: dict[str, Source] = {}
"""Where each part of the records comes from, by its name, in the order of the features."""


def add(feature: Feature) -> None:
    """Add the parts of a feature, with the prefixes of their codes."""
    for name, prefix in feature.parts.items():
        PARTS[name] = Source(name, feature)
        reasons.TEXTS[prefix] = PARTS[name].module("text")


for _feature in FEATURES:
    add(_feature)


@lru_cache(maxsize=64)
def job_of(rules: JobRules) -> Job:
    """The job with these rules, and with the features that they ask for, in the order of the list."""
    # Imported by what decides; a node of a job only reads the records.
    from dlrover_run.coordination.decide import Job
    from dlrover_run.coordination.gate import OpenGate
    from dlrover_run.coordination.rounds.round_engine import ROUNDS, RoundEngine

    applied = {part.feature: part for part in rules.parts if part.applies and not (rules.engine and part.needs_rounds)}
    kinds = {name: applied[name].kind for name in PARTS if name in applied}
    classes = {name: getattr(import_module(PARTS[name].module(kind)), kind.upper()) for name, kind in kinds.items()}
    observers = {name: classes[name](rules) for name, kind in kinds.items() if kind == "observer"}
    if rules.engine:
        return Job(rules, observers, classes[rules.engine](rules), rules.engine)
    gate = next((classes[name](rules) for name, kind in kinds.items() if kind == "gate"), None)
    engine = RoundEngine(rules, gate or OpenGate(rules))
    return Job(rules, observers, engine, ROUNDS, engine.gate.name)


def decode_part(kind: type[Any], value: Any) -> Any:
    """Decode a part of a record; the `dec_hook` of every decoder of a record that has parts. Raises ValueError if no
    feature has that part."""
    assert issubclass(kind, Part), "only a part of a feature needs this hook"
    name = value.get("type") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise ValueError("a part of a record names no feature")
    records = import_module(PARTS[name].module("rules")).RECORDS if name in PARTS else ()
    record: type[Part] | None = next((record for record in records if issubclass(record, kind)), None)
    if record is None:
        raise ValueError(f"no feature {name[:100]!r} with a {kind.__name__}")
    return msgspec.convert(value, record)
