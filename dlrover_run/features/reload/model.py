"""What a node reports of saved files, and what the coordinator notes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.plan import PlanPart
from dlrover_run.coordination.records.report import ReportPart
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.features.reload.text import ReloadCode
from dlrover_run.words.reasons import BoundedReasons, Reasons

if TYPE_CHECKING:
    from dlrover_run.coordination.records.plan import Plan

Token = Annotated[str, Meta(max_length=64)]


class ReloadReport(msgspec.Struct, ReportPart, frozen=True, forbid_unknown_fields=True, tag="reload"):
    """`token` is another one after each change that requests a restart, empty before the first, and `reasons` are why
    it does."""

    token: Token = ""
    reasons: BoundedReasons = ()


class ReloadState(msgspec.Struct, PlanPart, frozen=True, forbid_unknown_fields=True, tag="reload"):
    """`key` is the round to which the rest refers. `seen` is the token of its first node that counted last: what that
    node reports before a round is saved before its workers start. `due` is why the round is over; empty as long as
    nothing was saved."""

    key: RoundKey = RoundKey()
    seen: Token = ""
    due: BoundedReasons = ()

    def excuse_failure(self, plan: Plan) -> Reasons:
        """A failure waits for the next save, so a person limits how often."""
        return (ReloadCode.AFTER_FAILURE(),)

    def why_not_finished(self, plan: Plan) -> Reasons:
        return (ReloadCode.AFTER_SUCCESS(),)

    def why_over(self, plan: Plan) -> Reasons:
        return self.due if self.key == plan.key else ()

    def why_held(self, plan: Plan) -> Reasons:
        return () if self.why_over(plan) else held_by(plan.reasons)


def held_by(reasons: Reasons) -> Reasons:
    """What a job whose plan has these reasons waits for; empty if it does not wait for a save."""
    return tuple(code() for code in (ReloadCode.AFTER_FAILURE, ReloadCode.AFTER_SUCCESS) if code.within(reasons))
