"""The etcd client with real members that are killed, hang and are restarted, and with names that do not resolve."""

from __future__ import annotations

import asyncio

import pytest
from etcd_conversation import (
    ALL,
    RENEW_TIMEOUT,
    hold,
    next_keys,
    put,
    read,
    resumed,
    talk,
    write_ahead,
    write_once,
)
from support.cluster import quiet_port
from support.etcd_server import Etcd

from dlrover_run.rendezvous import kinds
from dlrover_run.store.etcd.store import EtcdStore
from dlrover_run.store.operations import (
    Compacted,
    Range,
    StoreUnavailable,
)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_client_continues_when_a_member_dies_and_no_change_is_reported_twice(
    etcd_cluster: Etcd, victim: int
) -> None:
    async def conversation(client: EtcdStore) -> None:
        lease = await client.grant(30)
        start = (await client.commit(put("/mine", b"", lease))).revision
        changes = resumed(client, [Range("/n/", prefix=True), Range("/mine")], start)
        assert await next_keys(changes, 1) == ["/mine"]
        # Each member in turn is the one that the client is connected to.
        for member in etcd_cluster.members[: victim + 1]:
            await write_once(client, f"/n/{member.name}/before")
            member.kill()
            await write_once(client, f"/n/{member.name}/after")
            assert await client.renew(lease)
            expected = [f"/n/{member.name}/before", f"/n/{member.name}/after"]
            assert await next_keys(changes, 2) == expected
            await asyncio.to_thread(etcd_cluster.start)
        assert (await read(client)).found["/mine"].lease == lease

    talk(kinds.Store(etcd_cluster.places), conversation)


def test_the_client_leaves_a_member_that_hangs(etcd_cluster: Etcd) -> None:
    async def conversation(client: EtcdStore) -> None:
        lease = await client.grant(30)
        await write_once(client, "/n/0")
        changes = resumed(client, [ALL], 1)
        assert await next_keys(changes, 1) == ["/n/0"]
        etcd_cluster.members[0].stop()
        assert await client.renew(lease)
        await write_once(client, "/n/1")
        assert await next_keys(changes, 1) == ["/n/1"]
        etcd_cluster.members[0].resume()

    talk(kinds.Store(etcd_cluster.places), conversation)


def test_a_watch_that_missed_changes_before_a_compaction_raises_an_error(etcd_cluster: Etcd) -> None:
    first = etcd_cluster.members[0]

    async def conversation(client: EtcdStore) -> None:
        await write_once(client, "/n/0")
        changes = resumed(client, [Range("/n/", prefix=True)], 1)
        assert await next_keys(changes, 1) == ["/n/0"]
        first.stop()
        # This request is answered after the members have elected a new leader, so later requests find one.
        other = EtcdStore(kinds.Store(etcd_cluster.places[1:]), RENEW_TIMEOUT)
        for _ in range(3):
            revision = (await other.commit(put("/n/1"))).revision
        await other.close()
        etcd_cluster.ctl("compaction", str(revision))
        first.kill()
        with pytest.raises(Compacted):
            await anext(changes)

    talk(kinds.Store(etcd_cluster.places), conversation)


def test_requests_that_fail_together_move_to_the_same_member(etcd_cluster: Etcd) -> None:
    first, second, third = etcd_cluster.members

    async def conversation(client: EtcdStore) -> None:
        await read(client)
        first.kill()
        # The remaining members elect a leader before they answer this, so that none of the requests below fails.
        await read(EtcdStore(kinds.Store(etcd_cluster.places[1:2]), RENEW_TIMEOUT))
        before = third.counted("grpc_server_started_total")["Txn"]
        await asyncio.gather(*(read(client) for _ in range(10)))
        assert third.counted("grpc_server_started_total")["Txn"] == before
        assert second.counted("grpc_server_started_total")["Txn"] >= 10

    talk(kinds.Store(etcd_cluster.places), conversation)


def test_clients_start_at_different_members(etcd_cluster: Etcd) -> None:
    async def conversation() -> None:
        for chances in ([0.5, 0.1, 0.9], [0.1, 0.5, 0.9], [0.9, 0.5, 0.1]):
            client = EtcdStore(kinds.Store(etcd_cluster.places), RENEW_TIMEOUT, rng=iter(chances).__next__)
            await read(client)
            await client.close()

    asyncio.run(conversation())
    assert [member.counted("grpc_server_started_total")["Txn"] for member in etcd_cluster.members] == [1, 1, 1]


def test_without_a_listener_etcd_is_unavailable_and_each_endpoint_is_named(etcd: Etcd) -> None:
    ports = [quiet_port(), quiet_port()]
    etcd.kill()
    for places in ([*etcd.places], [("127.0.0.1", port) for port in ports]):
        with pytest.raises(StoreUnavailable, match="the connection was refused, so nothing listens there"):
            talk(kinds.Store(tuple(places)), read)
    with pytest.raises(
        StoreUnavailable, match=r"127.0.0.1:\d+: the connection was refused.*; no-such-host.invalid:2379: no-such-"
    ):
        talk(kinds.Store((*etcd.places, ("no-such-host.invalid", 2379))), read)


def test_a_server_that_is_restarted_with_its_data_is_used_again(etcd: Etcd) -> None:
    async def conversation(client: EtcdStore) -> None:
        lease = await client.grant(60)
        revision = (await client.commit(put("/k", b"1", lease))).revision
        changes = resumed(client, [ALL], revision)
        await next_keys(changes, 1)
        await write_ahead(client)
        await next_keys(changes, 1)
        waiting = asyncio.ensure_future(anext(changes))
        etcd.kill()
        with pytest.raises(StoreUnavailable, match="refused"):
            await waiting
        with pytest.raises(StoreUnavailable, match="refused"):
            await client.renew(lease)
        await asyncio.to_thread(etcd.start)
        assert await client.renew(lease)
        assert (await read(client)).found["/k"].value == b"1"

    talk(kinds.Store(etcd.places), conversation)


def test_members_without_a_leader_are_unavailable(etcd_cluster: Etcd) -> None:
    etcd_cluster.members[1].kill()
    etcd_cluster.members[2].kill()

    async def conversation(client: EtcdStore) -> None:
        with pytest.raises(StoreUnavailable):
            await client.commit(put("/k"))
        with pytest.raises(StoreUnavailable):
            await anext(resumed(client, [ALL], 1))

    talk(kinds.Store(etcd_cluster.places[:1]), conversation)


def test_a_name_is_resolved_as_the_system_resolves_it(etcd: Etcd) -> None:
    talk(kinds.Store((("localhost", etcd.members[0].port),)), hold)


def test_a_request_after_close_fails(etcd: Etcd) -> None:
    async def conversation(client: EtcdStore) -> None:
        await read(client)
        await client.close()
        with pytest.raises(StoreUnavailable, match="has closed the connection"):
            await read(client)

    talk(kinds.Store(etcd.places), conversation)
