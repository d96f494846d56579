"""Decisions for special scripts: tables that only one number of servers can hold, and a chief whose workers serve it,
so it leaves before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.policy_parts import cluster_of

from dlrover_run.coordination.membership import KnownNode, Nodes
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.requests import Action, OperatorRequest, RequestFailed
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.words.reasons import render
from tf_ps_runner.cluster.engine import ClusterEngine
from tf_ps_runner.cluster.model import (
    MAX_TASKS,
    Capacity,
    Cluster,
    DesiredReplicas,
    EndCause,
    Role,
    ScaleRequest,
    ServerBounds,
    Stage,
    TaskEnd,
    TaskStage,
    TaskStatus,
)
from tf_ps_runner.cluster.reports import NodeTasks
from tf_ps_runner.cluster.rules import ClusterRules
from tf_ps_runner.cluster.text import bounded

RULES = JobRules(parts=(ClusterRules(min_ps=1, max_ps=4, min_workers=1, max_workers=1),))
ENGINE = ClusterEngine(RULES)


class Node:
    """A node whose tasks are in the state that its agent would reach, except for the changes of a test."""

    def __init__(self, ps: int = 4, name: str = "a") -> None:
        self.name = name
        self.rooms = {Role.CHIEF: 1, Role.WORKER: 1, Role.PS: ps}
        self.changes: dict[Role, dict[str, Any]] = {}

    def status(self, plan: Plan) -> NodeReport:
        cluster = cluster_of(plan) or Cluster()
        statuses = tuple(
            msgspec.structs.replace(
                TaskStatus(key=task.key, stage=TaskStage.READY, port=1000 + number, step=7, saved=5, restored=0),
                **self.changes.get(task.role, {}),
            )
            for number, task in enumerate((*cluster.tasks, *cluster.next_servers))
            if task.node_id == self.name
        )
        rooms = tuple(Capacity(role, number) for role, number in self.rooms.items())
        hosting = NodeTasks(capacity=rooms, tasks=statuses)
        return NodeReport(
            node_id=self.name, incarnation="1", host=self.name, address=self.name, port=1, workers=0, parts=(hosting,)
        )


def known_nodes(plan: Plan, nodes: Sequence[Node]) -> Nodes:
    return {status.key: KnownNode(status, 0.0, 0.0) for status in (node.status(plan) for node in nodes)}


def decide(plan: Plan, *nodes: Node) -> Plan:
    """One decision."""
    return ENGINE.decide(plan, known_nodes(plan, nodes), 1.0).plan


def scaled(plan: Plan, *nodes: Node, **wanted: int) -> Plan:
    """The plan after a request for other numbers of tasks. Raises RequestFailed."""
    request = OperatorRequest(Action.SCALE, by="ann", part=ScaleRequest(**wanted))
    return ENGINE.request(RULES, plan, known_nodes(plan, nodes), request, 1.0).plan


def settle(plan: Plan, *nodes: Node) -> Plan:
    """Decide until nothing changes any more."""
    for _ in range(20):
        following = decide(plan, *nodes)
        if following == plan:
            return plan
        plan = following
    raise AssertionError(f"it is never settled: {plan.reason}")


def step_of(plan: Plan) -> Cluster:
    assert cluster_of(plan) is not None
    return cluster_of(plan)


def servers(plan: Plan) -> int:
    return sum(task.role is Role.PS for task in step_of(plan).tasks)


def training(node: Node, ps: int) -> Plan:
    """A plan in which a version with that many servers trains."""
    plan = settle(Plan(parts=(Cluster(desired=DesiredReplicas(ps=ps)),)), node)
    assert (step_of(plan).stage, servers(plan)) == (Stage.TRAINING, ps)
    return plan


def bounds(least: int, most: int = MAX_TASKS, parts: int = 2, refused: int = 0) -> dict[str, ServerBounds]:
    """What a chief reports of a table."""
    return {"server_bounds": ServerBounds(least=least, most=most, table="users", parts=parts, refused=refused)}


def test_with_fixed_servers_a_request_for_another_number_is_refused() -> None:
    node = Node()
    plan = training(node, 2)
    node.changes[Role.CHIEF] = bounds(2, 2)
    plan = settle(plan, node)
    with pytest.raises(RequestFailed) as failed:
        scaled(plan, node, ps=3)
    known = step_of(plan).server_bounds
    assert known is not None
    assert str(failed.value) == render((bounded(known),))
    assert "'users'" in str(failed.value)
    assert 'partition_strategy="mod"' in str(failed.value)


@pytest.mark.parametrize(("wanted", "refused"), [(1, True), (2, False), (4, False)])
def test_with_fewer_parts_than_servers_as_many_servers_as_parts_are_needed(wanted: int, refused: bool) -> None:
    node = Node()
    plan = training(node, 3)
    node.changes[Role.CHIEF] = bounds(2)
    plan = settle(plan, node)
    if refused:
        with pytest.raises(RequestFailed):
            scaled(plan, node, ps=wanted)
    else:
        assert len(step_of(settle(scaled(plan, node, ps=wanted), node)).next_servers) == wanted


def test_without_that_the_same_request_is_granted() -> None:
    node = Node()
    plan = training(node, 2)
    changing = settle(scaled(plan, node, ps=3), node)
    assert (step_of(changing).stage, len(step_of(changing).next_servers)) == (Stage.PAUSING, 3)


def test_with_fixed_servers_the_version_after_a_loss_waits_for_room_for_as_many() -> None:
    node, other = Node(ps=1), Node(ps=1, name="b")
    plan = settle(Plan(parts=(Cluster(desired=DesiredReplicas(ps=2)),)), node, other)
    assert servers(plan) == 2
    node.changes[Role.CHIEF] = other.changes[Role.CHIEF] = bounds(2, 2)
    plan = settle(plan, node, other)
    alone = settle(plan, node)
    assert alone.phase is PlanPhase.GATHERING
    assert "there is room for 1 of exactly 2 parameter servers (the table 'users' has 2 parts" in alone.reason


def test_a_loss_that_is_received_together_with_fixed_servers_comes_second() -> None:
    node = Node()
    plan = training(node, 2)
    node.changes[Role.CHIEF] = bounds(2, 2)
    node.changes[Role.PS] = {"stage": TaskStage.ENDED, "end": TaskEnd(EndCause.FAILURE, "was killed")}
    following = decide(plan, node)
    assert step_of(following).server_bounds == bounds(2, 2)["server_bounds"]
    assert servers(following) == 2


def changed_to(node: Node, plan: Plan, number: int) -> Plan:
    """The version with another number of servers, after a planned change that nothing forbade."""
    plan = settle(scaled(plan, node, ps=number), node)
    end = TaskEnd(EndCause.RESHAPED, "left, as it was told to")
    node.changes = {Role.CHIEF: {"stage": TaskStage.ENDED, "end": end, "saved": 7}}
    plan = decide(plan, node)
    assert (step_of(plan).version, servers(plan)) == (2, number)
    return plan


STARTED = {"stage": TaskStage.STARTED, "restored": -1, "step": -1, "saved": -1}


def test_a_chief_that_does_not_restore_the_model_has_the_servers_of_before_come_back() -> None:
    node = Node()
    plan = changed_to(node, training(node, 3), 2)
    # The bound that the chief has computed has less weight than the number of servers that the model was trained with.
    node.changes = {Role.CHIEF: {**STARTED, **bounds(4, 4, parts=3, refused=2)}}
    plan = decide(plan, node)
    assert (step_of(plan).version, servers(plan)) == (3, 3)
    assert "it holds 3 parts of the table 'users', and the script makes 2 with 2 parameter servers" in plan.reason
    assert plan.failure is None
    assert step_of(plan).roles[0].failures == 0
    node.changes = {Role.CHIEF: {"restored": 7}}
    plan = settle(plan, node)
    assert step_of(plan).stage is Stage.TRAINING
    assert "no step lost" in plan.reason
    # The bound is kept, though the chief could not know it beforehand.
    node.changes = {Role.CHIEF: bounds(2)}
    plan = decide(plan, node)
    assert step_of(plan).server_bounds == ServerBounds(least=3, most=3, table="users", parts=3)


def refusing(plan: Plan, node: Node, **reported: Any) -> Plan:
    """Return the plan after the chief of a version that has just begun does not restore the model."""
    node.changes = {Role.CHIEF: {**STARTED, **reported}}
    return decide(plan, node)


def begun(node: Node, ps: int) -> Plan:
    """A plan in which the first version begins with that many servers."""
    return decide(Plan(parts=(Cluster(desired=DesiredReplicas(ps=ps)),)), node)


def test_a_job_that_begins_with_other_servers_than_the_checkpoint_takes_as_many_as_it_needs() -> None:
    node = Node()
    plan = refusing(begun(node, 2), node, **bounds(3, 3, parts=3, refused=2))
    assert (step_of(plan).version, servers(plan)) == (2, 3)


@pytest.mark.parametrize(("number", "remedy"), [(5, "start the job with --ps=5"), (0, "use as many servers as when")])
def test_a_job_that_cannot_have_the_servers_of_the_checkpoint_ends_and_names_the_table(
    number: int, remedy: str
) -> None:
    node = Node()
    plan = refusing(begun(node, 2), node, **bounds(number, number, parts=5, refused=2))
    assert plan.phase is PlanPhase.FAILED
    assert plan.failure is not None
    assert "5 parts of the table 'users'" in plan.failure.exit_text
    assert remedy in plan.reason


def test_a_checkpoint_whose_parts_cannot_be_read_ends_the_job() -> None:
    node = Node()
    plan = refusing(begun(node, 2), node, **bounds(0, 0, parts=0, refused=2))
    assert plan.phase is PlanPhase.FAILED
    assert "how many parts it holds of the table 'users' cannot be read" in plan.reason


def test_servers_that_were_tried_in_vain_are_not_tried_again() -> None:
    node = Node()
    plan = refusing(begun(node, 2), node, **bounds(3, 3, parts=3, refused=2))
    plan = refusing(plan, node, **bounds(2, 2, parts=3, refused=4))
    assert plan.phase is PlanPhase.FAILED


@pytest.mark.parametrize("ended", [True, False])
def test_a_chief_that_saves_and_leaves_before_its_workers_ends_the_pause(ended: bool) -> None:
    node = Node()
    plan = training(node, 1)
    plan = settle(scaled(plan, node, ps=2), node)
    assert step_of(plan).stage is Stage.PAUSING
    if ended:
        end = TaskEnd(EndCause.RESHAPED, "left, as it was told to")
        node.changes[Role.CHIEF] = {"stage": TaskStage.ENDED, "end": end, "saved": 7}
    following = decide(plan, node)
    assert (step_of(following).version, servers(following)) == ((2, 2) if ended else (1, 1))
    if ended:
        assert "saved at step 7" in following.reason
