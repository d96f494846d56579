"""Tests that run on every rendezvous backend: the assignment of a node does not depend on which backend decides.

Each test uses the product's own client and coordinator in virtual time. The tests of the backend's own modules cover
what only one backend has (its messages, its authentication, its processes).
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from simulation.backends import Backend, WrittenNode
from support.node_truth import USUAL, Truth
from support.policy_parts import check_part, order_of
from support.virtual_torch import rules

from dlrover_run.coordination import coordinator, driver
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.requests import Action, OperatorRequest
from dlrover_run.coordination.records.round import Failure
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.node_check.decision.model import NodeCheckReport
from dlrover_run.features.node_check.rules import CHECK_ONCE
from dlrover_run.job_status.status import JobStatus
from dlrover_run.rendezvous.client import AskFailed
from dlrover_run.rendezvous.kv import leader
from dlrover_run.rendezvous.local import LocalClient
from tf_ps_runner.cluster.model import (
    Capacity,
    EndCause,
    Role,
    ScaleRequest,
    TaskEnd,
    TaskStage,
    TaskStatus,
)
from tf_ps_runner.cluster.reports import NodeTasks
from tf_ps_runner.cluster.rules import ClusterRules

ALL = ("local", "master", "etcd")
SEVERAL = ("master", "etcd")
"""The backends for jobs of several nodes."""

ONE = rules(1, 1, last_call_timeout=1.0, lost_after=1.0)
TWO = rules(1, 2, last_call_timeout=1.0, lost_after=1.0)

WHAT = "was killed by SIGKILL"

Fact = Callable[[Backend], None]


def killed(node: WrittenNode) -> Failure:
    """The first worker of that node is killed."""
    ranks = node.assignment.ranks
    assert ranks is not None
    return Failure(ranks.first_rank, node.name, WHAT)


def train(backend: Backend, *nodes: WrittenNode, number: int = 1) -> Assignment:
    """Let the nodes receive their ranks in that round and report that their workers run."""
    for node in nodes:
        if not node.assignment.epoch and node.assignment.ranks is None:
            node.report(phase=NodePhase.WAITING)
    backend.until(lambda: all(node.assignment.ranks and node.assignment.key.number == number for node in nodes))
    for node in nodes:
        node.report(phase=NodePhase.RUNNING)
    backend.wait(1)
    return nodes[0].assignment


def one_node_gets_the_first_rank(backend: Backend) -> None:
    node = backend.node()
    ranks = train(backend, node).ranks
    assert ranks is not None
    assert node.changes, "the client calls the agent when its assignment has changed"
    assert (ranks.node_rank, ranks.nodes, ranks.first_rank, ranks.workers, ranks.world_size) == (0, 1, 0, 2, 2)


def the_same_report_again_changes_nothing(backend: Backend) -> None:
    node = backend.node()
    before = train(backend, node)
    changes = node.changes
    node.report(phase=NodePhase.RUNNING)
    backend.wait(100)
    assert (node.assignment, node.changes) == (before, changes)


def a_failure_costs_a_restart_and_begins_the_next_round(backend: Backend) -> None:
    node = backend.node()
    first = train(backend, node)
    node.report(phase=NodePhase.FAILED, failure=killed(node), progressed=True)
    second = train(backend, node, number=2)
    assert (first.restart_count, second.restart_count) == (0, 1)
    assert second.epoch == first.epoch


def a_failure_without_a_restart_ends_the_job(backend: Backend) -> None:
    node = backend.node()
    train(backend, node)
    node.report(phase=NodePhase.FAILED, failure=killed(node), progressed=True)
    backend.until(lambda: node.assignment.phase is PlanPhase.FAILED)
    assert node.assignment.failure is not None
    assert node.assignment.failure.exit_text == WHAT


def the_success_of_all_workers_ends_the_job_for_good(backend: Backend) -> None:
    node = backend.node()
    train(backend, node)
    node.report(phase=NodePhase.SUCCEEDED, progressed=True)
    backend.until(lambda: node.assignment.phase is PlanPhase.FINISHED)
    node.report(phase=NodePhase.FAILED, failure=Failure(0, node.name, WHAT))
    backend.wait(1)
    assert node.assignment.phase is PlanPhase.FINISHED


def a_node_is_checked_before_it_trains(backend: Backend) -> None:
    truth = Truth()
    node = backend.node(part=NodeCheckReport(check_port=2))
    node.report(phase=NodePhase.WAITING)
    backend.until(lambda: node.assignment.waiting)
    assert node.assignment.ranks is None
    node.part = NodeCheckReport(compute_result=truth.compute(node.address), check_port=2)
    node.report(phase=NodePhase.WAITING)
    backend.until(lambda: check_part(node.assignment).check_task)
    task = check_part(node.assignment).check_task
    assert task is not None
    node.part = msgspec.structs.replace(node.part, link_result=truth.link(node.address, task))
    node.report(phase=NodePhase.WAITING)
    backend.until(lambda: node.assignment.ranks)
    health = check_part(node.assignment).health
    assert health is not None
    assert health.gigabytes == USUAL


def a_node_that_never_computes_is_found_without_another_report(backend: Backend) -> None:
    node = backend.node(part=NodeCheckReport(check_port=2))
    node.report(phase=NodePhase.WAITING)
    backend.until(lambda: check_part(node.assignment).health)
    assert check_part(node.assignment).health.dismissed


ROOM = (Capacity(Role.PS, 1), Capacity(Role.CHIEF, 1))


def servers(**changes: Any) -> JobRules:
    cluster = ClusterRules(min_ps=1, max_ps=1, **changes)
    return JobRules(max_nodes=2, last_call_timeout=1.0, join_timeout=30.0, lost_after=1.0, parts=(cluster,))


def hosted(node: WrittenNode, stage: TaskStage) -> NodeTasks:
    """The tasks of the node's assignment, all at the same stage."""
    tasks = tuple(
        TaskStatus(key=task.key, stage=stage, port=1000 + place)
        for place, task in enumerate(order_of(node.assignment).tasks)
    )
    return NodeTasks(capacity=ROOM, tasks=tasks)


