"""The invariants of every run of every program: each is checked at the step that could break it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlrover_run.coordination.decide import Job, decide
from dlrover_run.coordination.decision import Decision
from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import OVER, Plan
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.requests import OperatorRequest
from dlrover_run.coordination.records.round import NodeKey, RoundKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.job_status.status import JobStatus
from dlrover_run.rendezvous.client import AskFailed
from simulation.timeline import demand

UNSEEN_SLEEP = 0.4
"""Seconds for which a master may have been stopped without noticing it, plus a margin."""

Decide = Callable[[Job, Plan, Nodes, float], Decision]


class Invariants:
    """Checks the invariants of one run. If `durable`, its masters have a journal, so no round is lost before the job is
    over.

    If `nodes_stay`, no node has left or was cut off so far, whatever happens to masters. If `calm`, each node without
    heartbeats has ended, and all others answer in time.
    """

    def __init__(self, rules: JobRules, durable: bool, nodes_stay: bool) -> None:
        self._rules = rules
        self._durable = durable
        self.nodes_stay = nodes_stay
        self.over: Plan | None = None
        self.slow_disk = False
        self.calm = False
        self.internal_errors_allowed = False
        self.cut_off: set[NodeKey] = set()
        self._due: dict[int, float | None] = {}
        self._received: dict[NodeKey, RoundKey] = {}
        self._obeyed: dict[NodeKey, int] = {}
        self._reached: dict[NodeKey, float] = {}

    def reaching(self, node: NodeKey, now: float) -> None:
        """Note that the node has reached the coordinator, or the machine of another node."""
        self._reached[node] = now

    def giving_up(self, node: NodeKey, timeout: float, now: float) -> None:
        """Check a node that ends because it is cut off."""
        demand(not self.nodes_stay, "a node ends as cut off only where a network is cut or machines are lost")
        demand(now - self._reached[node] >= timeout, "a node that reaches another one is not cut off")
        self.cut_off.add(node)

    def deciding(self, job: Job, plan: Plan, present: Nodes, now: float, real: Decide = decide) -> Decision:
        """Call `decide`, and check the invariants of a single decision."""
        decision = real(job, plan, present, now)
        after = decision.plan
        again = real(job, after, present, now)
        demand(again.plan == after, "deciding twice gives the same plan")
        demand(again.wake_at is None or again.wake_at > now, "the next deadline of a decision is not in the past")
        self._check_promptness(after.epoch, again, present, now)
        self._check_state(plan, after, present, now)
        if after is plan:
            return decision
        demand(plan.phase not in OVER, "a job that is over stays so")
        demand(after.epoch == plan.epoch, "a coordinator decides in its own epoch")
        demand(after.clock == now, "a plan says when it was written")
        demand(bool(after.reasons), "a plan says why")
        self._check_change(plan, after, present, now)
        return decision

    def _check_state(self, plan: Plan, after: Plan, present: Nodes, now: float) -> None:
        """Check the invariants of each decision, also of a decision that changes nothing."""

    def _check_change(self, plan: Plan, after: Plan, present: Nodes, now: float) -> None:
        """Check the invariants of a decision that changes the plan."""
        if after.phase in OVER:
            self.over = after

    def adopting(self, fresh: Plan, *given: Any, real: Any) -> Plan | None:
        """Call `recover_plan`: until it has returned a plan, no other deadline is due."""
        self._due.pop(fresh.epoch, None)
        adopted: Plan | None = real(fresh, *given)
        return adopted

    def _check_promptness(self, epoch: int, decision: Decision, present: Nodes, now: float) -> None:
        """Check that each deadline is decided when it is due. The time for which a coordinator was stopped does not
        count, apart from the part that it cannot notice."""
        if decision.plan.phase in OVER:
            return
        due = self._due.get(epoch)
        demand(due is None or self.slow_disk or now < due + UNSEEN_SLEEP, "a deadline is decided when it is due")
        times = [p.lost_at for p in present.values() if p.lost_at is not None and p.lost_at > now and not p.has_left]
        times += [] if decision.wake_at is None else [decision.wake_at]
        self._due[epoch] = min(times, default=None)

    def writing(self, owns: bool) -> None:
        """Check a write of a master to the journal; `owns`: no other master has taken the journal over."""
        demand(owns, "only the master that took over the journal last writes to it")

    def storing(self, before: Plan | None, after: Plan, now: float) -> None:
        """Check a plan that has become durable; `now` is the time of the run."""

    def asking(self, request: OperatorRequest) -> None:
        """Note that an operator makes a request."""

    def answered(self, request: OperatorRequest, answer: JobStatus | AskFailed) -> None:
        """Check what an operator gets."""

    def sending(self, known: Plan | None, wanted: Assignment) -> None:
        """Check an assignment that a coordinator sends; `known` is the durable plan."""
        if wanted.key.number or wanted.phase in OVER:
            demand(known is not None, "a plan is stored before it is sent to a node")
            assert known is not None
            same = (known.key, known.phase, known.restart_count) == (wanted.key, wanted.phase, wanted.restart_count)
            demand(same, "a plan is stored before it is sent to a node")

    def forgetting(self, all_have_left: bool = False) -> None:
        """Note that the journal is removed. A node that joins after the end begins another job, with what it still
        knows of the last job."""
        if self.over is not None or all_have_left:
            self._durable = False

    def receiving(self, key: NodeKey, wanted: Assignment) -> None:
        """Check an assignment that a node has received from the coordinator that it obeys."""
        if self._durable or self.nodes_stay:
            demand(wanted.key >= self._received.get(key, RoundKey()), "no node receives a round before its last one")
            self._received[key] = wanted.key

    def taking(self, key: NodeKey, wanted: Assignment) -> None:
        """Check an assignment that a node carries out."""
        demand(wanted.epoch >= self._obeyed.get(key, 0), "no node obeys a coordinator that has a successor")
        self._obeyed[key] = wanted.epoch

    def admitting(self, status: NodeReport, present: Nodes) -> None:
        """Check a report that a coordinator has accepted: at most one of two processes with one id is connected."""
        twins = [key for key, p in present.items() if key.node_id == status.node_id and p.connected]
        demand(len(twins) <= 1, f"two processes are the node {status.node_id}")
