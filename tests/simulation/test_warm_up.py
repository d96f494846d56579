"""Features of a job: their records beside each other, and a gate for tests, registered by one line, in whole jobs in
the simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from msgspec.structs import replace
from support.harness import only_long
from warm_up.gate import WarmUpGate
from warm_up.rules import WarmUpAssignment, WarmUpRules, WarmUpState

from dlrover_run.coordination.decision import Deadline, DeadlineReason
from dlrover_run.coordination.engine import Engine
from dlrover_run.coordination.gate import Choose, Gate, OpenGate, Permit, Step
from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.observer import Observer
from dlrover_run.coordination.records.assignment import Assignment, Memories, join, split
from dlrover_run.coordination.records.parts import combine, with_part
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.round import NodeKey, RankAssignment
from dlrover_run.coordination.records.rules import JobRules, RulesPart
from dlrover_run.coordination.records.validation import config_mismatch
from dlrover_run.coordination.rounds import gathering
from dlrover_run.coordination.rounds.round_engine import RoundEngine
from dlrover_run.features import Feature, registry
from dlrover_run.features.hangs.stalls.rules import StallRules
from dlrover_run.features.hangs.stragglers.rules import StragglerRules
from dlrover_run.features.node_check.decision.model import NodeCheckAssignment, NodeCheckState
from dlrover_run.features.node_check.gate import NodeCheckGate
from dlrover_run.features.node_check.rules import CHECK_NEVER, CHECK_ONCE, NodeCheckRules
from dlrover_run.rendezvous.client import AssignmentTracker
from dlrover_run.transport.messages import InvalidMessage, decode_rules, encode_rules
from dlrover_run.words import reasons
from simulation.program import Program
from simulation.scenario import simulate
from simulation.seeds import NEAR, PLACES, Variant, patched, run_seeds
from simulation.timeline import Broken, demand
from simulation.torch import program as torch
from simulation.torch.checks import Health
from simulation.torch.newcomer_invariants import NewcomerInvariants
from simulation.torch.program import PreparingProgram
from tf_ps_runner.cluster.engine import ClusterEngine
from tf_ps_runner.cluster.model import NAME, Cluster, RecoveryHint
from tf_ps_runner.cluster.orders import NodeOrder, OrderMemory
from tf_ps_runner.cluster.rules import ClusterRules

WARM_UP = WarmUpRules(0.5)
BOTH = JobRules(2, 4, parts=combine((StragglerRules(watched=1), WARM_UP)))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PARTS", dict(registry.PARTS))
    monkeypatch.setattr(reasons, "TEXTS", dict(reasons.TEXTS))
    registry.add(Feature("warm_up", "warm_up", parts={"warm_up": "warm_up"}))


def decoded(record: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(record), type=type(record), dec_hook=registry.decode_part)


def gate_of(*parts: RulesPart) -> Gate:
    """Return the gate of a job with these features."""
    engine = registry.job_of(JobRules(parts=combine(parts))).engine
    assert isinstance(engine, RoundEngine)
    return engine.gate


def test_a_job_has_the_features_that_its_rules_ask_for() -> None:
    assert type(gate_of()) is OpenGate
    assert type(gate_of(WARM_UP)) is WarmUpGate
    assert type(gate_of(NodeCheckRules(check=CHECK_ONCE), WarmUpRules())) is NodeCheckGate
    watched = registry.job_of(
        JobRules(parts=combine((ClusterRules(), StallRules(watched=1), StragglerRules(watched=1))))
    )
    assert list(watched.observers) == ["stalls", "stragglers"]
    assert (type(watched.engine), watched.engine_name) == (ClusterEngine, NAME)
    state = NodeCheckState(check_count=1)
    assert with_part((), state) == combine((NodeCheckState(),), (state,)) == (state,)


def test_each_protocol_has_ten_methods_at_most() -> None:
    for kind in (Observer, Gate, Engine):
        methods = [name for name, each in vars(kind).items() if callable(each) and not name.startswith("_")]
        assert 0 < len(methods) <= 10, (kind, methods)


def test_a_record_holds_the_parts_of_several_features() -> None:
    plan = Plan(parts=with_part((WarmUpState(3),), NodeCheckState(check_count=1)))
    assert decoded(plan) == plan == Plan(parts=with_part((NodeCheckState(check_count=1),), WarmUpState(3)))
    assert (WarmUpState.get(plan.parts).count, NodeCheckState.get(plan.parts).check_count) == (3, 1)
    assert Cluster.find(plan.parts) is None
    changed = with_part(plan.parts, WarmUpState(4))
    assert (WarmUpState.get(changed).count, NodeCheckState.get(changed).check_count) == (4, 1)


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "node_check"}, {"type": "node_check"}],
        [{"type": "warm_up"}, {"type": "node_check"}],
        [{"type": "node_check"}, {"type": "unknown"}],
    ],
)
def test_parts_out_of_order_repeated_or_unknown_are_refused(parts: list[Any]) -> None:
    data = msgspec.json.encode({"parts": parts})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(data, type=Plan, dec_hook=registry.decode_part)


def test_rules_of_several_features_are_sent_and_compared() -> None:
    assert decode_rules(encode_rules(BOTH)) == BOTH
    with pytest.raises(InvalidMessage):
        decode_rules({**encode_rules(BOTH), "unknown.seconds": 1})
    assert config_mismatch(BOTH, BOTH) == ""
    warmer = replace(BOTH, parts=with_part(BOTH.parts, WarmUpRules(2.0)))
    assert "seconds is 0.5, not 2" in config_mismatch(BOTH, warmer)


def test_a_node_keeps_and_remembers_the_part_of_each_feature() -> None:
    tracker = AssignmentTracker()
    order = NodeOrder(version=4, hint=RecoveryHint(version=4))
    tracker.take(Assignment(epoch=1, parts=with_part((order,), WarmUpAssignment(1))))
    # A new coordinator does not know the order yet, and has another part of the other feature.
    tracker.take(Assignment(epoch=2, parts=with_part((NodeOrder(version=4, keep=True),), WarmUpAssignment(2))))
    assert NodeOrder.find(tracker.assignment.parts) == order
    assert WarmUpAssignment.find(tracker.assignment.parts) == WarmUpAssignment(2)
    tracker.take(Assignment(epoch=2, parts=(WarmUpAssignment(3),)))
    assert tracker.memory == Memories({NAME: OrderMemory(RecoveryHint(version=4))})


def test_parts_that_all_nodes_receive_alike_are_split_off_and_joined() -> None:
    order = NodeOrder(version=4, servers=("a:1",), hint=RecoveryHint(version=4))
    whole = with_part((order,), NodeCheckAssignment())
    common, own = split(whole)
    assert common
    assert join(own, common) == whole


def test_at_most_one_feature_is_the_engine_and_one_the_gate() -> None:
    alone = ClusterRules()
    assert JobRules(parts=with_part((alone,), WARM_UP)).problem() == JobRules(parts=(alone,)).problem()
    assert "two features" in str(JobRules(parts=combine((NodeCheckRules(check=CHECK_ONCE), WARM_UP))).problem())
    with patch.object(WarmUpRules, "kind", "engine"):
        assert "two features" in str(JobRules(parts=with_part((alone,), WARM_UP)).problem())


class Watched:
    """Checks the invariant that each node with a rank is warm, and counts how often some were."""

    def __init__(self) -> None:
        self.warm = 0

    def orders(self, gate: WarmUpGate, plan: Plan, ranks: dict[NodeKey, RankAssignment]) -> Any:
        if plan.phase is PlanPhase.TRAINING:
            warm = {NodeKey(*key) for key in WarmUpState.get(plan.parts).warm}
            demand(ranks.keys() <= warm, "no node trains that is not warm")
            self.warm += bool(warm)
        return real_orders(gate, plan, ranks)


real_orders = WarmUpGate.orders


def _with_warm_up(program: type[Program]) -> Callable[[Any, Random], JobRules]:
    """Return the method that makes the rules of such a program, with a warm-up."""
    real = program.rules

    def rules(self: Any, random: Random) -> JobRules:
        made = real(self, random)
        return replace(made, parts=with_part(made.parts, WARM_UP))

    return rules


def is_warming(invariants: NewcomerInvariants, plan: Plan, now: float) -> bool:
    """Whether the nodes of the next round warm up, which takes no longer than the rules say."""
    state = WarmUpState.get(plan.parts)
    return bool(state.warming) and now < state.since + WARM_UP.seconds


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched()
    with (
        patch.object(torch.TorchProgram, "rules", _with_warm_up(torch.TorchProgram)),
        patch.object(torch, "health_of", lambda seed: Health(Random(seed), CHECK_NEVER, 0)),
        patch.object(NewcomerInvariants, "is_held", is_warming),
        patch.object(WarmUpGate, "orders", lambda gate, plan, ranks: found.orders(gate, plan, ranks)),
    ):
        yield found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("first", "count"), [(33, 4), *only_long((0, 1000))])
@pytest.mark.parametrize("place", PLACES)
def test_jobs_with_a_warm_up_keep_every_invariant(place: str, first: int, count: int, watched: Watched) -> None:
    run_seeds(partial(simulate, kind=PLACES[place]), first, count)
    assert watched.warm > count // 10


def test_a_gate_that_is_not_asked_is_found(watched: Watched) -> None:
    def permit_all(self: WarmUpGate, plan: Plan, nodes: Any, choose: Choose, now: float) -> Permit:
        return Permit(choose(nodes))

    with patch.object(WarmUpGate, "permit", permit_all), pytest.raises(Broken, match="not warm"):
        simulate(36)


def without_those_that_prepare(gate: Gate, plan: Plan, nodes: Nodes) -> list[KnownNode]:
    return [state for state in real_eligible(gate, plan, nodes) if not state.report.preparing]


def hold_after_the_end(self: WarmUpGate, plan: Plan, nodes: Nodes, now: float) -> Step:
    """The nodes that are warm are kept for two seconds more."""
    done = real_between(self, plan, nodes, now)
    state = WarmUpState.get(done.plan.parts)
    until = state.since + WARM_UP.seconds + 2.0
    if not state.warm or now >= until:
        return done
    return done._replace(deadlines=(Deadline(until, DeadlineReason.FEATURE),), holds=True)


real_eligible = gathering.eligible
real_between = WarmUpGate.between

WAITS = {
    "a round waits for nodes that prepare": patched((gathering, "eligible"), by=without_those_that_prepare),
    "a round waits after the warm-up": patched((WarmUpGate, "between"), by=hold_after_the_end),
}
"""Defects that let a round wait for longer than the gate keeps its nodes busy."""


@pytest.mark.parametrize("variant", WAITS.values(), ids=WAITS)
def test_a_round_that_waits_for_longer_than_the_warm_up_is_found(variant: Variant, watched: Watched) -> None:
    broken = []
    with variant():
        for seed in range(NEAR):
            try:
                simulate(seed, program=PreparingProgram)
            except Broken as invariant:
                broken.append(str(invariant))
    assert any("a job with enough nodes does not wait for one that prepares" in invariant for invariant in broken), (
        broken
    )