def end_task(node: WrittenNode, role: Role, end: TaskEnd) -> None:
    """Report that the task with that role has exited; the other task is ready."""
    status = hosted(node, TaskStage.READY)
    tasks = tuple(
        msgspec.structs.replace(one, stage=TaskStage.ENDED, end=end) if one.key.role is role else one
        for one in status.tasks
    )
    node.part = msgspec.structs.replace(status, tasks=tasks)
    node.report(phase=NodePhase.RUNNING)


def a_node_gets_the_tasks_for_which_it_has_room(backend: Backend) -> None:
    node = backend.node(part=NodeTasks(capacity=ROOM))
    node.report(phase=NodePhase.WAITING)
    backend.until(lambda: order_of(node.assignment))
    assert {str(task.key) for task in order_of(node.assignment).tasks} == {"ps-0", "chief-0"}
    assert not order_of(node.assignment).servers
    node.part = hosted(node, TaskStage.HELD)
    node.report(phase=NodePhase.RUNNING)
    backend.until(lambda: order_of(node.assignment).servers)
    assert order_of(node.assignment).servers[0].startswith(f"{node.address}:")
    node.part = hosted(node, TaskStage.READY)
    node.report(phase=NodePhase.RUNNING)
    backend.until(lambda: order_of(node.assignment).open)


def the_success_of_the_chief_ends_the_job(backend: Backend) -> None:
    a_node_gets_the_tasks_for_which_it_has_room(backend)
    (node,) = backend.nodes
    end_task(node, Role.CHIEF, TaskEnd(EndCause.SUCCESS, "has succeeded"))
    backend.until(lambda: node.assignment.phase is PlanPhase.FINISHED)


