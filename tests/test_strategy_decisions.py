"""What is decided for scripts of a special kind: tables that only one number of servers can hold, and a chief whose
workers serve it, so that it leaves before them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dlrover_run.coordination.cluster.decide import decide
from dlrover_run.coordination.cluster.records import (
    Cluster,
    EndCause,
    Hosting,
    Role,
    Room,
    Stage,
    Targets,
    TaskEnd,
    TaskStage,
    TaskStatus,
)
from dlrover_run.coordination.cluster.rules import ClusterRules
from dlrover_run.coordination.presence import Presence
from dlrover_run.coordination.records import NodeStatus, Plan, PlanPhase
from dlrover_run.coordination.rules import Rules

RULES = Rules(cluster=ClusterRules(least_ps=1, most_ps=4, least_workers=1, most_workers=1))


class Node:
    """A node whose tasks are as its agent would have them; only what a test changes is otherwise."""

    def __init__(self, ps: int = 4, name: str = "a") -> None:
        self.name = name
        self.rooms = {Role.CHIEF: 1, Role.WORKER: 1, Role.PS: ps}
        self.changes: dict[Role, dict[str, Any]] = {}
        self.wish: Targets | None = None

    def status(self, plan: Plan) -> NodeStatus:
        cluster = plan.cluster or Cluster()
        told = tuple(
            msgspec.structs.replace(
                TaskStatus(key=task.key, stage=TaskStage.READY, port=1000 + number, step=7, saved=5, restored=0),
                **self.changes.get(task.role, {}),
            )
            for number, task in enumerate((*cluster.tasks, *cluster.coming))
            if task.node_id == self.name
        )
        rooms = tuple(Room(role, number) for role, number in self.rooms.items())
        hosting = Hosting(rooms=rooms, tasks=told, wish=self.wish, wish_number=int(self.wish is not None))
        return NodeStatus(
            node_id=self.name, incarnation="1", host=self.name, address=self.name, port=1, workers=0, cluster=hosting
        )


def settle(plan: Plan, *nodes: Node, now: float = 1.0) -> Plan:
    """Decide until nothing changes any more."""
    for _ in range(20):
        present = {status.key: Presence(status, 0.0, 0.0) for node in nodes if (status := node.status(plan))}
        following = decide(RULES, plan, present, now).plan
        if following == plan:
            return plan
        plan = following
    raise AssertionError(f"it is never settled: {plan.reason}")


def step_of(plan: Plan) -> Cluster:
    assert plan.cluster is not None
    return plan.cluster


def servers(plan: Plan) -> int:
    return sum(task.role is Role.PS for task in step_of(plan).tasks)


def training(node: Node, ps: int) -> Plan:
    """A plan in which a version with that many servers trains."""
    plan = settle(Plan(cluster=Cluster(targets=Targets(ps=ps))), node)
    assert (step_of(plan).stage, servers(plan)) == (Stage.TRAINING, ps)
    return plan


def test_with_fixed_servers_a_wish_for_another_number_is_refused_before_anything_is_stopped() -> None:
    node = Node()
    plan = training(node, 2)
    node.changes[Role.CHIEF] = {"fixed_servers": True}
    node.wish = Targets(ps=3)
    refused = settle(plan, node)
    assert (step_of(refused).stage, servers(refused), step_of(refused).coming) == (Stage.TRAINING, 2, ())
    assert step_of(refused).tasks == step_of(plan).tasks, "nobody was disturbed"
    assert "a asked for 3 parameter servers, but the number of parameter servers stays 2" in refused.reason
    assert 'partition_strategy="mod"' in refused.reason


def test_without_that_the_same_wish_is_granted() -> None:
    node = Node()
    plan = training(node, 2)
    node.wish = Targets(ps=3)
    changing = settle(plan, node)
    assert (step_of(changing).stage, len(step_of(changing).coming)) == (Stage.PAUSING, 3)


def test_with_fixed_servers_the_version_after_a_loss_waits_for_room_for_as_many() -> None:
    node, other = Node(ps=1), Node(ps=1, name="b")
    plan = settle(Plan(cluster=Cluster(targets=Targets(ps=2))), node, other)
    assert servers(plan) == 2
    node.changes[Role.CHIEF] = other.changes[Role.CHIEF] = {"fixed_servers": True}
    plan = settle(plan, node, other)
    alone = settle(plan, node)
    assert alone.phase is PlanPhase.GATHERING
    assert "there is room for 1 of exactly 2 parameter servers" in alone.reason


def test_a_loss_that_is_heard_together_with_fixed_servers_comes_second() -> None:
    node = Node()
    plan = training(node, 2)
    node.changes[Role.CHIEF] = {"fixed_servers": True}
    node.changes[Role.PS] = {"stage": TaskStage.ENDED, "end": TaskEnd(EndCause.FAILURE, "was killed")}
    status = node.status(plan)
    following = decide(RULES, plan, {status.key: Presence(status, 0.0, 0.0)}, 1.0).plan
    assert step_of(following).fixed_ps == servers(following) == 2


@pytest.mark.parametrize("ended", [True, False])
def test_a_chief_that_saves_and_leaves_before_its_workers_ends_the_pause(ended: bool) -> None:
    node = Node()
    plan = training(node, 1)
    node.wish = Targets(ps=2)
    plan = settle(plan, node)
    assert step_of(plan).stage is Stage.PAUSING
    if ended:
        end = TaskEnd(EndCause.MEMBERSHIP, "left, as it was told to")
        node.changes[Role.CHIEF] = {"stage": TaskStage.ENDED, "end": end, "saved": 7}
    status = node.status(plan)
    following = decide(RULES, plan, {status.key: Presence(status, 0.0, 0.0)}, 1.0).plan
    assert (step_of(following).version, servers(following)) == ((2, 2) if ended else (1, 1))
    if ended:
        assert "saved at step 7" in following.reason
