"""What nodes report of workers that make no progress, and what the coordinator finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.assignment import AssignmentPart
from dlrover_run.coordination.records.bounds import Count, Name, Total
from dlrover_run.coordination.records.plan import PlanPart
from dlrover_run.coordination.records.report import ReportPart
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.features.hangs.search.suspects import Suspect
from dlrover_run.words.reasons import BoundedReasons

if TYPE_CHECKING:
    from dlrover_run.coordination.records.plan import Plan
    from dlrover_run.coordination.records.report import NodeReport

MAX_SUSPECTS = 256
"""Workers of one node that are reported. A node that has more reports none, and no stall of its rounds is found."""

MAX_GUILTY = 64
"""Workers that a finding names."""

Ranks = Annotated[tuple[Total, ...], Meta(max_length=MAX_GUILTY)]


class StallQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Do other workers of the round `key` train, while some are quiet? A node answers for the time since it received
    the question, so that clocks of nodes are not compared: the workers were quiet before."""

    key: RoundKey
    number: Total


class StallNodeReport(
    msgspec.Struct, ReportPart, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag="stalls"
):
    """The workers of the node make no progress, for the `number`th time in the round that the report is about; with
    `partly` only the `suspects`. `trains` is that of `features.hangs.search.guilt.find_stall`. A node whose workers
    make progress has such a part only to answer the question `answered`: `witnesses` of its workers train. `early` is
    that of `features.hangs.search.detector.Stalled`."""

    number: Count = 0
    trains: bool = False
    suspects: Annotated[tuple[Suspect, ...], Meta(max_length=MAX_SUSPECTS)] = ()
    partly: bool = False
    answered: Total = 0
    witnesses: Count = 0
    early: bool = False

    @property
    def is_quiet(self) -> bool:
        """Whether no worker of the node makes progress."""
        return bool(self.suspects) and not self.partly

    def problem(self, report: NodeReport, plan: Plan) -> str | None:
        ranks = [one.rank for one in self.suspects]
        if not report.owns(ranks):
            return f"{report.host} reports a stall of ranks that are not its own"
        return None


class StallFinding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No worker of the round `key` makes progress. The others wait for the workers `ranks`, on the nodes `nodes`, both
    empty if the evidence names none; `reasons` continues their names. A restart kills the workers `to_restart`. With
    `alone` other workers train, and `number` is that of the question that showed it.

    Otherwise `number` grows with each stall of the round, so that a node acts on each once.
    """

    key: RoundKey
    number: Total
    ranks: Ranks
    nodes: Annotated[tuple[Name, ...], Meta(max_length=MAX_GUILTY)]
    reasons: BoundedReasons
    to_restart: Ranks
    alone: bool = False


class StallState(msgspec.Struct, PlanPart, frozen=True, forbid_unknown_fields=True, tag="stalls"):
    """The stall of the round that runs, None while there is none, and what nodes are asked about it."""

    finding: StallFinding | None = None
    question: StallQuestion | None = None


class StallAssignment(msgspec.Struct, AssignmentPart, frozen=True, forbid_unknown_fields=True, tag="stalls"):
    """The stall of the round in which the node has ranks, and the question that it is to answer."""

    finding: StallFinding | None = None
    question: StallQuestion | None = None