def the_end_of_a_server_begins_the_next_version(backend: Backend) -> None:
    a_node_gets_the_tasks_for_which_it_has_room(backend)
    (node,) = backend.nodes
    end_task(node, Role.PS, TaskEnd(EndCause.FAILURE, WHAT))
    backend.until(lambda: order_of(node.assignment).version == 2)
    assert {str(task.key) for task in order_of(node.assignment).tasks} == {"ps-1", "chief-1"}
    assert not order_of(node.assignment).open


def a_deadline_of_tasks_passes_without_another_report(backend: Backend) -> None:
    node = backend.node(part=NodeTasks(capacity=ROOM))
    node.report(phase=NodePhase.WAITING)
    backend.until(lambda: order_of(node.assignment))
    node.part = hosted(node, TaskStage.HELD)
    node.report(phase=NodePhase.RUNNING)
    backend.until(lambda: node.assignment.phase is PlanPhase.FAILED)


def a_node_without_tasks_reads_what_is_missing(backend: Backend) -> None:
    node = backend.node(part=NodeTasks(capacity=ROOM[:1]))
    node.report(phase=NodePhase.WAITING)
    backend.until(lambda: node.assignment.waiting)
    waiting = node.assignment.waiting
    assert waiting is not None
    assert "room for no chief" in waiting.text
    assert waiting.seconds is not None


def answer_of(backend: Backend, node: WrittenNode, request: OperatorRequest | None) -> JobStatus | AskFailed:
    """What an operator on the machine of the node gets."""
    node.request(request)
    backend.until(lambda: node.answers)
    return node.answers.pop()


FEWER = OperatorRequest(Action.SCALE, by="ann", part=ScaleRequest(ps=1))
TOO_MANY = OperatorRequest(Action.SCALE, by="ann", part=ScaleRequest(ps=9))


def a_request_is_answered_once_the_plan_contains_it(backend: Backend) -> None:
    a_node_gets_the_tasks_for_which_it_has_room(backend)
    (node,) = backend.nodes
    found = answer_of(backend, node, FEWER)
    assert isinstance(found, JobStatus), found
    assert found.answer == "1 parameter server is there already"
    assert "ann asked for 1 parameter server" in found.reason


def a_refused_request_has_its_reason_as_the_answer(backend: Backend) -> None:
    a_node_gets_the_tasks_for_which_it_has_room(backend)
    (node,) = backend.nodes
    found = answer_of(backend, node, TOO_MANY)
    assert isinstance(found, AskFailed), found
    assert not found.no_job
    assert "so it cannot have 9" in str(found)


def a_request_of_the_other_program_is_refused(backend: Backend) -> None:
    train(backend, backend.node("a"))
    found = answer_of(backend, backend.nodes[0], FEWER)
    assert isinstance(found, AskFailed), found
    assert "change its size with dlrover-run scale" in str(found)


def an_internal_error_of_a_decision_ends_no_node(backend: Backend) -> None:
    with patch.dict(os.environ, LOGLEVEL="DEBUG"):
        node = backend.node()
        train(backend, node)
    backend.allow_internal_errors()
    with patch.object(coordinator, "decide", side_effect=ZeroDivisionError("planted")) as decide:
        node.report(phase=NodePhase.FAILED, failure=killed(node), progressed=True)
        backend.wait(3 * driver.ERROR_RETRY)
        assert decide.call_count > 1
        assert node.rendezvous.problem is None
        assert node.assignment.key.number == 1
    train(backend, node, number=2)
    backend.wait(60)
    # A master has a log besides the consoles of its nodes.
    shown = [line for line in backend.lines if "internal error" in line and "job 'job': " not in line]
    assert len(shown) == 1, shown
    assert "warning: internal error in a decision: ZeroDivisionError('planted'); the plan stays as it is" in shown[0]
    # And where, for those who look for the defect.
    assert any("debug: " in line and "coordinator.py" in line and " in advance: " in line for line in backend.lines)


