"""What nodes read in etcd: the messages of the job's coordinator, in small records. And what the coordinator reads
there.
"""

from __future__ import annotations

import itertools

import pytest
from support.master_node import status
from support.node_truth import Truth
from support.policy_parts import check_part
from support.virtual_torch import TorchJob, rules

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.driver import Driver
from dlrover_run.coordination.node_views import common_assignment
from dlrover_run.coordination.records.assignment import Assignment, Waiting
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.validation import MAX_EPOCH
from dlrover_run.features.node_check.rules import CHECK_ONCE
from dlrover_run.rendezvous.kv.leader import MembershipWatch
from dlrover_run.rendezvous.kv.records import (
    BUCKETS,
    Keys,
    bucket_of,
    decode_record,
    encode_record,
    messages_by_bucket,
)
from dlrover_run.store.operations import Change, KeyValue
from dlrover_run.words.reasons import sentence

KEYS = Keys("/dlrover-run", "job")
WAITING = Waiting(sentence("2 nodes of 3 are here"), 12.0)


def job_of(*names: str, max_nodes: int) -> TorchJob:
    job = TorchJob(rules(max_nodes, max_nodes))
    job.come(*names)
    return job


def test_each_node_reads_what_a_master_would_send() -> None:
    names = [f"node-{i}" for i in range(80)]
    job = job_of(*names, max_nodes=80)
    job.come("late")
    words = messages_by_bucket(job.coordinator, WAITING)
    for name in (*names, "late"):
        key = NodeKey(name, "1")
        assert words[bucket_of(name)].assignment(key) == job.coordinator.assignment(key, WAITING)
    assert job.plan.phase is PlanPhase.TRAINING


def test_only_buckets_with_readers_are_written_until_the_job_has_finished() -> None:
    job = job_of("a", "b", max_nodes=2)
    assert set(messages_by_bucket(job.coordinator, WAITING)) == {bucket_of("a"), bucket_of("b")}
    job.report_phase("a", NodePhase.SUCCEEDED)
    job.report_phase("b", NodePhase.SUCCEEDED)
    assert job.plan.phase is PlanPhase.FINISHED
    words = messages_by_bucket(job.coordinator, WAITING)
    assert set(words) == set(range(BUCKETS))
    assert {word.assignment(NodeKey("stranger", "9")) for word in words.values()} == {common_assignment(job.plan)}


def test_a_node_without_ranks_reads_its_check_task_and_its_health() -> None:
    truth = Truth(crashing={"b.net"})
    job = TorchJob(rules(2, 4, check=CHECK_ONCE), truth=truth)
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
    assert [node_health.node_id for node_health in check_part(read("a")).health_table] == ["a", "c", "d", "b"]
    assert check_part(read("b")).health == check_part(read("a")).health_table[-1]


def test_waiting_progress_is_written_only_where_a_node_waits() -> None:
    job = job_of("a", "b", max_nodes=2)
    other = next(f"n{i}" for i in itertools.count() if bucket_of(f"n{i}") not in (bucket_of("a"), bucket_of("b")))
    job.come(other)
    words = messages_by_bucket(job.coordinator, WAITING)
    assert [words[bucket_of(name)].waiting for name in ("a", "b", other)] == [None, None, WAITING]


class WatchedMembership:
    """A membership with a coordinator, and the lines that were printed."""

    def __init__(self) -> None:
        self.output: list[str] = []
        self.coordinator = Coordinator(rules(1, 4), 0.0, 1)
        self.driver = Driver(self.coordinator, self.output.append, kept_together=True)
        self.membership = MembershipWatch(KEYS, NodeKey("a", "one"), self.output.append)

    def put(self, value: NodeReport | bytes, node_id: str = "a") -> bool:
        data = value if isinstance(value, bytes) else encode_record(value)
        key = KEYS.node(node_id)
        return self.membership.receive(self.driver, Change(key, KeyValue(key, data, 1, 1, 1)), 1.0)

    def drop(self, node_id: str) -> bool:
        return self.membership.receive(self.driver, Change(KEYS.node(node_id), None), 2.0)

    @property
    def connected(self) -> list[str]:
        return sorted(key.node_id for key, p in self.coordinator.nodes.items() if p.connected)


def test_a_status_is_received_and_its_deletion_disconnects_the_node() -> None:
    watched = WatchedMembership()
    assert watched.put(status("a"))
    assert not watched.put(status("a"))
    assert watched.connected == ["a"]
    assert watched.drop("a")
    assert not watched.drop("a")
    assert watched.connected == []


def test_a_node_that_is_missing_in_a_full_read_is_disconnected() -> None:
    watched = WatchedMembership()
    watched.put(status("a"), "a")
    watched.put(status("b"), "b")
    there = KeyValue(KEYS.node("b"), encode_record(status("b")), 1, 1, 1)
    new = KeyValue(KEYS.node("c"), encode_record(status("c")), 1, 1, 1)
    watched.membership.receive_all(watched.driver, [there, new], 3.0)
    assert watched.connected == ["b", "c"]


def test_a_node_that_left_is_not_waited_for() -> None:
    watched = WatchedMembership()
    watched.put(status("b"), "b")
    assert not watched.membership.has_left
    watched.put(status("b", phase=NodePhase.LEFT), "b")
    assert not watched.membership.has_left, "another node has"
    watched.put(status("a", phase=NodePhase.LEFT), "a")
    assert watched.membership.has_left


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
def test_an_invalid_status_is_ignored_and_reported_once(value: bytes, words: str) -> None:
    watched = WatchedMembership()
    assert not watched.put(value)
    assert not watched.put(value)
    assert watched.connected == []
    assert len(watched.output) == 1
    assert words in watched.output[0]
    assert KEYS.node("a") in watched.output[0]


def test_an_invalid_value_that_replaces_a_status_does_not_disconnect_the_node() -> None:
    watched = WatchedMembership()
    watched.put(status("a"))
    watched.put(b"rubbish")
    assert watched.connected == ["a"]


def test_nodes_above_the_maximum_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrover_run.rendezvous.kv.leader.MAX_NODES", 2)
    watched = WatchedMembership()
    for name in "abc":
        watched.put(status(name), name)
    assert watched.connected == ["a", "b"]
    assert "one too many" in watched.output[0]
