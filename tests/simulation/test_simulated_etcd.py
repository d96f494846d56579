"""The simulated etcd, which the simulation of jobs uses: it behaves as real etcd does in its worst cases."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dlrover_run.store.operations import (
    Absent,
    Change,
    Compacted,
    CreateRevisionIs,
    Delete,
    Get,
    LeaseExpired,
    ModRevisionIs,
    Put,
    Range,
    StoreUnavailable,
    Txn,
)
from simulation.bed import Bed
from simulation.etcd_watch import REQUEST_TIMEOUT
from simulation.network import TO_MASTER
from simulation.timeline import Broken


def gather_changes(bed: Bed, received: list[Change], ranges: Sequence[Range]) -> asyncio.Task[Any]:
    """Receive the changes from now on."""

    async def receive(begun: asyncio.Event) -> None:
        revision = bed.cluster.revision
        async with bed.client.watch(ranges) as watch:
            begun.set()
            async for changes in watch.after(revision):
                received.extend(changes)

    async def begin() -> asyncio.Task[Any]:
        begun = asyncio.Event()
        task = asyncio.ensure_future(receive(begun))
        await begun.wait()
        return task

    task: asyncio.Task[Any] = bed.do(begin())
    return task


def test_a_transaction_does_one_branch_and_sees_its_own_writes() -> None:
    bed = Bed()
    made = bed.put("a/1", b"old")
    nested = Txn((Absent(Range("b")),), (Put("b", b"new"),), (Get(Range("c")),))
    outcome = bed.commit(Put("a/2", b"2"), nested, Get(Range("a/", prefix=True)), Get(Range("b")))
    assert outcome.succeeded
    assert {key: found.value for key, found in outcome.found.items()} == {"a/1": b"old", "a/2": b"2", "b": b"new"}
    assert {found.changed for key, found in outcome.found.items() if key != "a/1"} == {outcome.revision}
    for condition, holds in (
        (CreateRevisionIs("a/1", made), True),
        (CreateRevisionIs("a/1", made + 1), False),
        (ModRevisionIs("a/1", made), True),
        (ModRevisionIs("missing", 1), False),
        (Absent(Range("a/", prefix=True)), False),
    ):
        assert bed.commit(conditions=(condition,)).succeeded is holds


def test_a_put_under_a_lease_that_is_gone_changes_nothing() -> None:
    bed = Bed()
    with pytest.raises(LeaseExpired):
        bed.commit(Put("a", b""), Put("b", b"", lease=7))
    assert not bed.cluster.keys


@pytest.mark.parametrize(
    "operations",
    [
        (Put("a", b"1"), Put("a", b"2")),
        (Put("a", b"1"), Txn((), (Put("a", b"2"),))),
        (Put("a/1", b"1"), Delete(Range("a/", prefix=True))),
        tuple(Put(f"a{number}", b"") for number in range(129)),
    ],
)
def test_what_etcd_refuses_ends_the_run(operations: tuple[Any, ...]) -> None:
    with pytest.raises(Broken):
        Bed().commit(*operations)


def test_keys_go_with_their_lease_unless_it_is_renewed() -> None:
    bed = Bed()
    lease = bed.cluster.grant(4, bed.process)
    bed.put("a", lease=lease)
    for _ in range(5):
        bed.wait(3)
        assert bed.cluster.renew(lease)
    assert "a" in bed.cluster.keys
    bed.wait(5)
    assert not bed.cluster.keys
    assert not bed.cluster.renew(lease)


def test_another_leader_and_a_time_away_prolong_every_lease() -> None:
    bed = Bed()
    lease = bed.cluster.grant(4, bed.process)
    bed.wait(3)
    bed.cluster.change_leader()
    bed.wait(3)
    bed.cluster.away = True
    bed.wait(100)
    bed.cluster.come_back()
    bed.wait(3)
    assert lease in bed.cluster.leases


def test_a_request_comes_to_its_answer() -> None:
    bed = Bed()

    async def ask() -> tuple[bool, bool]:
        lease = await bed.client.grant(5)
        await bed.client.commit(Txn(then=(Put("a", b"1", lease),)))
        lived = await bed.client.renew(lease)
        await bed.client.revoke(lease)
        return lived, await bed.client.renew(lease)

    assert bed.do(ask()) == (True, False)


def test_a_request_may_be_carried_out_long_after_it_was_given_up() -> None:
    late = 0
    for seed in range(20):
        bed = Bed(seed)
        bed.do(bed.client.grant(5))
        bed.link.hold(TO_MASTER)
        with pytest.raises(StoreUnavailable):
            bed.do(bed.client.commit(Txn(then=(Put("a", b"1"),))))
        assert "a" not in bed.cluster.keys
        bed.wait(REQUEST_TIMEOUT)
        bed.link.heal()
        bed.wait(1)
        late += "a" in bed.cluster.keys
    assert 0 < late < 20


def test_a_request_may_be_carried_out_twice() -> None:
    bed = Bed(echo=0.9)
    for _ in range(50):
        bed.do(bed.client.commit(Txn(then=(Put("a", b"1"),))))
    bed.wait()
    assert bed.cluster.revision > 51


def test_no_answer_comes_while_etcd_is_away() -> None:
    bed = Bed()
    bed.cluster.away = True
    with pytest.raises(StoreUnavailable):
        bed.do(bed.client.grant(5))
    bed.cluster.come_back()
    assert bed.do(bed.client.grant(5)) in bed.cluster.leases


def test_a_watch_reports_each_change_in_the_order_of_its_range() -> None:
    bed = Bed(lag=3.0)
    received: list[Change] = []
    bed.put("a/1", b"before")
    gather_changes(bed, received, [Range("a/", prefix=True), Range("b")])
    for number in range(20):
        bed.commit(Put("a/1", b"%d" % number), Put("b", b"%d" % number), Put("c", b""))
        bed.wait(0.3)
    bed.commit(Delete(Range("a/1")))
    bed.wait()
    by_key = {key: [c.now and c.now.value for c in received if c.key == key] for key in ("a/1", "b", "c")}
    counted = [b"%d" % number for number in range(20)]
    assert by_key == {"a/1": [*counted, None], "b": counted, "c": []}


def test_two_ranges_of_one_watch_may_lag_behind_differently() -> None:
    bed = Bed(lag=5.0)
    received: list[Change] = []
    gather_changes(bed, received, [Range("a"), Range("b")])
    for _ in range(20):
        bed.put("a")
        bed.put("b")
    bed.wait()
    assert [change.key for change in received] != ["a", "b"] * 20


def test_a_watch_that_was_broken_off_goes_on_where_it_stopped() -> None:
    bed = Bed(lag=1.0)
    received: list[Change] = []
    gather_changes(bed, received, [Range("a")])
    for number in range(30):
        bed.put("a", b"%d" % number)
        bed.wait(0.2)
        if number % 3 == 0:
            bed.client.cut()
    bed.wait()
    assert [change.now and change.now.value for change in received] == [b"%d" % number for number in range(30)]


def test_a_watch_that_missed_what_is_not_kept_says_so() -> None:
    bed = Bed()
    task = gather_changes(bed, [], [Range("a")])
    bed.client.cut()
    for _ in range(5):
        bed.put("a")
    bed.cluster.compacted = bed.cluster.revision
    with pytest.raises(Compacted):
        bed.do(wait_for(task))


async def wait_for(task: asyncio.Task[Any]) -> None:
    await task


def test_a_watch_that_begins_before_a_reading_misses_nothing_of_what_follows() -> None:
    for seed in range(20):
        bed = Bed(seed, lag=2.0)

        async def read_and_receive(bed: Bed) -> None:
            async with bed.client.watch([Range("a")]) as watch:
                bed.put("a", b"before")
                found = await bed.client.commit(Txn(then=(Get(Range("a")),)))
                bed.put("a", b"after")
                async for changes in watch.after(found.revision):
                    assert [change.now and change.now.value for change in changes] == [b"after"]
                    return

        bed.put("a", b"long before")
        bed.do(read_and_receive(bed))


def test_a_watch_does_not_begin_while_etcd_is_away() -> None:
    bed = Bed()
    bed.cluster.away = True

    async def begin() -> None:
        async with bed.client.watch([Range("a")]):
            raise AssertionError("no server can have answered")

    with pytest.raises(StoreUnavailable):
        bed.do(begin())


def test_when_all_data_are_lost_revisions_begin_anew() -> None:
    bed = Bed()
    lease = bed.cluster.grant(5, bed.process)
    bed.put("a", lease=lease)
    bed.put("b")
    bed.cluster.lose_everything()
    assert not bed.cluster.keys
    assert not bed.cluster.renew(lease)
    assert bed.put("a") == 2


def test_a_process_is_killed_in_the_middle_of_a_transaction() -> None:
    bed = Bed()
    steps: list[str] = []
    fuse = 1

    def burn() -> None:
        nonlocal fuse
        fuse -= 1
        if fuse < 0:
            bed.process.end()

    client = bed.client_of(bed.process, bed.link, burn)

    async def write() -> None:
        await client.commit(Txn(then=(Put("a", b""),)))
        steps.append("received the first")

    bed.start(write())
    bed.wait()
    assert "a" in bed.cluster.keys
    assert not steps
    bed.process.dispose()
