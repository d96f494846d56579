"""What must hold in every run of every program, at every step: each law is checked where it could be broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlrover_run.coordination.decide import decide
from dlrover_run.coordination.decision import Decision
from dlrover_run.coordination.membership import Members
from dlrover_run.coordination.model import OVER, Assignment, NodeKey, NodeReport, Plan, RoundKey
from dlrover_run.coordination.policy import Policy
from dlrover_run.coordination.rules import JobRules
from simulation.timeline import demand

UNSEEN_SLEEP = 0.4
"""Seconds that a master may have been stopped for without noticing, and a little more."""

Decide = Callable[[Policy, Plan, Members, float], Decision]


class Laws:
    """Watches one run. `durable` says that its masters have a journal, so that no round is forgotten before the
    job is over.

    `nodes_stay` says that no node goes or is cut off, whatever happens to masters, so far; `calm` that whoever is
    silent is gone, and that all others answer in time.
    """

    def __init__(self, rules: JobRules, durable: bool, nodes_stay: bool) -> None:
        self._rules = rules
        self._durable = durable
        self.nodes_stay = nodes_stay
        self.over: Plan | None = None
        self.slow_disk = False
        self.calm = False
        self.cut_off: set[NodeKey] = set()
        self._due: dict[int, float | None] = {}
        self._received: dict[NodeKey, RoundKey] = {}
        self._obeyed: dict[NodeKey, int] = {}
        self._reached: dict[NodeKey, float] = {}

    def reaching(self, node: NodeKey, now: float) -> None:
        """The node has reached the coordinator or the machine of another node."""
        self._reached[node] = now

    def giving_up(self, node: NodeKey, timeout: float, now: float) -> None:
        """A node ends because it is cut off."""
        demand(not self.nodes_stay, "a node ends as cut off only where a network is cut or machines are lost")
        demand(now - self._reached[node] >= timeout, "a node that reaches another one is not cut off")
        self.cut_off.add(node)

    def deciding(self, policy: Policy, plan: Plan, present: Members, now: float, real: Decide = decide) -> Decision:
        """`decide`, with everything that holds for one decision."""
        decision = real(policy, plan, present, now)
        after = decision.plan
        again = real(policy, after, present, now)
        demand(again.plan == after, "deciding twice gives the same plan")
        demand(again.wake_at is None or again.wake_at > now, "nobody is to be woken at a time that has passed")
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

    def _check_state(self, plan: Plan, after: Plan, present: Members, now: float) -> None:
        """What holds of each decision, also of one that changes nothing."""

    def _check_change(self, plan: Plan, after: Plan, present: Members, now: float) -> None:
        """What holds of a decision that changes the plan."""
        if after.phase in OVER:
            self.over = after

    def adopting(self, fresh: Plan, *given: Any, real: Any) -> Plan | None:
        """`recover_plan`: until it has returned a plan no other deadline falls due."""
        self._due.pop(fresh.epoch, None)
        adopted: Plan | None = real(fresh, *given)
        return adopted

    def _check_promptness(self, epoch: int, decision: Decision, present: Members, now: float) -> None:
        """What falls due is decided when it is due. A coordinator's sleep does not count, but for what it overlooks."""
        if decision.plan.phase in OVER:
            return
        due = self._due.get(epoch)
        demand(due is None or self.slow_disk or now < due + UNSEEN_SLEEP, "what falls due is decided when it is due")
        times = [p.lost_at for p in present.values() if p.lost_at is not None and p.lost_at > now and not p.has_left]
        times += [] if decision.wake_at is None else [decision.wake_at]
        self._due[epoch] = min(times, default=None)

    def writing(self, owns: bool) -> None:
        """A master writes to the journal; `owns` says whether no other one has taken it over."""
        demand(owns, "only the master that took over the journal last writes to it")

    def storing(self, before: Plan | None, after: Plan, now: float) -> None:
        """A plan has become durable; `now` is everybody's time."""

    def sending(self, known: Plan | None, wanted: Assignment) -> None:
        """A coordinator sends an assignment; `known` is the plan that is durable."""
        if wanted.key.number or wanted.phase in OVER:
            demand(known is not None, "a plan is stored before anybody is told")
            assert known is not None
            same = (known.key, known.phase, known.restart_count) == (wanted.key, wanted.phase, wanted.restart_count)
            demand(same, "a plan is stored before anybody is told")

    def forgetting(self, all_have_left: bool = False) -> None:
        """The journal is removed. Who comes after the end begins another job, with what he still knows of the last."""
        if self.over is not None or all_have_left:
            self._durable = False

    def receiving(self, key: NodeKey, wanted: Assignment) -> None:
        """A node hears the coordinator that it obeys."""
        if self._durable or self.nodes_stay:
            demand(wanted.key >= self._received.get(key, RoundKey()), "nobody is told of a round before his last one")
            self._received[key] = wanted.key

    def taking(self, key: NodeKey, wanted: Assignment) -> None:
        """A node does what a coordinator wants."""
        demand(wanted.epoch >= self._obeyed.get(key, 0), "nobody obeys a coordinator that has a successor")
        self._obeyed[key] = wanted.epoch

    def admitting(self, status: NodeReport, present: Members) -> None:
        """A coordinator has taken a status: of two processes with one id at most one is connected."""
        twins = [key for key, p in present.items() if key.node_id == status.node_id and p.connected]
        demand(len(twins) <= 1, f"two processes are the node {status.node_id}")
