"""The operations of the etcd client with a real server: transactions, leases and watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from etcd_conversation import (
    ALL,
    next_keys,
    put,
    read,
    resumed,
    talk,
)
from support.etcd_server import Etcd, serving

from dlrover_run.rendezvous import kinds
from dlrover_run.store.etcd.store import EtcdStore
from dlrover_run.store.operations import (
    Absent,
    Change,
    Compacted,
    CreateRevisionIs,
    Delete,
    Get,
    KeyValue,
    LeaseExpired,
    ModRevisionIs,
    Put,
    Range,
    StoreMisconfigured,
    StoreUnavailable,
    Txn,
    TxnResult,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with serving(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
def etcd(server: Etcd) -> Etcd:
    """The server of all these tests, empty at the start of each test."""
    server.ctl("del", "--prefix", "/")
    return server


CONDITIONS: dict[Callable[[KeyValue], Any], bool] = {
    lambda key: Absent(Range("/k")): False,
    lambda key: Absent(Range("/k/")): True,
    lambda key: Absent(Range("/k", prefix=True)): False,
    lambda key: Absent(Range("/k/", prefix=True)): True,
    lambda key: Absent(Range("", prefix=True)): False,
    lambda key: CreateRevisionIs("/k", key.created): True,
    lambda key: CreateRevisionIs("/k", key.changed): False,
    lambda key: CreateRevisionIs("/other", key.created): False,
    lambda key: ModRevisionIs("/k", key.changed): True,
    lambda key: ModRevisionIs("/k", key.created): False,
}


def test_a_condition_selects_the_branch_of_a_transaction(etcd: Etcd) -> None:
    async def conversation(client: EtcdStore) -> None:
        for condition, holds in CONDITIONS.items():
            await client.commit(put("/k", b"1"))
            await client.commit(put("/k", b"2"))
            key = (await read(client)).found["/k"]
            assert key.created < key.changed
            outcome = await client.commit(Txn((condition(key),), (Put("/yes", b""),), (Put("/no", b""),)))
            assert outcome.succeeded is holds, condition(key)
            assert set((await read(client)).found) == {"/k", "/yes" if holds else "/no"}
            await client.commit(Txn(then=(Delete(ALL),)))

    talk(kinds.Store(etcd.places), conversation)


def test_a_transaction_succeeds_only_if_all_conditions_hold(etcd: Etcd) -> None:
    async def conversation(client: EtcdStore) -> None:
        await client.commit(put("/k"))
        outcome = await client.commit(Txn((Absent(Range("/new")), Absent(Range("/k"))), (Put("/new", b""),)))
        assert not outcome.succeeded
        assert set((await read(client)).found) == {"/k"}

    talk(kinds.Store(etcd.places), conversation)


def test_the_reads_of_nested_transactions_are_in_the_result(etcd: Etcd) -> None:
    """A branch also reads what it has written itself."""

    async def conversation(client: EtcdStore) -> TxnResult:
        await client.commit(put("/word", "ein Wörtchen".encode()))
        lead = Txn(
            (Absent(Range("/leader")),), (Put("/leader", b"me"), Get(Range("/leader"))), (Get(Range("/leader")),)
        )
        return await client.commit(
            Txn(then=(Put("/node", b"\x00\xff"), lead, Get(Range("/word")), Get(Range("/node"))))
        )

    outcome = talk(kinds.Store(etcd.places), conversation)
    revision = outcome.revision
    assert outcome.found == {
        "/word": KeyValue("/word", "ein Wörtchen".encode(), revision - 1, revision - 1, 0),
        "/leader": KeyValue("/leader", b"me", revision, revision, 0),
        "/node": KeyValue("/node", b"\x00\xff", revision, revision, 0),
    }


def test_a_deletion_removes_the_range_and_nothing_else(etcd: Etcd) -> None:
    async def conversation(client: EtcdStore) -> None:
        for key in ("/a", "/a/1", "/a/2", "/b"):
            await client.commit(put(key))
        await client.commit(Txn(then=(Delete(Range("/a/", prefix=True)),)))
        assert set((await read(client)).found) == {"/a", "/b"}
        await client.commit(Txn(then=(Delete(Range("/a")),)))
        assert set((await read(client)).found) == {"/b"}

    talk(kinds.Store(etcd.places), conversation)


def test_values_of_a_megabyte_and_thousands_of_keys_arrive_complete(etcd: Etcd) -> None:
    """Together they exceed the default message size of gRPC many times."""

    async def conversation(client: EtcdStore) -> None:
        start = (await read(client)).revision + 1
        values = {f"/big/{number}": bytes([number]) * 1_000_000 for number in range(20)}
        for key, value in values.items():
            await client.commit(put(key, value))
        for block in range(40):
            await client.commit(Txn(then=tuple(Put(f"/many/{block}/{n}", b"x") for n in range(100))))
        found = (await read(client)).found
        assert {key: found[key].value for key in values} == values
        assert len(found) == 20 + 4000
        assert len(await next_keys(resumed(client, [ALL], start), 4020)) == 4020

    talk(kinds.Store(etcd.places), conversation)


@pytest.mark.parametrize(
    ("txn", "remedy"),
    [
        (put("/k", b"x" * 2_000_000), "--max-request-bytes"),
        (Txn(then=tuple(Put(f"/{number}", b"") for number in range(200))), "--max-txn-ops"),
    ],
)
def test_a_request_that_is_too_large_for_etcd_is_reported_in_one_sentence(etcd: Etcd, txn: Txn, remedy: str) -> None:
    with pytest.raises(StoreMisconfigured, match=remedy):
        talk(kinds.Store(etcd.places), lambda client: client.commit(txn))


# --- leases


def test_a_lease_lives_while_it_is_renewed_and_its_keys_expire_with_it(etcd: Etcd) -> None:
    async def conversation(client: EtcdStore) -> None:
        lease = await client.grant(1)
        outcome = await client.commit(put("/k", b"", lease))
        changes = resumed(client, [ALL], outcome.revision + 1)
        assert await client.renew(lease)
        assert (await read(client)).found["/k"].lease == lease
        assert await anext(changes) == [Change("/k", None)]
        assert not await client.renew(lease)
        with pytest.raises(LeaseExpired):
            await client.commit(put("/k", b"", lease))
        assert not (await read(client)).found
        await client.revoke(lease)

    talk(kinds.Store(etcd.places), conversation)


def test_the_keys_of_a_revoked_lease_are_removed_at_once(etcd: Etcd) -> None:
    async def conversation(client: EtcdStore) -> None:
        lease = await client.grant(3600)
        await client.commit(put("/k", b"", lease))
        await client.revoke(lease)
        assert not (await read(client)).found
        assert not await client.renew(lease)

    talk(kinds.Store(etcd.places), conversation)


# --- watches


def test_a_watch_started_before_a_read_receives_only_later_changes(etcd: Etcd) -> None:
    async def conversation(client: EtcdStore) -> None:
        async with client.watch([Range("/a"), Range("/b")]) as watch:
            await client.commit(put("/a", b"old"))
            read_at = (await client.commit(put("/b", b"old"))).revision
            await client.commit(put("/a", b"new"))
            await client.commit(put("/b", b"new"))
            changes = watch.after(read_at)
            received = [change for _ in range(2) for change in await anext(changes)]
            values = sorted((change.key, change.now and change.now.value) for change in received)
            assert values == [("/a", b"new"), ("/b", b"new")]

    talk(kinds.Store(etcd.places), conversation)


def test_a_restart_of_the_server_between_watch_and_read_hides_no_change(etcd: Etcd) -> None:
    async def conversation(client: EtcdStore) -> None:
        async with client.watch([Range("/a")]) as watch:
            etcd.kill()
            await asyncio.to_thread(etcd.start)
            read_at = (await client.commit(put("/b"))).revision
            await client.commit(put("/a", b"new"))
            assert await next_keys(watch.after(read_at), 1) == ["/a"]

    talk(kinds.Store(etcd.places), conversation)


def test_a_watch_ahead_of_etcds_revision_raises_an_error(etcd: Etcd) -> None:
    """As after a loss of data, or where a backup was restored."""

    async def conversation(client: EtcdStore) -> None:
        revision = (await client.commit(put("/a"))).revision
        with pytest.raises(StoreUnavailable, match="its data is older than what other members have sent"):
            await anext(resumed(client, [ALL], revision + 2))
        async with client.watch([ALL]) as watch:
            with pytest.raises(StoreUnavailable, match="lost data since the watch began"):
                await anext(watch.after(revision - 1))

    talk(kinds.Store(etcd.places), conversation)


def test_a_watch_reports_all_changes_from_its_revision_in_order(etcd: Etcd) -> None:
    async def conversation(client: EtcdStore) -> None:
        await client.commit(put("/before"))
        start = (await client.commit(put("/a", b"1"))).revision
        await client.commit(put("/a", b"2"))
        await client.commit(put("/elsewhere"))
        changes = resumed(client, [Range("/a")], start)
        assert await anext(changes) == [
            Change("/a", KeyValue("/a", b"1", start, start, 0)),
            Change("/a", KeyValue("/a", b"2", start, start + 1, 0)),
        ]
        await client.commit(Txn(then=(Delete(Range("/a")),)))
        assert await anext(changes) == [Change("/a", None)]

    talk(kinds.Store(etcd.places), conversation)


def test_all_ranges_of_a_watch_share_one_stream(etcd: Etcd) -> None:
    async def conversation(client: EtcdStore) -> None:
        start = (await read(client)).revision + 1
        changes = resumed(client, [Range("/leader"), Range("/words/", prefix=True)], start)
        found = asyncio.ensure_future(next_keys(changes, 3))
        for key in ("/words/1", "/leader", "/other", "/words/2"):
            await client.commit(put(key))
        assert sorted(await found) == ["/leader", "/words/1", "/words/2"]

    before = etcd.calls()["Watch"], etcd.requests()["Watch"]
    talk(kinds.Store(etcd.places), conversation)
    assert (etcd.calls()["Watch"] - before[0], etcd.requests()["Watch"] - before[1]) == (1, 2)


def test_a_watch_from_a_compacted_revision_raises_an_error(etcd: Etcd) -> None:
    async def conversation(client: EtcdStore) -> None:
        for _ in range(3):
            revision = (await client.commit(put("/k"))).revision
        etcd.ctl("compaction", str(revision))
        with pytest.raises(Compacted):
            await anext(resumed(client, [Range("/other"), Range("/k")], 1))
        assert await next_keys(resumed(client, [Range("/k")], revision), 1) == ["/k"]

    talk(kinds.Store(etcd.places), conversation)


def test_a_caller_that_is_cancelled_while_it_waits_raises_cancelled_error(etcd: Etcd) -> None:
    """gRPC uses the same exception for a connection that was aborted."""

    async def conversation(client: EtcdStore) -> None:
        revision = (await client.commit(put("/k"))).revision
        changes = resumed(client, [ALL], revision)
        await anext(changes)
        waiting = asyncio.ensure_future(anext(changes))
        etcd.members[0].stop()
        asking = asyncio.ensure_future(client.commit(put("/k")))
        await asyncio.sleep(0)
        waiting.cancel()
        asking.cancel()
        assert [type(end) for end in await asyncio.gather(waiting, asking, return_exceptions=True)] == [
            asyncio.CancelledError,
            asyncio.CancelledError,
        ]
        etcd.members[0].resume()

    talk(kinds.Store(etcd.places), conversation)
