"""One decision: from the rules, the plan, the nodes and the job time to the next plan.

Here is the order: the observers, then the engine, which asks the gate of the job while it gathers nodes and while a
round runs. What an operator has requested is in the plan before (`Coordinator`).

Pure: no clock, no socket, no thread. Idempotent: calling it again with the same inputs returns the same plan, so no
restart is lost or repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dlrover_run.coordination.decision import (
    MAX_STEPS,
    Change,
    Deadline,
    Decision,
    Unsettled,
    Wait,
    changed_by,
    update_plan,
)
from dlrover_run.coordination.engine import Engine
from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.observer import Observation, Observer
from dlrover_run.coordination.records.plan import OVER, Plan
from dlrover_run.coordination.records.rules import JobRules


class Job(NamedTuple):
    """The rules of a job, the observers that it has, by the names of their features, and its engine with its name.
    `gate_name` is the feature of the gate that the engine asks, empty in a job without one."""

    rules: JobRules
    observers: Mapping[str, Observer]
    engine: Engine
    engine_name: str
    gate_name: str = ""

    @property
    def order(self) -> str:
        """A line for the debug log: who is asked in a decision, in this order."""
        asked = ", ".join((*self.observers, self.engine_name))
        return f"each decision asks {asked}" + (f", which asks the gate {self.gate_name}" if self.gate_name else "")


def decide(job: Job, plan: Plan, nodes: Nodes, now: float) -> Decision:
    """The plan that follows from `plan` once the nodes are as in `nodes` at job time `now`; `plan` itself when
    nothing has to change."""
    if plan.phase in OVER:
        return Decision(plan)
    steps = Steps(plan, now)
    for _ in range(MAX_STEPS):
        for name, observer in job.observers.items():
            steps.note(name, observer.observe(steps.plan, nodes, now))
        if not steps.take(job.engine_name, job.engine.decide(steps.plan, nodes, now)):
            return steps.decision
    raise Unsettled


class Steps:
    """The steps of one decision, each with its author."""

    def __init__(self, plan: Plan, now: float) -> None:
        self.plan = plan
        self._now = now
        self._deadlines: list[Deadline] = []
        self._log_lines: list[str] = []
        self._changes: list[Change] = []
        self._wait: Wait | None = None

    @property
    def decision(self) -> Decision:
        """What the steps come to."""
        lines, changes = tuple(self._log_lines), tuple(self._changes)
        return Decision(self.plan, tuple(self._deadlines), lines, self._wait, changes=changes)

    def note(self, author: str, observation: Observation) -> None:
        """Take what an observer has found."""
        part, deadlines, log_lines = observation
        plan = self.plan if part is None else update_plan(self.plan, self._now, part=part)
        self._add(author, Decision(plan, deadlines, log_lines))

    def take(self, author: str, decision: Decision) -> bool:
        """Take what the engine has decided; return whether all are to be asked once more."""
        self._add(author, decision)
        self._wait = decision.wait
        if decision.again or decision.plan.phase in OVER:
            # Those of the plan that follows count.
            self._deadlines.clear()
        return decision.again

    def _add(self, author: str, decision: Decision) -> None:
        for change in decision.changes:
            self._changes += (*changed_by(author, self.plan, change.before), change)
            self.plan = change.plan
        self._changes += changed_by(author, self.plan, decision.plan)
        self.plan = decision.plan
        self._deadlines += decision.deadlines
        self._log_lines += decision.log_lines