def an_internal_error_beside_a_decision_ends_no_node(backend: Backend) -> None:
    """Where a report is taken, and where the assignment of a node is made or what the nodes wait for."""
    node = backend.node()
    train(backend, node)
    backend.allow_internal_errors()
    for number, (place, name) in enumerate(
        [(coordinator.Coordinator, "receive"), (coordinator.Coordinator, "waiting"), (coordinator, "build_assignment")],
        2,
    ):
        with patch.object(place, name, side_effect=ZeroDivisionError(f"planted in {name}")):
            node.report(phase=NodePhase.FAILED, failure=killed(node), progressed=True)
            backend.wait(3 * driver.ERROR_RETRY)
            assert node.rendezvous.problem is None
        train(backend, node, number=number)
    for name in ("receive", "waiting", "build_assignment"):
        # A master logs it, and each node prints it.
        authors = [line.split()[1] for line in backend.lines if f"planted in {name}" in line]
        assert len(authors) == len(set(authors)), authors


FACTS: dict[Fact, JobRules] = {
    an_internal_error_beside_a_decision_ends_no_node: msgspec.structs.replace(ONE, max_restarts=9),
    an_internal_error_of_a_decision_ends_no_node: ONE,
    one_node_gets_the_first_rank: ONE,
    the_same_report_again_changes_nothing: ONE,
    a_failure_costs_a_restart_and_begins_the_next_round: ONE,
    a_failure_without_a_restart_ends_the_job: rules(1, 1, last_call_timeout=1.0, max_restarts=0),
    the_success_of_all_workers_ends_the_job_for_good: ONE,
    a_node_is_checked_before_it_trains: rules(1, 1, last_call_timeout=1.0, check=CHECK_ONCE),
    a_node_that_never_computes_is_found_without_another_report: rules(
        1, 1, last_call_timeout=1.0, check=CHECK_ONCE, check_timeout=5.0
    ),
    a_node_gets_the_tasks_for_which_it_has_room: servers(),
    the_success_of_the_chief_ends_the_job: servers(),
    the_end_of_a_server_begins_the_next_version: servers(),
    a_deadline_of_tasks_passes_without_another_report: servers(ready_timeout=5.0, max_restarts=0),
    a_node_without_tasks_reads_what_is_missing: servers(),
    a_request_is_answered_once_the_plan_contains_it: servers(),
    a_refused_request_has_its_reason_as_the_answer: servers(),
    a_request_of_the_other_program_is_refused: ONE,
}


def two_nodes_meet_at_one_store(backend: Backend) -> None:
    a, b = backend.node("a"), backend.node("b")
    train(backend, a, b)
    mine, other = a.assignment.ranks, b.assignment.ranks
    assert mine is not None
    assert other is not None
    assert {mine.node_rank, other.node_rank} == {0, 1}
    assert {mine.first_rank, other.first_rank} == {0, 2}
    assert (mine.store_address, mine.store_port) == (other.store_address, other.store_port)
    assert a.assignment.key == b.assignment.key


def the_loss_of_a_node_costs_no_restart(backend: Backend) -> None:
    a, b = backend.node("a"), backend.node("b")
    train(backend, a, b)
    b.kill(silent=True)
    after = train(backend, a, number=2)
    assert after.restart_count == 0
    assert after.ranks is not None
    assert after.ranks.nodes == 1


def a_node_that_leaves_is_not_waited_for(backend: Backend) -> None:
    a, b = backend.node("a"), backend.node("b")
    train(backend, a, b)
    b.leave(phase=NodePhase.LEFT)
    left = backend.timeline.now
    backend.until(lambda: a.assignment.key.number == 2)
    assert backend.timeline.now - left < TWO.heartbeat_timeout
    assert a.assignment.restart_count == 0


def a_failure_reaches_all_nodes(backend: Backend) -> None:
    a, b = backend.node("a"), backend.node("b")
    train(backend, a, b)
    b.report(phase=NodePhase.FAILED, failure=killed(b), progressed=True)
    backend.until(lambda: a.assignment.phase is PlanPhase.FAILED and b.assignment.phase is PlanPhase.FAILED)
    assert a.assignment.failure is not None
    assert a.assignment.failure.exit_text == WHAT
    assert b.assignment.failure == a.assignment.failure


