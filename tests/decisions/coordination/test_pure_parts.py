"""Rules of coordination, each shown alone: of these no other test found a mutant."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.virtual import play
from support.virtual_torch import TorchJob, rules

from dlrover_run.coordination.membership import KnownNode, KnownNodes, all_have_left
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.requests import RequestFailed
from dlrover_run.coordination.records.rules import DesiredSize, JobRules
from dlrover_run.coordination.rounds.requested_changes import find_nodes
from dlrover_run.features.autoscale.model import AutoscaleState
from dlrover_run.words.reasons import Code, Reason


def report(name: str, phase: NodePhase = NodePhase.RUNNING, preparing: bool = False) -> NodeReport:
    plain = NodeReport(node_id=name, incarnation="1", host=f"{name}.host", address="", port=0, workers=1, phase=phase)
    return replace(plain, preparing=preparing)


@pytest.mark.parametrize(("least", "unit", "size"), [(1, 1, 1), (3, 1, 3), (3, 2, 4), (4, 2, 4), (5, 4, 8)])
def test_the_fewest_nodes_of_a_round_are_a_multiple_of_the_unit(least: int, unit: int, size: int) -> None:
    assert JobRules(min_nodes=least, max_nodes=8, node_unit=unit).min_size == size


@pytest.mark.parametrize(
    ("changes", "is_possible"),
    [
        ({"keep_alive_attempts": 1}, True),
        ({"keep_alive_attempts": 0}, False),
        ({"keep_alive_interval": 0.001}, True),
        ({"keep_alive_interval": 0.0}, False),
        ({"node_unit": 1}, True),
        ({"node_unit": 0}, False),
        ({"node_unit": 4}, True),
        ({"node_unit": 5}, False),
    ],
)
def test_where_the_limits_of_the_rules_are(changes: dict[str, float], is_possible: bool) -> None:
    problem = JobRules(**{"min_nodes": 1, "max_nodes": 4, **changes}).problem()  # type: ignore[arg-type]
    assert (problem is None) == is_possible, problem


def test_the_size_that_an_operator_fixes_comes_before_that_of_a_feature() -> None:
    wanted = Plan(parts=(AutoscaleState(target=3),))
    assert wanted.wanted_nodes == 3
    for desired, nodes in ((DesiredSize(1, 2, "ann", False), 3), (DesiredSize(1, 2, "ann", True), 0)):
        assert Plan(parts=wanted.parts, desired=desired).wanted_nodes == nodes


LEFT, LEAVING, RUNNING = NodePhase.LEFT, NodePhase.LEAVING, NodePhase.RUNNING

DEPARTURES = {
    # Of each node its phase, since when it has that, and when its connection ended and it was declared lost.
    "no node was ever here": ([], False),
    "one left": ([(LEFT, 5.0, None, None)], True),
    "one is here": ([(LEFT, 5.0, None, None), (RUNNING, 1.0, None, None)], False),
    "one leaves": ([(LEAVING, 5.0, None, None)], False),
    "one has left as its connection ended": ([(LEAVING, 5.0, 6.0, 7.0)], True),
    "all are lost": ([(RUNNING, 1.0, 2.0, 3.0)], False),
    "one was lost before another left": ([(LEFT, 5.0, None, None), (RUNNING, 1.0, 3.0, 4.0)], True),
    "at the same time": ([(LEFT, 5.0, None, None), (RUNNING, 1.0, 4.0, 5.0)], True),
    "after it": ([(LEFT, 5.0, None, None), (RUNNING, 1.0, 4.0, 6.0)], False),
    "before the last of two": ([(LEFT, 3.0, None, None), (LEFT, 5.0, None, None), (RUNNING, 1.0, 3.0, 4.0)], True),
    "it may still come back": ([(LEFT, 5.0, None, None), (RUNNING, 1.0, 3.0, 11.0)], False),
    "what has left is over with its report": ([(LEFT, 5.0, 8.0, 9.0), (RUNNING, 1.0, 6.0, 7.0)], False),
    "what was leaving with its connection": ([(LEAVING, 5.0, 8.0, 9.0), (RUNNING, 1.0, 6.0, 7.0)], True),
}


@pytest.mark.parametrize(("nodes", "expected"), DEPARTURES.values(), ids=DEPARTURES)
def test_whether_the_last_nodes_have_left_by_request(
    nodes: list[tuple[NodePhase, float, float | None, float | None]], expected: bool
) -> None:
    known = [
        KnownNode(report(f"n{number}", phase), 0.0, changed, disconnected, lost)
        for number, (phase, changed, disconnected, lost) in enumerate(nodes)
    ]
    assert all_have_left({node.report.key: node for node in known}, now=10.0) == expected


def test_a_node_is_ready_since_it_has_prepared() -> None:
    nodes = KnownNodes()
    for time, preparing in ((1.0, True), (2.0, True), (3.0, False), (4.0, False)):
        nodes.take(report("a", preparing=preparing), time)
        (state,) = nodes.states.values()
        assert state.prepared_at == (3.0 if time >= 3.0 else None)
    nodes.take(report("b"), 5.0)
    nodes.take(report("b"), 6.0)
    assert [state.ready_at for state in nodes.states.values()] == [3.0, 5.0]


def test_a_request_names_no_node_that_has_left() -> None:
    here, left = (KnownNode(report(name, phase), 0.0, 0.0) for name, phase in (("a", RUNNING), ("b", LEFT)))
    nodes = {node.report.key: node for node in (here, left)}
    plan = Plan(phase=PlanPhase.TRAINING, members=(here.report.member, left.report.member))
    for name in ("0", "a", "a.host"):
        assert find_nodes(plan, nodes, name) == (here.report.key,)
    for name in ("1", "b", "b.host", "2"):
        with pytest.raises(RequestFailed, match=f"no node of the job has the rank, the host or the id {name}"):
            find_nodes(plan, nodes, name)


def test_the_size_that_a_job_was_started_with_is_no_other_size() -> None:
    job = play(TorchJob(rules(1, 3)), "come a b c; scale 2; round 2 a b; scale 3")
    assert (job.plan.desired, len(job.ranks)) == (None, 3)


SPARES = {
    "more nodes than the job may have": ((1, 1), "come a b c", {}, Code.NOT_REQUESTED()),
    "fewer nodes train on request": ((1, 3), "come a b c; scale 1", {}, Code.SPARE(number=2)),
    "the job has spares": ((1, 1), "come a b c", {"spares": 2}, Code.SPARE_OF(number=2, wanted=2)),
    "it has fewer than it may have": ((1, 1), "come a b", {"spares": 2}, Code.SPARE_OF(number=1, wanted=2)),
}


@pytest.mark.parametrize(("nodes", "script", "changes", "reason"), SPARES.values(), ids=SPARES)
def test_what_a_node_beside_a_full_round_waits_for(
    nodes: tuple[int, int], script: str, changes: dict[str, object], reason: Reason
) -> None:
    job = play(TorchJob(rules(*nodes, **changes)), script)
    assert job.waiting.reasons == (Code.TRAINING(number=1), reason)


def test_a_job_that_has_finished_names_no_failure() -> None:
    job = play(TorchJob(rules(1, 2)), "come a b; fail a; round 2 a b")
    assert job.plan.failure is not None
    assert play(job, "succeed a b; phase finished").plan.failure is None
