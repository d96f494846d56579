"""The invariants of nodes that join a running job: what they prepare delays no round, and a round waits for nothing
else."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.round import NodeKey, RoundKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.words.reasons import Code
from simulation.timeline import demand
from simulation.torch.preparation import REACTION

UNDISTURBED = (NodePhase.WAITING, NodePhase.RUNNING)
"""The phases of a node whose workers start or work."""


class NewcomerInvariants:
    """Checks one run. `joined_ready` counts rounds that newcomers have begun which had prepared before."""

    def __init__(self, rules: JobRules) -> None:
        self._rules = rules
        self._prepared: set[NodeKey] = set()
        self._ready_at: dict[NodeKey, float] = {}
        self._joinable_since: dict[int, dict[tuple[RoundKey, NodeKey], float]] = {}
        self.joined_ready = 0
        self.clock: Callable[[], float] = lambda: 0.0
        """Returns the time of the run."""

    def note_ready(self, key: NodeKey) -> None:
        """Note that a node has prepared, whatever a coordinator knows of that."""
        self._ready_at[key] = self.clock()

    def check(self, plan: Plan, after: Plan, present: Nodes, now: float, *, is_slow: bool, checks: bool) -> None:
        """Check a decision. If it `is_slow`, no time is demanded; `checks`: nodes are checked before they join."""
        self._prepared |= {key for key, state in present.items() if state.report.preparing}
        if plan.phase is PlanPhase.TRAINING and after.reasons != plan.reasons and Code.SCALED_UP.within(after.reasons):
            self._check_growth(plan, after, present, now)
        if checks or after.wanted_nodes:
            self._joinable_since.clear()
            return
        self._check_gathering(after, present, now)
        joinable = [state.report.key for state in self._joinable(after, present)]
        latest = self._rules.scale_up_delay + (self._rules.scale_wait if after.saves else 0.0) + REACTION
        # Another master may decide for the same job meanwhile: what it knows says nothing of this one.
        since = self._joinable_since.setdefault(plan.epoch, {})
        for (_, key), at in since.items():
            demand(is_slow or now < at + latest, f"{key.node_id} is ready, and is taken in by its deadline")
        self._joinable_since[after.epoch] = {(after.key, key): since.get((after.key, key), now) for key in joinable}

    def _check_growth(self, plan: Plan, after: Plan, present: Nodes, now: float) -> None:
        """A round that has not ended otherwise is interrupted by newcomers that are ready."""
        rules, ready = sized(self._rules, plan), newcomers(plan, present)
        demand(bool(ready), "no round is interrupted for a newcomer that prepares")
        taken = {member.key for member in after.members} - {member.key for member in plan.members}
        if after.phase is PlanPhase.TRAINING:
            demand(taken <= {state.report.key for state in ready}, "a newcomer that prepares keeps no round waiting")
        full = rules.size(len(plan.members) + len(ready)) >= (plan.wanted_nodes or rules.max_size)
        waited = max(self._waited(state, now) for state in ready)
        due = waited >= rules.scale_up_delay - REACTION
        demand(full or due, "a round that grows waits for more newcomers for as long as was asked")
        self.joined_ready += bool(taken & self._prepared)

    def _waited(self, state: KnownNode, now: float) -> float:
        """For how long the node could have been in a round, at the job time `now`."""
        ready_at = self._ready_at.get(state.report.key)
        return now - state.joined_at if ready_at is None else self.clock() - ready_at

    def is_held(self, plan: Plan, now: float) -> bool:
        """Whether a policy keeps the nodes busy before the next round. A program with such a policy replaces this."""
        return False

    def _check_gathering(self, plan: Plan, present: Nodes, now: float) -> None:
        """After a round has ended, the next one waits only for what is not known of its nodes, or for a policy."""
        if plan.phase is not PlanPhase.GATHERING or not plan.key.number or self.is_held(plan, now):
            return
        able = [state for key, state in present.items() if state.is_available and key not in plan.draining]
        known = all(state.connected or state.is_lost(now) or state.has_left for state in present.values())
        waits = known and sized(self._rules, plan).size(len(able)) and up_to_date(plan, able)
        demand(not waits, "a job with enough nodes does not wait for one that prepares")

    def _joinable(self, plan: Plan, present: Nodes) -> list[KnownNode]:
        """The nodes that could join the round of the plan now, if it is undisturbed."""
        members = [present.get(member.key) for member in plan.members]
        works = all(
            state and state.connected and state.report.in_round(plan.key) and state.report.phase in UNDISTURBED
            for state in members
        )
        if plan.phase is not PlanPhase.TRAINING or not works or plan.to_drain:
            return []
        if any(member.key in plan.draining for member in plan.members):
            return []
        ready = newcomers(plan, present)
        grows = sized(self._rules, plan).size(len(members) + len(ready)) > len(members)
        # The first of them by rank holds the next store.
        return ready if grows and up_to_date(plan, [*filter(None, members), *ready]) else []


def newcomers(plan: Plan, present: Nodes) -> list[KnownNode]:
    """The nodes that are not in the round of the plan, and that could be in the next one without further imports."""
    apart = {*(member.key for member in plan.members), *plan.draining, *plan.to_drain}
    return [p for key, p in present.items() if p.is_available and key not in apart and not p.report.preparing]


def preparing_newcomers(plan: Plan, present: Nodes) -> list[KnownNode]:
    """The nodes that are not in the round of the plan, and that still prepare."""
    members = {member.key for member in plan.members}
    return [p for key, p in present.items() if key not in members and p.report.preparing]


def up_to_date(plan: Plan, states: Iterable[KnownNode]) -> bool:
    """Whether each of these nodes knows the round of the plan and its coordinator, so that it holds another port."""
    return all((p.report.known_round, p.report.epoch) == (plan.key, plan.epoch) for p in states)


def sized(rules: JobRules, plan: Plan) -> JobRules:
    """The rules with the size that an operator has requested."""
    if plan.desired is None:
        return rules
    return msgspec.structs.replace(rules, min_nodes=plan.desired.min_nodes, max_nodes=plan.desired.max_nodes)