def too_few_nodes_wait_and_then_give_up(backend: Backend) -> None:
    a = backend.node("a")
    a.report(phase=NodePhase.WAITING)
    backend.until(lambda: a.assignment.waiting and a.assignment.waiting.seconds)
    backend.until(lambda: a.assignment.phase is PlanPhase.FAILED)
    assert backend.timeline.now >= TOO_FEW.join_timeout


def the_status_says_what_a_job_waits_for(backend: Backend) -> None:
    a = backend.node("a")
    a.report(phase=NodePhase.WAITING)
    backend.until(lambda: a.assignment.waiting and a.assignment.waiting.seconds)
    found = answer_of(backend, a, None)
    assert isinstance(found, JobStatus), found
    assert found.waiting == "1 node of 2 is here: a"
    assert found.waiting_seconds is not None


def a_node_finds_the_coordinator_again(backend: Backend) -> None:
    a, b = backend.node("a"), backend.node("b")
    before = train(backend, a, b)
    for _ in range(3):
        a.rendezvous.cut()
        backend.wait(20)
    assert (a.assignment.key, a.assignment.ranks) == (before.key, before.ranks)


TOO_FEW = rules(2, 2, join_timeout=30.0, last_call_timeout=1.0)


def problem_of(backend: Backend, node: WrittenNode) -> str:
    """Return why the node cannot take part."""
    backend.until(lambda: node.rendezvous.problem)
    return str(node.rendezvous.problem)


def a_node_that_trains_is_refused_where_servers_run(backend: Backend) -> None:
    a_node_gets_the_tasks_for_which_it_has_room(backend)
    backend.rules = TWO
    node = backend.node("b")
    node.report(phase=NodePhase.WAITING)
    assert "was started with tf-ps-run and this node with dlrover-run" in problem_of(backend, node)


def a_node_with_servers_is_refused_where_nodes_train(backend: Backend) -> None:
    train(backend, backend.node("a"))
    backend.rules = servers()
    node = backend.node("b", part=NodeTasks(capacity=ROOM))
    node.report(phase=NodePhase.WAITING)
    assert "was started with dlrover-run and this node with tf-ps-run" in problem_of(backend, node)


def a_node_of_another_program_is_no_spare(backend: Backend) -> None:
    train(backend, backend.node("a"), backend.node("b"))
    other = backend.node("c", program="other.py")
    other.report(phase=NodePhase.WAITING)
    problem = problem_of(backend, other)
    assert "the job 'job' runs a.py and has all of its nodes, and this node would run other.py" in problem
    same = backend.node("d")
    same.report(phase=NodePhase.WAITING)
    backend.until(lambda: same.assignment.waiting and same.assignment.epoch)
    backend.wait(30)
    assert same.rendezvous.problem is None


def a_node_of_another_program_is_no_spare_where_servers_run(backend: Backend) -> None:
    a_node_gets_the_tasks_for_which_it_has_room(backend)
    other = backend.node("b", part=NodeTasks(capacity=ROOM), program="other.py")
    other.report(phase=NodePhase.WAITING)
    assert "and this node would run other.py; give that an --rdzv-id" in problem_of(backend, other)
    evaluator = backend.node("c", part=NodeTasks(capacity=(Capacity(Role.EVALUATOR, 1),)), program="eval.py")
    evaluator.report(phase=NodePhase.WAITING)
    backend.until(lambda: (order := order_of(evaluator.assignment)) and order.tasks)
    assert evaluator.rendezvous.problem is None


def a_node_of_another_program_takes_part_where_it_is_needed(backend: Backend) -> None:
    a = backend.node("a")
    train(backend, a)
    other = backend.node("b", program="other.py")
    other.report(phase=NodePhase.WAITING)
    backend.until(lambda: other.assignment.ranks)
    assert other.rendezvous.problem is None


