"""A second policy, registered by one line, beside the health check and beside parameter servers: records, seam, and
whole jobs in the simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from harness import only_long
from msgspec.structs import replace
from warm_up.policy import WarmUpPolicy
from warm_up.rules import WarmUpAssignment, WarmUpRules, WarmUpState

from dlrover_run.coordination import gathering
from dlrover_run.coordination.combined_policy import CombinedPolicy
from dlrover_run.coordination.decision import Deadline, DeadlineReason, Decision
from dlrover_run.coordination.membership import Members, MemberState
from dlrover_run.coordination.model import Assignment, NodeKey, Plan, PlanPhase, RankAssignment
from dlrover_run.coordination.parts import Memories, combine, join, split, with_part
from dlrover_run.coordination.policy import Policy
from dlrover_run.coordination.rules import JobRules
from dlrover_run.coordination.validation import config_mismatch
from dlrover_run.features import registry
from dlrover_run.features.node_check.decision.model import HealthAssignment, HealthState
from dlrover_run.features.node_check.decision.policy import HealthPolicy
from dlrover_run.features.node_check.decision.rules import CHECK_ONCE, HealthRules
from dlrover_run.rendezvous.client import AssignmentTracker
from dlrover_run.transport.messages import InvalidMessage, decode_rules, encode_rules
from dlrover_run.words import reasons
from simulation.parameter_servers import program as servers
from simulation.program import Program
from simulation.scenario import simulate
from simulation.seeds import NEAR, PLACES, Variant, patched, run_seeds
from simulation.timeline import Broken, demand
from simulation.torch import program as torch
from simulation.torch.newcomer_laws import NewcomerLaws
from simulation.torch.program import PreparingProgram
from tf_ps_runner.cluster.model import NAME, Cluster, RecoveryHint
from tf_ps_runner.cluster.orders import NodeOrder, OrderMemory
from tf_ps_runner.cluster.rules import ClusterRules

WARM_UP = WarmUpRules(0.5)
BOTH = JobRules(2, 4, parts=combine((HealthRules(check=CHECK_ONCE), WARM_UP)))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.POLICIES, "warm_up", "warm_up")
    monkeypatch.setitem(reasons.TEXTS, "warm_up", "warm_up.text")


def decoded(record: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(record), type=type(record), dec_hook=registry.decode_part)


def test_one_policy_is_not_combined() -> None:
    assert type(registry.job_of(JobRules()).policy) is Policy
    assert type(registry.job_of(JobRules(parts=(WARM_UP,))).policy) is WarmUpPolicy
    unused = combine((HealthRules(check=CHECK_ONCE), WarmUpRules()))
    assert type(registry.job_of(JobRules(parts=unused)).policy) is HealthPolicy
    assert type(registry.job_of(BOTH).policy) is CombinedPolicy
    state = HealthState(check_count=1)
    assert with_part((), state) == combine((HealthState(),), (state,)) == (state,)


def test_a_record_holds_the_parts_of_several_policies() -> None:
    plan = Plan(parts=with_part((WarmUpState(3),), HealthState(check_count=1)))
    assert decoded(plan) == plan == Plan(parts=with_part((HealthState(check_count=1),), WarmUpState(3)))
    assert (WarmUpState.get(plan.parts).count, HealthState.get(plan.parts).check_count) == (3, 1)
    assert Cluster.find(plan.parts) is None
    changed = with_part(plan.parts, WarmUpState(4))
    assert (WarmUpState.get(changed).count, HealthState.get(changed).check_count) == (4, 1)


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "health"}, {"type": "health"}],
        [{"type": "warm_up"}, {"type": "health"}],
        [{"type": "health"}, {"type": "unknown"}],
    ],
)
def test_parts_out_of_order_repeated_or_unknown_are_refused(parts: list[Any]) -> None:
    data = msgspec.json.encode({"parts": parts})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(data, type=Plan, dec_hook=registry.decode_part)


def test_rules_of_several_policies_are_sent_and_compared() -> None:
    assert decode_rules(encode_rules(BOTH)) == BOTH
    with pytest.raises(InvalidMessage):
        decode_rules({**encode_rules(BOTH), "unknown.seconds": 1})
    assert config_mismatch(BOTH, BOTH) == ""
    warmer = replace(BOTH, parts=with_part(BOTH.parts, WarmUpRules(2.0)))
    assert "seconds is 0.5, not 2" in config_mismatch(BOTH, warmer)


def test_a_node_keeps_and_remembers_the_part_of_each_policy() -> None:
    tracker = AssignmentTracker()
    order = NodeOrder(version=4, hint=RecoveryHint(version=4))
    tracker.take(Assignment(epoch=1, parts=with_part((order,), WarmUpAssignment(1))))
    # A new coordinator does not know the order yet, and has another part of the other policy.
    tracker.take(Assignment(epoch=2, parts=with_part((NodeOrder(version=4, keep=True),), WarmUpAssignment(2))))
    assert NodeOrder.find(tracker.assignment.parts) == order
    assert WarmUpAssignment.find(tracker.assignment.parts) == WarmUpAssignment(2)
    tracker.take(Assignment(epoch=2, parts=(WarmUpAssignment(3),)))
    assert tracker.memory == Memories({NAME: OrderMemory(RecoveryHint(version=4))})


def test_parts_that_all_nodes_receive_alike_are_split_off_and_joined() -> None:
    order = NodeOrder(version=4, servers=("a:1",), hint=RecoveryHint(version=4))
    whole = with_part((order,), HealthAssignment())
    common, own = split(whole)
    assert common
    assert join(own, common) == whole


VALUES = {"continued", "tasks", "has_rounds", "needs_gathering", "watches_spares"}


def test_a_combination_answers_whatever_one_policy_answers() -> None:
    combined = CombinedPolicy
    asked = {name for name in vars(combined.__bases__[-1]) if not name.startswith("_")}
    assert asked - VALUES <= vars(combined).keys()


def test_at_most_one_policy_decides_alone() -> None:
    alone = ClusterRules()
    assert JobRules(parts=with_part((alone,), WARM_UP)).problem() == JobRules(parts=(alone,)).problem()
    with patch.object(WarmUpRules, "has_rounds", False):
        assert "each decide alone" in str(JobRules(parts=with_part((alone,), WARM_UP)).problem())


class Watched:
    """Checks the law that each node with a rank is warm, and counts how often both policies had a part in the plan."""

    def __init__(self) -> None:
        self.combined = 0

    def tasks(self, policy: WarmUpPolicy, plan: Plan, ranks: dict[NodeKey, RankAssignment]) -> Any:
        if plan.phase is PlanPhase.TRAINING:
            warm = {NodeKey(*key) for key in WarmUpState.get(plan.parts).warm}
            demand(ranks.keys() <= warm, "no node trains that is not warm")
            self.combined += bool(warm) and len(plan.parts) > 1
        return real_tasks(policy, plan, ranks)


real_tasks = WarmUpPolicy.tasks


def _with_warm_up(program: type[Program]) -> Callable[[Any, Random], JobRules]:
    """Return the method that makes the rules of such a program, with a warm-up."""
    real = program.rules

    def rules(self: Any, random: Random) -> JobRules:
        made = real(self, random)
        return replace(made, parts=with_part(made.parts, WARM_UP))

    return rules


def is_warming(laws: NewcomerLaws, plan: Plan, now: float) -> bool:
    """Whether the nodes of the next round warm up, which takes no longer than the rules say."""
    state = WarmUpState.get(plan.parts)
    return bool(state.warming) and now < state.since + WARM_UP.seconds


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched()
    with (
        patch.object(torch.TorchProgram, "rules", _with_warm_up(torch.TorchProgram)),
        patch.object(servers.ServersProgram, "rules", _with_warm_up(servers.ServersProgram)),
        patch.object(NewcomerLaws, "is_held", is_warming),
        patch.object(WarmUpPolicy, "tasks", lambda policy, plan, ranks: found.tasks(policy, plan, ranks)),
    ):
        yield found


LONG = [(program, 0, 1000) for program in (torch.TorchProgram, servers.ServersProgram)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("program", "first", "count"), [(torch.TorchProgram, 33, 4), (servers.ServersProgram, 0, 2), *only_long(*LONG)]
)
@pytest.mark.parametrize("place", PLACES)
def test_jobs_with_two_policies_keep_every_law(
    place: str, program: type[Program], first: int, count: int, watched: Watched
) -> None:
    run_seeds(partial(simulate, kind=PLACES[place], program=program), first, count)
    # Not every torch job has a health check.
    assert watched.combined > count // 10


def test_a_policy_that_is_not_asked_is_found(watched: Watched) -> None:
    def begin_first(self: CombinedPolicy, *given: Any) -> Plan | None:
        return self._policies[0].begin(*given)

    with patch.object(CombinedPolicy, "begin", begin_first), pytest.raises(Broken, match="not warm"):
        simulate(36)


def without_those_that_prepare(policy: Policy, plan: Plan, members: Members) -> list[MemberState]:
    return [state for state in real_eligible(policy, plan, members) if not state.report.preparing]


def hold_after_the_end(self: WarmUpPolicy, plan: Plan, members: Members, now: float) -> Decision:
    """The nodes that are warm are kept for two seconds more."""
    done = real_step(self, plan, members, now)
    state = WarmUpState.get(done.plan.parts)
    until = state.since + WARM_UP.seconds + 2.0
    if not state.warm or now >= until:
        return done
    return done._replace(deadlines=(Deadline(until, DeadlineReason.POLICY),), holds=True)


real_eligible = gathering.eligible
real_step = WarmUpPolicy.step

WAITS = {
    "a round waits for nodes that prepare": patched((gathering, "eligible"), by=without_those_that_prepare),
    "a round waits after the warm-up": patched((WarmUpPolicy, "step"), by=hold_after_the_end),
}
"""Defects that let a round wait for longer than a policy keeps its nodes busy."""


@pytest.mark.parametrize("variant", WAITS.values(), ids=WAITS)
def test_a_round_that_waits_for_longer_than_the_warm_up_is_found(variant: Variant, watched: Watched) -> None:
    broken = []
    with variant():
        for seed in range(NEAR):
            try:
                simulate(seed, program=PreparingProgram)
            except Broken as law:
                broken.append(str(law))
    assert any("a job with enough nodes does not wait for one that prepares" in law for law in broken), broken
