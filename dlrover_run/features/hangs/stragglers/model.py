"""What nodes report of the time of their workers, and which of them the coordinator finds to be stragglers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.assignment import AssignmentPart
from dlrover_run.coordination.records.plan import PlanPart
from dlrover_run.coordination.records.report import ReportPart
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.features.hangs.stragglers.finding import MAX_STRAGGLERS, Straggler
from dlrover_run.features.hangs.stragglers.shares import Shares

if TYPE_CHECKING:
    from dlrover_run.coordination.records.plan import Plan
    from dlrover_run.coordination.records.report import NodeReport

MAX_REPORTED = 256
"""Workers of one node that are reported. A node that has more reports none, and its job has no stragglers."""

MAX_NOTED = 3
"""Stragglers that are described in one note."""

Stragglers = Annotated[tuple[Straggler, ...], Meta(max_length=MAX_STRAGGLERS)]


class StragglerNodeReport(msgspec.Struct, ReportPart, frozen=True, forbid_unknown_fields=True, tag="stragglers"):
    """The shares of the time of each worker of the node, in the round that the report is about. A node without such a
    part does not know them."""

    shares: Annotated[tuple[Shares, ...], Meta(max_length=MAX_REPORTED)] = ()

    def problem(self, report: NodeReport, plan: Plan) -> str | None:
        ranks = [one.rank for one in self.shares]
        if not report.owns(ranks):
            return f"{report.host} reports the time of ranks that are not its own"
        return None


class StragglerState(msgspec.Struct, PlanPart, frozen=True, forbid_unknown_fields=True, tag="stragglers"):
    """The stragglers of the round that runs."""

    stragglers: Stragglers = ()


class StragglerAssignment(msgspec.Struct, AssignmentPart, frozen=True, forbid_unknown_fields=True, tag="stragglers"):
    """The stragglers of one node in the round `key`. A node without any has no such part."""

    key: RoundKey
    found: Stragglers

    @property
    def note(self) -> str:
        shown = [one.text for one in self.found[:MAX_NOTED]]
        more = len(self.found) - MAX_NOTED
        return "; ".join([*shown, f"and {more} more"] if more > 0 else shown)

    @property
    def slow_ranks(self) -> tuple[tuple[int, str], ...]:
        return tuple((one.rank, one.cause) for one in self.found)
