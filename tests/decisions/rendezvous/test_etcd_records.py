"""The records in etcd: they are read as they were written, invalid data is recognised, and jobs and nodes read only
their own records."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.master_node import status
from support.scripted_agent import rank_assignment

from dlrover_run.coordination.records.assignment import Assignment, NodeView, Waiting
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import (
    Failure,
    Member,
    NodeKey,
    RoundKey,
)
from dlrover_run.coordination.records.rules import MAX_NODES, JobRules
from dlrover_run.rendezvous.kv import records as etcd_records
from dlrover_run.rendezvous.kv.records import (
    BUCKETS,
    BucketMessage,
    Keys,
    StoredPlan,
    bucket_of,
    decode_record,
    encode_record,
)
from dlrover_run.transport.messages import InvalidMessage, decode_rules, encode_rules
from dlrover_run.words.reasons import sentence

RULES = encode_rules(JobRules(min_nodes=2, max_nodes=4))
names = st.text(min_size=1, max_size=20)


def test_each_kind_of_record_comes_back_as_it_was() -> None:
    failure = Failure(1, "b", "was killed by SIGKILL", trace="é\x1b[31m\x00\U0001f525" * 1000)
    word = BucketMessage(
        RULES,
        Assignment(epoch=3, failure=failure),
        Waiting(sentence("2 more nodes"), 3.5),
        (("a", "1", NodeView(ranks=rank_assignment())),),
    )
    assert decode_record(encode_record(word), BucketMessage) == word
    assert decode_record(encode_record(status("a")), NodeReport) == status("a")
    stored = StoredPlan(RULES, Plan(epoch=7, restart_times=(1.5, 2.25), members=(Member("a", "1", "host", 8),)))
    assert decode_record(encode_record(stored), StoredPlan) == stored
    assert decode_rules(stored.rules) == JobRules(min_nodes=2, max_nodes=4)


def test_the_plan_of_the_largest_job_fits_into_one_request() -> None:
    members = tuple(
        Member(f"{i}-{zlib.crc32(b'%d' % i):012x}", f"{i * 7919 * 10**25:032x}", f"node-{i}.cluster", 8)
        for i in range(MAX_NODES)
    )
    stored = StoredPlan(RULES, Plan(phase=PlanPhase.TRAINING, key=RoundKey(1, 1), members=members))
    packed = encode_record(stored)
    assert len(packed) < 1_400_000
    assert decode_record(packed, StoredPlan) == stored


@given(st.binary(max_size=200))
def test_invalid_data_is_recognised(data: bytes) -> None:
    for kind in (NodeReport, StoredPlan, BucketMessage):
        with pytest.raises(InvalidMessage):
            decode_record(data, kind)


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b'{"rules":{},"plan":3}',
        b"{" * 100_000,
        zlib.compress(b"[]"),
        zlib.compress(b"{}" * 50_000)[:-9],
        b"\xff",
    ],
)
def test_what_is_almost_a_record_is_none(data: bytes) -> None:
    with pytest.raises(InvalidMessage):
        decode_record(data, StoredPlan)


def test_what_would_fill_the_memory_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_records, "MAX_DECODED", 1000)
    with pytest.raises(InvalidMessage, match="longer than any record"):
        decode_record(zlib.compress(b" " * 1001), StoredPlan)


def test_a_node_finds_its_own_ranks_and_without_any_what_it_waits_for() -> None:
    first, second = rank_assignment(node_rank=0), rank_assignment(node_rank=1)
    waiting = Waiting(sentence("a place"))
    word = BucketMessage(
        RULES, Assignment(epoch=3), waiting, (("a", "1", NodeView(ranks=first)), ("b", "1", NodeView(ranks=second)))
    )
    assert word.assignment(NodeKey("b", "1")) == Assignment(epoch=3, ranks=second)
    assert word.assignment(NodeKey("b", "2")) == Assignment(epoch=3, waiting=waiting)
    assert word.assignment(NodeKey("c", "1")) == Assignment(epoch=3, waiting=waiting)


@given(names, names)
def test_no_keys_of_a_job_are_below_the_prefix_of_another(one: str, other: str) -> None:
    first, second = Keys("/dlrover-run", one), Keys("/dlrover-run", other)
    if one != other:
        assert not first.job.startswith(second.job)
        assert first.leader != second.leader
    assert all(
        key.startswith(first.job) for key in (first.leader, first.plan, first.over, first.node("x"), first.messages(3))
    )


def test_nodes_are_spread_over_all_buckets() -> None:
    counts = [0] * BUCKETS
    for i in range(64 * BUCKETS):
        counts[bucket_of(f"worker-{i}")] += 1
    assert min(counts) > 0
    assert max(counts) < 3 * 64
