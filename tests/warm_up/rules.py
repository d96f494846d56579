"""The records of the warm-up."""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.parts import (
    AssignmentPart,
    PlanPart,
    ReportPart,
    RulesPart,
    WaitingPart,
)


class WarmUpRules(msgspec.Struct, RulesPart, frozen=True, forbid_unknown_fields=True, tag="warm_up"):
    """A warm-up takes that many seconds, 0 for none."""

    seconds: float = 0.0

    @property
    def applies(self) -> bool:
        """Whether there is a warm-up."""
        return self.seconds > 0


class WarmUpState(msgspec.Struct, PlanPart, frozen=True, forbid_unknown_fields=True, tag="warm_up"):
    """Which processes warm up, since when, and which are warm. `count` warm-ups have begun."""

    count: int = 0
    since: float = 0.0
    warming: tuple[tuple[str, str], ...] = ()
    warm: tuple[tuple[str, str], ...] = ()


class WarmUpReport(msgspec.Struct, ReportPart, frozen=True, forbid_unknown_fields=True, tag="warm_up"):
    """How warm a node is."""

    degrees: int = 0


class WarmUpAssignment(msgspec.Struct, AssignmentPart, frozen=True, forbid_unknown_fields=True, tag="warm_up"):
    """The warm-up that a node takes part in."""

    number: int = 0


class WarmUpProgress(msgspec.Struct, WaitingPart, frozen=True, forbid_unknown_fields=True, tag="warm_up"):
    """How many nodes warm up."""

    nodes: int = 0


RECORDS = (WarmUpRules, WarmUpState, WarmUpReport, WarmUpAssignment, WarmUpProgress)
