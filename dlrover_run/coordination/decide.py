"""One decision: from the rules, the plan, the members and the job time to the next plan. The order in which all that
decide are asked stands here, and only here.

Pure: no clock, no socket, no thread. Idempotent: calling it again with the same inputs returns the same plan, so no
restart is lost or repeated.
"""

from __future__ import annotations

from dlrover_run.coordination.decision import MAX_STEPS, Deadline, Decision, Unsettled, update_plan
from dlrover_run.coordination.job import Job
from dlrover_run.coordination.membership import Members
from dlrover_run.coordination.model import OVER, Plan
from dlrover_run.coordination.observer import Observation
from dlrover_run.coordination.rounds import decide_round

ROUNDS = "rounds"
"""The author of what is decided of rounds."""


def decide(job: Job, plan: Plan, members: Members, now: float) -> Decision:
    """The plan that follows from `plan` once the nodes are as in `members` at job time `now`; `plan` itself when
    nothing has to change."""
    if plan.phase in OVER:
        return Decision(plan)
    steps = Steps(plan, now)
    for _ in range(MAX_STEPS):
        for name, observer in job.observers.items():
            steps.note(name, observer.observe(steps.plan, members, now))
        whole = job.policy.decide(steps.plan, members, now) or decide_round(job.policy, steps.plan, members, now)
        if not steps.take(ROUNDS, whole):
            return steps.decision
    raise Unsettled


class Steps:
    """The steps of one decision, each with its author."""

    def __init__(self, plan: Plan, now: float) -> None:
        self.plan = plan
        self._now = now
        self._deadlines: list[Deadline] = []
        self._log_lines: list[str] = []
        self._changes: list[str] = []

    @property
    def decision(self) -> Decision:
        return Decision(self.plan, tuple(self._deadlines), tuple(self._log_lines), changes=tuple(self._changes))

    def note(self, author: str, observation: Observation) -> None:
        """Take what an observer has found."""
        part, deadlines, log_lines = observation
        plan = self.plan if part is None else update_plan(self.plan, self._now, part=part)
        self._add(author, Decision(plan, deadlines, log_lines))

    def take(self, author: str, decision: Decision) -> bool:
        """Take what was decided of the nodes; return whether all are to be asked once more."""
        self._add(author, decision)
        if decision.again or decision.plan.phase in OVER:
            # Those of the plan that follows count.
            self._deadlines.clear()
        return decision.again

    def _add(self, author: str, decision: Decision) -> None:
        if decision.plan is not self.plan:
            fields = [name for name in Plan.__struct_fields__ if name != "clock"]
            changed = [name for name in fields if getattr(self.plan, name) != getattr(decision.plan, name)]
            self._changes.append(f"{author} changes {', '.join(changed)} of the plan")
        self.plan = decision.plan
        self._deadlines += (deadline._replace(author=author) for deadline in decision.deadlines)
        self._log_lines += decision.log_lines
