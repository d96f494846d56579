"""What nodes read in etcd, and what is heard of them there: all that a job's coordinator says, in small parts."""

from __future__ import annotations

import itertools

import pytest
from master_node import status
from node_truth import Truth
from policy_parts import check_part
from virtual_job import VirtualJob, rules

from dlrover_run.coordination.assignment import common_assignment
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.model import (
    Assignment,
    Member,
    NodeKey,
    NodePhase,
    NodeReport,
    Plan,
    PlanPhase,
    Waiting,
)
from dlrover_run.coordination.reasons import sentence
from dlrover_run.coordination.validation import MAX_EPOCH
from dlrover_run.etcd.operations import Change, KeyValue
from dlrover_run.policies.health.rules import CHECK_ONCE
from dlrover_run.rendezvous.etcd_leader import MembershipWatch
from dlrover_run.rendezvous.etcd_records import (
    BUCKETS,
    Keys,
    bucket_of,
    decode_record,
    encode_record,
    messages_by_bucket,
)

KEYS = Keys("/dlrover-run", "job")
WAITING = Waiting(sentence("2 nodes of 3 are here"), 12.0)


def job_of(*names: str, max_nodes: int) -> VirtualJob:
    job = VirtualJob(rules(max_nodes, max_nodes))
    job.come(*names)
    return job


def test_each_node_reads_what_a_master_would_send_it() -> None:
    names = [f"node-{i}" for i in range(80)]
    job = job_of(*names, max_nodes=80)
    job.come("late")
    words = messages_by_bucket(job.coordinator, WAITING)
    for name in (*names, "late"):
        key = NodeKey(name, "1")
        assert words[bucket_of(name)].assignment(key) == job.coordinator.assignment(key, WAITING)
    assert job.plan.phase is PlanPhase.TRAINING


def test_only_buckets_with_readers_are_written_until_the_job_is_over() -> None:
    job = job_of("a", "b", max_nodes=2)
    assert set(messages_by_bucket(job.coordinator, WAITING)) == {bucket_of("a"), bucket_of("b")}
    job.say("a", NodePhase.SUCCEEDED)
    job.say("b", NodePhase.SUCCEEDED)
    assert job.plan.phase is PlanPhase.FINISHED
    words = messages_by_bucket(job.coordinator, WAITING)
    assert set(words) == set(range(BUCKETS))
    assert {word.assignment(NodeKey("stranger", "9")) for word in words.values()} == {common_assignment(job.plan)}


def test_a_node_without_ranks_reads_its_task_and_what_is_known_of_it() -> None:
    truth = Truth(crashing={"b.net"})
    job = VirtualJob(rules(2, 4, check=CHECK_ONCE), truth=truth)
    job.deaf = {"a", "b", "c", "d"}
    job.come("a", "b", "c", "d")

    def read(name: str) -> Assignment:
        word = messages_by_bucket(job.coordinator, WAITING)[bucket_of(name)]
        return decode_record(encode_record(word), type(word)).assignment(job.key(name))

    task = check_part(read("b")).check_task
    assert task is not None
    assert task == check_part(job.coordinator.assignment(job.key("b"), WAITING)).check_task
    assert read("b").waiting == WAITING
    job.deaf.clear()
    job.settle()
    assert job.plan.phase is PlanPhase.TRAINING
    for name in "abcd":
        assert read(name) == job.coordinator.assignment(job.key(name), WAITING)
    assert [checkup.node_id for checkup in check_part(read("a")).health_table] == ["a", "c", "d", "b"]
    assert check_part(read("b")).health == check_part(read("a")).health_table[-1]


def test_progress_is_reported_only_where_a_node_waits() -> None:
    job = job_of("a", "b", max_nodes=2)
    other = next(f"n{i}" for i in itertools.count() if bucket_of(f"n{i}") not in (bucket_of("a"), bucket_of("b")))
    job.come(other)
    words = messages_by_bucket(job.coordinator, WAITING)
    assert [words[bucket_of(name)].waiting for name in ("a", "b", other)] == [None, None, WAITING]


class Hearing:
    """An membership with a coordinator, and what was said at the console."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.coordinator = Coordinator(rules(1, 4), 0.0, 1)
        self.membership = MembershipWatch(KEYS, self.said.append)

    def put(self, value: NodeReport | bytes, node_id: str = "a") -> bool:
        data = value if isinstance(value, bytes) else encode_record(value)
        key = KEYS.node(node_id)
        return self.membership.receive(self.coordinator, Change(key, KeyValue(key, data, 1, 1, 1)), 1.0)

    def drop(self, node_id: str) -> bool:
        return self.membership.receive(self.coordinator, Change(KEYS.node(node_id), None), 2.0)

    @property
    def connected(self) -> list[str]:
        return sorted(key.node_id for key, p in self.coordinator.members.items() if p.connected)


def test_a_status_is_received_and_its_end_is_the_end_of_a_connection() -> None:
    hearing = Hearing()
    assert hearing.put(status("a"))
    assert not hearing.put(status("a"))
    assert hearing.connected == ["a"]
    assert hearing.drop("a")
    assert not hearing.drop("a")
    assert hearing.connected == []


def test_of_a_whole_reading_what_is_missing_is_gone() -> None:
    hearing = Hearing()
    hearing.put(status("a"), "a")
    hearing.put(status("b"), "b")
    there = KeyValue(KEYS.node("b"), encode_record(status("b")), 1, 1, 1)
    new = KeyValue(KEYS.node("c"), encode_record(status("c")), 1, 1, 1)
    hearing.membership.receive_all(hearing.coordinator, [there, new], 3.0)
    assert hearing.connected == ["b", "c"]


def test_a_node_that_left_is_not_waited_for() -> None:
    hearing = Hearing()
    plan = Plan(members=(Member("a", "one", "a", 2), Member("b", "one", "b", 2), Member("c", "one", "c", 2, done=True)))
    hearing.put(status("a"), "a")
    assert hearing.membership.has_absent_member(plan)
    hearing.put(status("b"), "b")
    assert not hearing.membership.has_absent_member(plan)
    hearing.put(status("a", phase=NodePhase.LEFT), "a")
    assert hearing.membership.has_left(NodeKey("a", "one"))
    assert not hearing.membership.has_left(NodeKey("a", "two"))
    hearing.drop("a")
    assert not hearing.membership.has_absent_member(plan)
    hearing.drop("b")
    assert hearing.membership.has_absent_member(plan)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"rubbish", "no record of ours"),
        (b"\xff\x00", "no record of ours"),
        (encode_record(status("b")), "the report of b"),
        (encode_record(status("a", epoch=MAX_EPOCH + 1)), "an epoch that no coordinator has"),
        (encode_record(status("a", workers=0)), "workers, and this one reports 0"),
    ],
)
def test_what_is_no_status_does_not_count_and_is_reported_once(value: bytes, words: str) -> None:
    hearing = Hearing()
    assert not hearing.put(value)
    assert not hearing.put(value)
    assert hearing.connected == []
    assert len(hearing.said) == 1
    assert words in hearing.said[0]
    assert KEYS.node("a") in hearing.said[0]


def test_rubbish_in_place_of_a_status_does_not_end_its_node() -> None:
    hearing = Hearing()
    hearing.put(status("a"))
    hearing.put(b"rubbish")
    assert hearing.connected == ["a"]


def test_no_node_counts_beyond_the_most_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrover_run.rendezvous.etcd_leader.MAX_NODES", 2)
    hearing = Hearing()
    for name in "abc":
        hearing.put(status(name), name)
    assert hearing.connected == ["a", "b"]
    assert "one too many" in hearing.said[0]