def a_node_that_was_not_asked_for_is_told_so(backend: Backend) -> None:
    nodes = [backend.node(name) for name in "ab"]
    train(backend, *nodes)
    third = backend.node("c")
    third.report(phase=NodePhase.WAITING)
    backend.until(lambda: third.assignment.waiting and third.assignment.epoch)
    backend.wait(5)
    assert third.assignment.waiting is not None
    assert third.assignment.waiting.text == (
        "2 nodes train, and this node was not asked for (--spares is 0, --nnodes has all of its nodes): it waits in "
        "case one is lost"
    )
    for node in nodes:
        node.report(phase=NodePhase.SUCCEEDED)
    backend.until(lambda: third.assignment.phase is PlanPhase.FINISHED)


FACTS_OF_SEVERAL: dict[Fact, JobRules] = {
    a_node_that_was_not_asked_for_is_told_so: TWO,
    a_node_of_another_program_is_no_spare: TWO,
    a_node_of_another_program_takes_part_where_it_is_needed: TWO,
    two_nodes_meet_at_one_store: TWO,
    the_loss_of_a_node_costs_no_restart: TWO,
    a_node_that_leaves_is_not_waited_for: TWO,
    a_failure_reaches_all_nodes: rules(2, 2, last_call_timeout=1.0, lost_after=1.0, max_restarts=0),
    too_few_nodes_wait_and_then_give_up: TOO_FEW,
    the_status_says_what_a_job_waits_for: TOO_FEW,
    a_node_finds_the_coordinator_again: TWO,
    a_node_of_another_program_is_no_spare_where_servers_run: servers(),
    a_node_that_trains_is_refused_where_servers_run: servers(),
    a_node_with_servers_is_refused_where_nodes_train: TWO,
}


def named(fact: object) -> str | None:
    return fact.__name__ if callable(fact) else None


def an_unfit_plan_in_etcd_counts_as_no_plan(backend: Backend) -> None:
    """A check whose groups name a node that it does not have: by hand, or from another version."""
    node = backend.node(part=NodeCheckReport(check_port=2))
    node.report(phase=NodePhase.WAITING)
    backend.until(lambda: node.assignment.waiting)
    truth = Truth()
    node.part = NodeCheckReport(compute_result=truth.compute(node.address), check_port=2)
    node.report(phase=NodePhase.WAITING)
    backend.until(lambda: check_part(node.assignment).check_task)
    node.kill()
    backend.wait(60)
    backend.edit_plan(lambda plan: re.sub(rb'"groups":\[\[[0-9,\[\]]*\]\]', b'"groups":[[0,7]]', plan))
    other = backend.node("b", part=NodeCheckReport(check_port=2))
    other.report(phase=NodePhase.WAITING)
    backend.until(lambda: other.assignment.waiting and other.assignment.epoch)
    backend.wait(10)
    assert other.rendezvous.problem is None
    assert any("fits together" in line and "a new plan is made" in line for line in backend.lines), backend.lines


def test_an_unfit_plan_in_etcd_counts_as_no_plan() -> None:
    with Backend("etcd", FACTS[a_node_is_checked_before_it_trains]) as backend:
        an_unfit_plan_in_etcd_counts_as_no_plan(backend)


