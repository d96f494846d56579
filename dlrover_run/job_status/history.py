"""What has happened in a job since its coordinator began: a bounded list of changes of the plan, and counts of them."""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.job_status.status import STATES, JobState
from dlrover_run.words.reasons import Code, Reasons

MAX_CHANGES = 256
"""Changes that are kept; the oldest are dropped first."""


class JobChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the state or of the round. `number` counts the changes, from 1. `at` is the age of the job then, in
    seconds (`JobStatus.age`). `nodes` are those of the round that runs."""

    number: int
    at: float
    state: JobState
    round: int
    nodes: int
    restarts: int
    reason: str
    reasons: Reasons


_CAUSES = (
    (Code.WORKER_FAILED, "failure"),
    (Code.LOST, "node_lost"),
    (Code.LEFT_AFTER_FAILURE, "node_lost"),
    (Code.ENDED_BY_SIGNAL, "node_stopped"),
    (Code.LEFT_ON_REQUEST, "drain"),
    (Code.ASKED_TO_LEAVE, "drain"),
    (Code.SCALED_UP, "scale_up"),
    (Code.SCALED_DOWN, "scale_down"),
    (Code.RESIZED, "scale_down"),
)

CAUSES = (*dict.fromkeys(cause for _, cause in _CAUSES), "start")
"""Why there is a round."""


def round_cause(reasons: Reasons) -> str:
    """Why there is a round, by the first of its reasons that names one."""
    return next((cause for reason in reasons for code, cause in _CAUSES if code.within((reason,))), "start")


class JobHistory:
    """The changes of one job, and how many rounds there were for each cause."""

    def __init__(self) -> None:
        self.changes: deque[JobChange] = deque(maxlen=MAX_CHANGES)
        self.rounds: Counter[str] = Counter()
        self._count = 0

    def follow(self, before: Plan, plan: Plan) -> None:
        """Note what has changed from one plan to the next."""
        if (before.phase, before.key, before.reasons) == (plan.phase, plan.key, plan.reasons):
            return
        self._count += 1
        self.changes.append(
            JobChange(
                number=self._count,
                at=round(plan.clock, 3),
                state=STATES[plan.phase],
                round=plan.key.number,
                nodes=len(plan.members) if plan.phase is PlanPhase.TRAINING else 0,
                restarts=plan.restart_count,
                reason=plan.reason,
                reasons=plan.reasons,
            )
        )
        if plan.phase is PlanPhase.TRAINING and plan.key != before.key:
            self.rounds[round_cause(plan.reasons)] += 1
