"""The records of a cluster on the wire: rules, orders, reports, the state that nodes repeat, and invalid reports."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.master_node import status
from support.policy_parts import cluster_of, cluster_rules, order_of

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.records.assignment import Assignment, Waiting
from dlrover_run.coordination.records.bounds import MAX_TRACE, MAX_WHAT
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.round import Member, NodeKey, RoundKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.records.validation import MAX_ROUND, config_mismatch, validate_report
from dlrover_run.rendezvous.client import AssignmentTracker
from dlrover_run.rendezvous.kv.records import (
    BucketMessage,
    bucket_of,
    decode_record,
    encode_record,
    messages_by_bucket,
)
from dlrover_run.transport.messages import (
    MAX_MASTER_MESSAGE,
    MAX_NODE_MESSAGE,
    Assigned,
    InvalidMessage,
    Report,
    decode_from_master,
    decode_from_node,
    decode_rules,
    encode,
    encode_rules,
)
from dlrover_run.words.reasons import sentence
from tf_ps_runner.cluster.model import (
    MAX_NODE_TASKS,
    MAX_TASKS,
    AssignedTask,
    Capacity,
    Cluster,
    DesiredReplicas,
    EndCause,
    PlannedTask,
    RecoveryHint,
    Role,
    RoleState,
    Stage,
    TaskEnd,
    TaskKey,
    TaskStage,
    TaskStatus,
)
from tf_ps_runner.cluster.orders import MAX_ENDS_BYTES, NodeOrder, OrderMemory
from tf_ps_runner.cluster.recovery import recover_cluster, recovery_hint
from tf_ps_runner.cluster.reports import MAX_ADDRESS, MAX_CAPACITY, MAX_ID, MAX_STEP, NodeTasks
from tf_ps_runner.cluster.rules import ClusterRules

RULES = JobRules(max_nodes=4, parts=(ClusterRules(min_ps=1, max_ps=4, max_workers=8, save_timeout=2.5),))


def key(role: str, number: int) -> TaskKey:
    return TaskKey(Role(role), number)


def task(role: str, number: int, rank: int, node: str, **changes: Any) -> PlannedTask:
    values = {"version": 3, "address": f"{node}.net", "port": 3000 + number, **changes}
    return PlannedTask(key=key(role, number), rank=rank, node_id=node, incarnation="one", host=f"host-{node}", **values)


CLUSTER = Cluster(
    version=3,
    stage=Stage.TRAINING,
    tasks=(task("ps", 4, 0, "a"), task("ps", 5, 1, "b"), task("chief", 2, 0, "b"), task("worker", 7, 1, "b")),
    roles=(
        RoleState(Role.PS, ids=6, failures=1),
        RoleState(Role.CHIEF, ids=3),
        RoleState(Role.WORKER, ids=8, failures=2, succeeded=(0,)),
    ),
    desired=DesiredReplicas(workers=2),
    ports_held_at=1.0,
    servers_ready_at=1.0,
    opened_at=1.0,
)
PLAN = Plan(
    epoch=5,
    phase=PlanPhase.TRAINING,
    key=RoundKey(5, 3),
    members=(Member("a", "one", "host-a", 1), Member("b", "one", "host-b", 1)),
    parts=(CLUSTER,),
)
A, B = NodeKey("a", "one"), NodeKey("b", "one")


def cluster(plan: Plan) -> Cluster:
    found = cluster_of(plan)
    assert found is not None
    return found


def assignments_of(plan: Plan, *keys: NodeKey) -> list[Assignment]:
    """Return what a coordinator with that plan sends to the nodes."""
    coordinator = Coordinator(RULES, 0.0, plan.epoch + 1, plan)
    return [coordinator.assignment(key, Waiting(sentence("for others"))) for key in keys]


# Rules.


def test_rules_of_a_cluster_travel_under_names_of_their_own() -> None:
    values = encode_rules(RULES)
    assert values["parameter_servers.max_ps"] == 4
    assert values["parameter_servers.save_timeout"] == 2.5
    assert decode_rules(values) == RULES


def test_a_job_without_servers_has_the_rules_that_it_always_had() -> None:
    assert not [name for name in encode_rules(JobRules()) if name.startswith("parameter_servers")]
    assert decode_rules(encode_rules(JobRules())) == JobRules()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parameter_servers.least_pss": 1}, "unknown field `least_pss`"),
        ({"cluster": 1}, "unknown rules: cluster"),
        ({"parameter_servers.min_ps": 0}, "at least one parameter server"),
        ({"parameter_servers.min_ps": 5}, "MIN may not be above MAX"),
        ({"parameter_servers.min_workers": 9}, "MIN may not be above MAX"),
        ({"parameter_servers.max_workers": MAX_TASKS}, "at most 4000 tasks"),
        ({"parameter_servers.max_workers": 1.5}, "not the rules of a job"),
        ({"parameter_servers.ready_timeout": -1.0}, "below 0"),
        ({"parameter_servers.ps_memory": 10**10}, "parameter_servers.ps_memory is too large"),
    ],
)
def test_rules_that_no_cluster_has_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidMessage, match=words):
        decode_rules({**encode_rules(RULES), **changes})


def test_a_user_is_informed_which_rules_of_the_cluster_are_others() -> None:
    other = replace(
        RULES, max_restarts=7, parts=(msgspec.structs.replace(cluster_rules(RULES), max_ps=2, end_grace=1.0),)
    )
    assert config_mismatch(RULES, RULES) == ""
    assert config_mismatch(RULES, other) == (
        "the rules of the job's first node hold: --max-restarts is 0, not 7; --ps (most) is 4, not 2; "
        "end_grace is 30, not 1"
    )


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (ClusterRules(), "1 parameter server and a chief"),
        (ClusterRules(2, 2, 3, 3), "2 parameter servers, a chief and 3 workers"),
        (ClusterRules(1, 4, 0, 8, 1), "1 to 4 parameter servers, a chief, 0 to 8 workers and an evaluator"),
    ],
)
def test_what_a_job_consists_of_is_reported_as_text(rules: ClusterRules, words: str) -> None:
    assert rules.job_size() == words


# What each node receives.


def test_each_node_receives_its_tasks_and_what_all_receive() -> None:
    a, b = assignments_of(PLAN, A, B)
    assert [str(one.key) for one in order_of(a).tasks] == ["ps-4"]
    assert [str(one.key) for one in order_of(b).tasks] == ["chief-2", "ps-5", "worker-7"]
    assert order_of(a).servers == order_of(b).servers == ("a.net:3004", "b.net:3005")
    assert order_of(a).hint == order_of(b).hint == recovery_hint(CLUSTER)
    assert (a.ranks, a.waiting) == (None, None)


def test_a_node_that_hosts_nothing_waits() -> None:
    (stranger,) = assignments_of(PLAN, NodeKey("c", "one"))
    assert order_of(stranger) is None
    assert stranger.waiting == Waiting(sentence("for others"))


def test_a_node_reads_in_etcd_what_a_master_would_send_it_and_no_address_twice() -> None:
    coordinator = Coordinator(RULES, 0.0, 6, PLAN)
    waiting = Waiting(sentence("for others"))
    words = messages_by_bucket(coordinator, waiting, mismatched=("stranger",))
    for node in (A, B):
        word = decode_record(encode_record(words[bucket_of(node.node_id)]), BucketMessage)
        assert word.assignment(node) == coordinator.assignment(node, waiting)
        assert all(order_of(part) is None or not order_of(part).servers for _, _, part in word.views)
    assert cluster_rules(decode_rules(words[bucket_of("stranger")].rules)) == cluster_rules(RULES)


def test_the_longest_order_and_the_longest_status_fit_into_their_messages() -> None:
    address = "x" * MAX_ADDRESS
    hosted = tuple(
        msgspec.structs.replace(task("worker", 800_000 + rank, rank, "n" * 36), address=address, port=65535)
        for rank in range(MAX_NODE_TASKS)
    )
    addresses = (f"{address}:65535",) * MAX_TASKS
    account = RecoveryHint(
        version=MAX_ROUND,
        servers=1,
        tasks=MAX_TASKS,
        roles=(RoleState(Role.WORKER, succeeded=tuple(range(MAX_TASKS))),),
    )
    order = NodeOrder(version=MAX_ROUND, tasks=hosted, servers=addresses[:1], workers=addresses, hint=account)
    data = encode(Assigned(Assignment(parts=(order,), reasons=sentence("x" * 2 * MAX_WHAT))))
    assert MAX_NODE_MESSAGE < len(data) < MAX_MASTER_MESSAGE
    assert isinstance(decode_from_master(data), Assigned)
    end = TaskEnd(EndCause.FAILURE, "\n" * MAX_WHAT, "\n" * MAX_TRACE)
    ended = tuple(TaskStatus(key=one.key, stage=TaskStage.ENDED, step=MAX_STEP, end=end) for one in hosted)
    hosting = order.remember(None).add_to(NodeTasks(capacity=(Capacity(Role.WORKER, MAX_CAPACITY),), tasks=ended))
    data = encode(Report(status("n" * 36, "i" * 36, parts=(hosting,))))
    assert len(data) < MAX_NODE_MESSAGE
    assert isinstance(decode_from_node(data), Report)


# What nodes repeat.


def repeating(plan: Plan, name: str, **changes: Any) -> NodeReport:
    """Return what a node of that plan reports to a coordinator without records."""
    (assignment,) = assignments_of(plan, NodeKey(name, "one"))
    tasks = tuple(
        TaskStatus(key=one.key, stage=TaskStage.READY, port=one.port, restored=40, step=90)
        for one in order_of(assignment).tasks
    )
    hosting = order_of(assignment).remember(None).add_to(NodeTasks(capacity=(Capacity(Role.PS, 1),), tasks=tasks))
    values = {
        "known_round": plan.key,
        "epoch": plan.epoch,
        "phase": NodePhase.RUNNING,
        "address": f"{name}.net",
        **changes,
    }
    return status(name, parts=(hosting,), **values)


def recovered(*statuses: NodeReport, grace_over: bool = False) -> tuple[Plan, Cluster]:
    """Return the plan that a coordinator without records recovers from these reports."""
    plan = recover_cluster(Plan(epoch=9), statuses, grace_over, 100.0)
    assert plan is not None
    return plan, cluster(plan)


def test_from_what_all_nodes_repeat_the_cluster_is_made_again() -> None:
    plan, made = recovered(repeating(PLAN, "a"), repeating(PLAN, "b"))
    assert (plan.phase, plan.key, plan.epoch) == (PlanPhase.TRAINING, PLAN.key, 9)
    assert {member.key for member in plan.members} == {A, B}
    assert {one.key: one for one in made.tasks} == {one.key: one for one in CLUSTER.tasks}
    assert (made.version, made.stage, made.desired, made.role_state(Role.WORKER).succeeded) == (
        3,
        Stage.TRAINING,
        CLUSTER.desired,
        (0,),
    )
    assert set(made.roles) == set(CLUSTER.roles)
    assert (made.ports_held_at, made.servers_ready_at, made.opened_at, made.step) == (
        100.0,
        100.0,
        100.0,
        40,
    )


def test_a_round_that_a_node_knows_of_an_earlier_job_is_not_that_of_the_cluster() -> None:
    earlier = status("c", parts=(NodeTasks(capacity=(Capacity(Role.PS, 1),)),), known_round=RoundKey(99, 8), epoch=99)
    plan, made = recovered(repeating(PLAN, "a"), earlier, repeating(PLAN, "b"))
    assert (plan.key, plan.key.number) == (PLAN.key, made.version)
    of_others = [repeating(PLAN, name, known_round=RoundKey(99, 8)) for name in "ab"]
    plan, made = recovered(*of_others)
    assert plan.key == RoundKey(99, made.version)


def test_a_node_that_has_not_reported_is_waited_for_and_then_its_servers_are_lost() -> None:
    assert recover_cluster(Plan(epoch=9), [repeating(PLAN, "b")], False, 100.0) is None
    plan, made = recovered(repeating(PLAN, "b"), grace_over=True)
    lost = next(one for one in made.tasks if (one.role, one.rank) == (Role.PS, 0))
    assert lost.node_id == "unknown-ps-0"
    assert lost.key.id == 6, "one that no client had"
    assert RoleState(Role.PS, ids=7, failures=1) in made.roles
    assert NodeKey("unknown-ps-0", "unknown") in {member.key for member in plan.members}


def test_a_chief_that_no_node_reports_is_lost_too() -> None:
    _, made = recovered(repeating(PLAN, "a"), grace_over=True)
    assert {str(one.key): one.node_id for one in made.tasks} == {
        "ps-4": "a",
        "ps-6": "unknown-ps-1",
        "chief-3": "unknown-chief-0",
    }
    assert made.stage is Stage.STARTING


def test_the_latest_version_counts_where_nodes_know_of_two() -> None:
    later = msgspec.structs.replace(
        PLAN,
        key=RoundKey(5, 4),
        parts=(
            msgspec.structs.replace(
                CLUSTER,
                version=4,
                tasks=(
                    task("ps", 6, 0, "b", version=4),
                    task("chief", 3, 0, "b", version=4),
                    task("evaluator", 0, 0, "a"),
                ),
            ),
        ),
    )
    plan, made = recovered(repeating(PLAN, "a"), repeating(later, "b"), grace_over=True)
    assert plan.key == RoundKey(5, 4)
    assert {str(one.key) for one in made.tasks} == {"ps-6", "chief-3"}
    plan, made = recovered(repeating(later, "a"), repeating(later, "b"))
    assert {str(one.key) for one in made.tasks} == {"ps-6", "chief-3", "evaluator-0"}


def test_between_two_versions_the_account_goes_on() -> None:
    waiting = msgspec.structs.replace(
        PLAN, phase=PlanPhase.GATHERING, parts=(msgspec.structs.replace(CLUSTER, tasks=(), stage=Stage.STARTING),)
    )
    plan, made = recovered(repeating(waiting, "a"), grace_over=True)
    assert (plan.phase, plan.key.number) == (PlanPhase.GATHERING, 3)
    assert set(made.roles) == set(CLUSTER.roles)


def test_until_the_cluster_is_known_again_each_node_goes_on_as_it_is() -> None:
    coordinator = Coordinator(RULES, 0.0, 9)
    report = repeating(PLAN, "b")
    coordinator.receive(report, 0.0)
    coordinator.advance(0.0)
    assert coordinator.recovering
    word = coordinator.assignment(report.key)
    (before,) = assignments_of(PLAN, B)
    orders = AssignmentTracker()
    orders.take(before)
    assert orders.take(word)
    assert orders.assignment.epoch == 9
    assert order_of(orders.assignment) == order_of(before)
    memory = orders.memory.by_feature[ClusterRules.__struct_config__.tag]
    assert isinstance(memory, OrderMemory)
    assert memory.hint is not None
    assert len(memory.hint.assigned) == 3


def test_a_node_follows_a_coordinator_once_it_knows_the_latest_round() -> None:
    orders = AssignmentTracker()
    (latest,) = assignments_of(PLAN, B)
    assert orders.take(latest)
    later = msgspec.structs.replace(latest, epoch=latest.epoch + 1)
    assert not orders.take(msgspec.structs.replace(later, key=RoundKey(latest.key.epoch, latest.key.number - 1)))
    # Its reports name the one before, so that has to be heard until the later one knows the round.
    assert orders.assignment.epoch == latest.epoch
    assert orders.take(msgspec.structs.replace(latest, phase=PlanPhase.FINISHED))
    assert orders.take(later)
    assert not orders.take(latest)


def test_a_node_that_hosted_nothing_waits_until_the_cluster_is_known_again() -> None:
    coordinator = Coordinator(RULES, 0.0, 9)
    report = status("c", parts=(NodeTasks(capacity=(Capacity(Role.PS, 1),)),), known_round=PLAN.key, epoch=5)
    coordinator.receive(report, 0.0)
    coordinator.advance(0.0)
    word = coordinator.assignment(report.key, Waiting(sentence("for others")))
    assert (order_of(word), word.waiting) == (None, Waiting(sentence("for others")))


def test_a_node_repeats_no_task_that_it_was_requested_to_end_and_forgets_no_account() -> None:
    (before,) = assignments_of(PLAN, B)
    memory = order_of(before).remember(None).forget()
    assert memory.hint == recovery_hint(CLUSTER)


def test_of_many_ends_the_longest_are_shortened() -> None:
    def ended(number: int, length: int) -> TaskStatus:
        end = TaskEnd(EndCause.FAILURE, "raised ValueError: " + "x" * 500, "t" * length)
        return TaskStatus(key=key("worker", number), stage=TaskStage.ENDED, end=end)

    tasks = (ended(0, MAX_ENDS_BYTES), ended(1, 100))
    first, second = OrderMemory().add_to(NodeTasks(tasks=tasks)).tasks
    assert second == tasks[1]
    assert first.end is not None
    assert first.end.trace == ""
    assert first.end.exit_text.startswith("raised ValueError: x")
    assert len(first.end.exit_text) == 100


# Invalid reports, which no agent sends.

SPENT = RoleState(Role.PS, ids=MAX_ID + 1)


@pytest.mark.parametrize(
    ("hosting", "words"),
    [
        (NodeTasks(capacity=(Capacity(Role.PS, 1 + MAX_CAPACITY // 2),)), "slots"),
        (NodeTasks(capacity=(Capacity(Role.PS, 1), Capacity(Role.PS, 1))), "twice"),
        (NodeTasks(tasks=(TaskStatus(key=key("ps", 1), stage=TaskStage.HELD),) * 2), "twice"),
        (NodeTasks(tasks=(TaskStatus(key=key("ps", MAX_ID + 1), stage=TaskStage.HELD),)), "no job has"),
        (NodeTasks(tasks=(TaskStatus(key=key("ps", 1), stage=TaskStage.HELD, step=MAX_STEP + 1),)), "step"),
        (NodeTasks(tasks=(TaskStatus(key=key("ps", 1), stage=TaskStage.HELD, saved=-2),)), "step"),
        (NodeTasks(tasks=(TaskStatus(key=key("ps", 1), stage=TaskStage.HELD, reached=MAX_STEP + 1),)), "step"),
        (NodeTasks(hint=RecoveryHint(version=MAX_ROUND + 1)), "repeats"),
        (NodeTasks(hint=RecoveryHint(roles=(SPENT,))), "repeats"),
        (NodeTasks(hint=RecoveryHint(servers=MAX_TASKS + 1)), "repeats"),
        (NodeTasks(hint=RecoveryHint(assigned=(AssignedTask(key("ps", MAX_ID + 1), 0, 1),))), "repeats"),
        (NodeTasks(hint=RecoveryHint(assigned=(AssignedTask(key("ps", 1), 0, MAX_ROUND + 1),))), "repeats"),
    ],
)
def test_a_report_of_what_no_node_hosts_is_refused(hosting: NodeTasks, words: str) -> None:
    problem = validate_report(status(parts=(hosting,)), Plan())
    assert problem is not None
    assert words in problem


def test_an_address_that_is_too_long_for_all_to_be_reported_is_refused_with_a_way_out() -> None:
    problem = validate_report(status(parts=(NodeTasks(),), address="x" * (MAX_ADDRESS + 1)), Plan())
    assert problem is not None
    assert "--local-addr" in problem


def test_a_report_of_what_a_node_hosts_is_accepted() -> None:
    for name in "ab":
        assert validate_report(repeating(PLAN, name, workers=0), PLAN) is None