def test_with_etcd_a_lease_follows_the_rules_of_the_first_node() -> None:
    with Backend("etcd", TWO) as backend:
        a = backend.node("a")
        train(backend, a)
        backend.rules = msgspec.structs.replace(TWO, keep_alive_interval=60.0)
        b = backend.node("b")
        b.report(phase=NodePhase.WAITING)
        train(backend, a, b, number=2)
        b.kill(silent=True)
        lost = backend.timeline.now
        after = train(backend, a, number=3)
        assert backend.timeline.now - lost < 2 * TWO.heartbeat_timeout + TWO.lost_after
        assert after.restart_count == 0


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("etcd", "the job 'job' has ended while this node was not connected to it"),
        # It is believed by this master only once the nodes that contradict it have left.
        (
            "master",
            "the master at 10.0.0.1:29400 refuses this node: a obeys a later coordinator than the other nodes of the "
            "job, such as b",
        ),
    ],
)
def test_a_node_ends_with_a_job_whose_last_coordinator_has_an_earlier_epoch_than_its_own(
    name: str, problem: str
) -> None:
    """The records are lost, and the clock of the later coordinator is behind: the epochs come from the clocks."""
    with Backend(name, ONE) as backend:
        waiting = backend.node("a")
        waiting.report(phase=NodePhase.WAITING)
        backend.until(lambda: waiting.assignment.epoch)
        waiting.stop()
        backend.lose_records()
        with patch.object(leader.time, "time_ns", return_value=1_000_000_000):
            other = backend.node("b")
            train(backend, other)
        assert 0 < other.assignment.epoch < waiting.assignment.epoch
        other.report(phase=NodePhase.SUCCEEDED)
        backend.until(lambda: other.assignment.phase is PlanPhase.FINISHED)
        # While another node of the job has not left yet: then its name is free.
        waiting.resume()
        backend.until(lambda: waiting.rendezvous.problem)
        assert waiting.rendezvous.problem == problem


def test_a_node_that_takes_part_with_another_program_is_warned() -> None:
    with Backend("master", TWO) as backend:
        a_node_of_another_program_takes_part_where_it_is_needed(backend)
        warning = "warning: the other nodes of the job run a.py, and this node runs other.py"
        assert any(warning in line for line in backend.lines), backend.lines


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("fact", FACTS, ids=named)
def test_a_fact_holds_on_every_backend(fact: Fact, name: str) -> None:
    with Backend(name, FACTS[fact]) as backend:
        fact(backend)


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("fact", FACTS_OF_SEVERAL, ids=named)
def test_a_fact_of_several_nodes_holds_on_every_backend(fact: Fact, name: str) -> None:
    with Backend(name, FACTS_OF_SEVERAL[fact]) as backend:
        fact(backend)


@pytest.mark.parametrize(
    ("fact", "lines"),
    [
        (a_node_is_checked_before_it_trains, []),
        (a_node_that_never_computes_is_found_without_another_report, ["Fault nodes are: [0] and stragglers are: []."]),
    ],
    ids=["passed", "dismissed"],
)
def test_a_single_node_logs_the_result_of_a_check_unless_its_agent_does(fact: Fact, lines: list[str]) -> None:
    with Backend("local", FACTS[fact]) as backend:
        fact(backend)
        assert [line[line.index("Fault") :] for line in backend.lines if "Fault nodes" in line] == lines


def test_a_single_node_shows_an_internal_error_after_its_check_too() -> None:
    """Its agent prints the result of a check itself, and the lines of the coordinator are dropped then."""
    with Backend("local", FACTS[a_node_is_checked_before_it_trains]) as backend:
        a_node_is_checked_before_it_trains(backend)
        (node,) = backend.nodes
        assert node.assignment.is_announced
        backend.allow_internal_errors()
        with patch.object(coordinator, "decide", side_effect=ZeroDivisionError("planted")):
            node.report(phase=NodePhase.FAILED, failure=killed(node), progressed=True)
            backend.wait(driver.ERROR_RETRY)
        assert any("warning: internal error in a decision: ZeroDivisionError" in line for line in backend.lines)


def test_a_node_with_a_node_rank_flag_is_not_checked() -> None:
    async def take_part() -> None:
        client = LocalClient(rules(2, 2, check=CHECK_ONCE), 1, lambda: None)
        report = NodeReport(node_id="a", incarnation="1", host="a", address="a.net", port=1, workers=2)
        client.report(msgspec.structs.replace(report, parts=(NodeCheckReport(check_port=2),)))
        assert client.assignment.phase is PlanPhase.TRAINING
        assert client.assignment.ranks is not None
        assert client.assignment.ranks.node_rank == 1
        await client.close()

    asyncio.run(take_part())
