"""The records of the warm-up."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from dlrover_run.coordination.records.assignment import AssignmentPart, WaitingPart
from dlrover_run.coordination.records.plan import PlanPart
from dlrover_run.coordination.records.report import ReportPart
from dlrover_run.coordination.records.round import Member
from dlrover_run.coordination.records.rules import Kind, RulesPart


class WarmUpRules(msgspec.Struct, RulesPart, frozen=True, forbid_unknown_fields=True, tag="warm_up"):
    """A warm-up takes that many seconds, 0 for none."""

    seconds: float = 0.0

    kind: ClassVar[Kind] = "gate"

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

    @property
    def has_held(self) -> bool:
        """Whether there was a warm-up before."""
        return self.count > 0

    def expected(self) -> list[Member]:
        """Return the nodes that warm up."""
        return [Member(*key, "", 0) for key in self.warming]

    def at_end(self) -> WarmUpState:
        """Return the state without a warm-up."""
        return msgspec.structs.replace(self, warming=())


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
