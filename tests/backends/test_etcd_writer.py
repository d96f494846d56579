"""The writes of an elected agent to a fake etcd: in order, once, and only while the agent is elected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.etcd import EtcdCluster
from simulation.timeline import Process, Timeline

from dlrover_run.rendezvous.kv import writer as etcd_writer
from dlrover_run.rendezvous.kv.records import Keys
from dlrover_run.rendezvous.kv.writer import FencedWriter, NotElected, StaleWriteApplied
from dlrover_run.store.operations import Absent, Delete, Put, Range, StoreUnavailable, Txn, TxnResult

KEYS = Keys("/dlrover-run", "job")
PLAN, WORDS = KEYS.plan, KEYS.messages(3)


class Bed:
    """An elected agent with a fake cluster. `fates` are the outcomes of its transactions in order; all further
    transactions succeed. A late transaction waits for `deliver`.
    """

    def __init__(self, *fates: str) -> None:
        timeline = Timeline(1)
        self.cluster = EtcdCluster(timeline)
        self.owner = Process(timeline, "agent")
        self.lease = self.cluster.grant(9, self.owner)
        self.fates = list(fates)
        self.sent: list[Txn] = []
        self.late: list[Txn] = []
        self.elect()
        store: Any = self
        self.writing = FencedWriter(store, KEYS, self.cluster.keys[KEYS.leader])

    def elect(self) -> None:
        self.cluster.commit(Txn((Absent(Range(KEYS.leader)),), (Put(KEYS.leader, b"n0", self.lease),)), self.owner)

    async def commit(self, txn: Txn) -> TxnResult:
        self.sent.append(txn)
        fate = self.fates.pop(0) if self.fates else "well"
        if fate == "late":
            self.late.append(txn)
            raise StoreUnavailable("no server answers")
        outcome = self.cluster.commit(txn, self.owner)
        if fate == "unanswered":
            raise StoreUnavailable("no server answers")
        return self.cluster.commit(txn, self.owner) if fate == "twice" else outcome

    def deliver(self) -> None:
        for txn in self.late:
            self.cluster.commit(txn, self.owner)

    def values(self, *keys: str) -> list[bytes | None]:
        return [self.cluster.keys[key].value if key in self.cluster.keys else None for key in keys]


def run(bed: Bed, scene: Callable[[FencedWriter], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scene(bed.writing))


def test_an_unchanged_record_is_not_written_again() -> None:
    bed = Bed()

    async def scene(writing: FencedWriter) -> None:
        await writing.read()
        await writing.write({PLAN: b"1", WORDS: b"a"}, bed.lease)
        await writing.write({PLAN: b"1", WORDS: b"a"}, bed.lease)
        await writing.write({PLAN: b"1", WORDS: b"b"}, bed.lease)

    run(bed, scene)
    assert [[put.key for put in txn.then if isinstance(put, Put)] for txn in bed.sent[1:]] == [
        [PLAN, WORDS, KEYS.last_write],
        [WORDS, KEYS.last_write],
    ]
    assert bed.values(PLAN, WORDS) == [b"1", b"b"]


def test_with_another_lease_every_record_is_written_again() -> None:
    bed = Bed()
    other = bed.cluster.grant(20, bed.owner)

    async def scene(writing: FencedWriter) -> None:
        await writing.read()
        await writing.write({PLAN: b"1", WORDS: b"a"}, bed.lease)
        await writing.write({PLAN: b"2", WORDS: b"a"}, other)

    run(bed, scene)
    assert {bed.cluster.keys[key].lease for key in (PLAN, WORDS, KEYS.last_write)} == {other}


def test_an_agent_that_is_no_longer_elected_writes_and_reads_nothing() -> None:
    bed = Bed()

    async def scene(writing: FencedWriter) -> None:
        await writing.read()
        await writing.write({PLAN: b"1"}, bed.lease)
        bed.cluster.commit(Txn(then=(Delete(Range(KEYS.leader)),)), bed.owner)
        with pytest.raises(NotElected):
            await writing.write({PLAN: b"2"}, bed.lease)
        # A later election of the same node is a different one.
        bed.elect()
        with pytest.raises(NotElected):
            await writing.write({PLAN: b"3"}, bed.lease)
        with pytest.raises(NotElected):
            await writing.read()

    run(bed, scene)
    assert bed.values(PLAN) == [b"1"]


def test_a_late_write_that_was_applied_first_is_detected_by_the_next_write() -> None:
    bed = Bed("well", "late")

    async def scene(writing: FencedWriter) -> None:
        await writing.read()
        with pytest.raises(StoreUnavailable):
            await writing.write({PLAN: b"1", WORDS: b"a"}, bed.lease)
        await writing.read()
        bed.deliver()
        with pytest.raises(StaleWriteApplied):
            await writing.write({PLAN: b"2"}, bed.lease)
        await writing.read()
        await writing.write({PLAN: b"2", WORDS: b"b"}, bed.lease)

    run(bed, scene)
    assert bed.values(PLAN, WORDS) == [b"2", b"b"]


@given(st.lists(st.sampled_from(["well", "twice", "unanswered", "late"]), max_size=12), st.data())
def test_the_last_write_prevails_whatever_happens_to_requests(fates: list[str], data: st.DataObject) -> None:
    bed = Bed("well", *fates)
    seen: list[bytes | None] = []

    async def scene(writing: FencedWriter) -> None:
        await writing.read()
        number = 0
        for _ in range(40):
            number += 1
            try:
                await writing.write({PLAN: str(number).encode()}, bed.lease)
            except (StoreUnavailable, StaleWriteApplied):
                while True:
                    try:
                        await writing.read()
                        break
                    except StoreUnavailable:
                        continue
            else:
                assert bed.values(PLAN) == [str(number).encode()]
            if data.draw(st.booleans()):
                bed.deliver()
            seen.extend(bed.values(PLAN))
        bed.deliver()

    run(bed, scene)
    assert bed.values(PLAN) == [b"40"]
    numbers = [int(value) for value in seen if value is not None]
    assert numbers == sorted(numbers)


def test_records_too_long_for_one_transaction_are_written_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_writer, "MAX_TXN_BYTES", 100)
    bed = Bed()
    values = {KEYS.plan: b"p" * 90, **{KEYS.messages(i): b"%d" % i * 30 for i in range(1, 9)}, KEYS.over: b"x" * 500}

    async def scene(writing: FencedWriter) -> None:
        await writing.read()
        await writing.write(values, bed.lease)

    run(bed, scene)
    assert bed.values(*values) == list(values.values())
    written = [
        [put.key for put in txn.then if isinstance(put, Put) and put.key != KEYS.last_write] for txn in bed.sent[1:]
    ]
    assert [key for batch in written for key in batch] == list(values)
    assert all(len(batch) == 1 or sum(len(values[key]) for key in batch) <= 100 for batch in written)
    assert len(written) > 4
