"""The client of etcd against real servers: its operations, members that die, users, TLS, and what is wrongly given."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from cluster import quiet_port
from etcd_server import PASSWORD, Etcd, Tls, serving
from harness import WAIT

from dlrover_run.etcd import diagnosis, messages
from dlrover_run.etcd.client import EtcdClient
from dlrover_run.etcd.operations import (
    Absent,
    Away,
    Change,
    Changed,
    Compacted,
    Created,
    Delete,
    Get,
    KeyValue,
    LeaseGone,
    Mistake,
    Outcome,
    Put,
    Range,
    Txn,
)
from dlrover_run.etcd.watching import Watch
from dlrover_run.spec import EtcdSpec, TlsSpec
from dlrover_run.wire import transport

ALL = Range("/", prefix=True)

Answer = TypeVar("Answer")


def talk(spec: EtcdSpec, conversation: Callable[[EtcdClient], Awaitable[Answer]]) -> Answer:
    """Hold a conversation with etcd, beginning at the first endpoint."""

    async def whole() -> Answer:
        client = EtcdClient(spec, chance=lambda: 0.0)
        try:
            return await asyncio.wait_for(conversation(client), WAIT)
        finally:
            await client.close()

    return asyncio.run(whole())


def put(key: str, value: bytes = b"", lease: int = 0) -> Txn:
    return Txn(then=(Put(key, value, lease),))


async def write_once(client: EtcdClient, key: str) -> None:
    """Create a key, and do no harm when that is carried out twice."""
    await client.commit(Txn((Absent(Range(key)),), (Put(key, b""),)))


async def read(client: EtcdClient, range: Range = ALL) -> Outcome:
    return await client.commit(Txn(then=(Get(range),)))


async def next_keys(changes: AsyncIterator[Sequence[Change]], count: int) -> list[str]:
    """The keys of the next changes."""
    keys: list[str] = []
    while len(keys) < count:
        keys += [change.key for change in await anext(changes)]
    return keys


async def resumed(client: EtcdClient, ranges: Sequence[Range], revision: int) -> AsyncIterator[Sequence[Change]]:
    """The changes from that revision on, as of a watch that has lost its stream when it had heard all before."""
    watch = Watch(client._connection, ranges)
    watch._next_revisions = [revision] * len(ranges)
    try:
        async for changes in watch.after(revision - 1):
            yield changes
    finally:
        watch.end()


async def hold(client: EtcdClient) -> None:
    """What a node does: write under a lease, read, watch, renew."""
    lease = await client.grant(60)
    outcome = await client.commit(Txn(then=(Put("/dlrover-run/a", b"1", lease),)))
    async with client.watch([Range("/dlrover-run/", prefix=True)]) as watch:
        await client.commit(Txn(then=(Put("/dlrover-run/b", b"1", lease),)))
        assert await next_keys(watch.after(outcome.revision), 1) == ["/dlrover-run/b"]
    assert await client.renew(lease)
    await client.revoke(lease)


# --- transactions


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (lambda key: Absent(Range("/k")), False),
        (lambda key: Absent(Range("/k/")), True),
        (lambda key: Absent(Range("/k", prefix=True)), False),
        (lambda key: Absent(Range("/k/", prefix=True)), True),
        (lambda key: Absent(Range("", prefix=True)), False),
        (lambda key: Created("/k", key.created), True),
        (lambda key: Created("/k", key.changed), False),
        (lambda key: Created("/other", key.created), False),
        (lambda key: Changed("/k", key.changed), True),
        (lambda key: Changed("/k", key.created), False),
    ],
)
def test_a_condition_decides_which_branch_is_carried_out(
    etcd: Etcd, condition: Callable[[KeyValue], Any], holds: bool
) -> None:
    async def conversation(client: EtcdClient) -> None:
        await client.commit(put("/k", b"1"))
        await client.commit(put("/k", b"2"))
        key = (await read(client)).found["/k"]
        assert key.created < key.changed
        outcome = await client.commit(Txn((condition(key),), (Put("/yes", b""),), (Put("/no", b""),)))
        assert outcome.succeeded is holds
        assert set((await read(client)).found) == {"/k", "/yes" if holds else "/no"}

    talk(EtcdSpec(etcd.places), conversation)


def test_all_conditions_have_to_hold(etcd: Etcd) -> None:
    async def conversation(client: EtcdClient) -> None:
        await client.commit(put("/k"))
        outcome = await client.commit(Txn((Absent(Range("/new")), Absent(Range("/k"))), (Put("/new", b""),)))
        assert not outcome.succeeded
        assert set((await read(client)).found) == {"/k"}

    talk(EtcdSpec(etcd.places), conversation)


def test_what_nested_transactions_read_is_found_with_the_rest(etcd: Etcd) -> None:
    """And a branch sees what it has written itself."""

    async def conversation(client: EtcdClient) -> Outcome:
        await client.commit(put("/word", "ein Wörtchen".encode()))
        lead = Txn(
            (Absent(Range("/leader")),), (Put("/leader", b"me"), Get(Range("/leader"))), (Get(Range("/leader")),)
        )
        return await client.commit(
            Txn(then=(Put("/node", b"\x00\xff"), lead, Get(Range("/word")), Get(Range("/node"))))
        )

    outcome = talk(EtcdSpec(etcd.places), conversation)
    revision = outcome.revision
    assert outcome.found == {
        "/word": KeyValue("/word", "ein Wörtchen".encode(), revision - 1, revision - 1, 0),
        "/leader": KeyValue("/leader", b"me", revision, revision, 0),
        "/node": KeyValue("/node", b"\x00\xff", revision, revision, 0),
    }


def test_a_deletion_takes_the_range_and_no_more(etcd: Etcd) -> None:
    async def conversation(client: EtcdClient) -> None:
        for key in ("/a", "/a/1", "/a/2", "/b"):
            await client.commit(put(key))
        await client.commit(Txn(then=(Delete(Range("/a/", prefix=True)),)))
        assert set((await read(client)).found) == {"/a", "/b"}
        await client.commit(Txn(then=(Delete(Range("/a")),)))
        assert set((await read(client)).found) == {"/b"}

    talk(EtcdSpec(etcd.places), conversation)


def test_values_of_a_megabyte_and_thousands_of_keys_come_whole(etcd: Etcd) -> None:
    """Together they are many times what gRPC takes by itself."""

    async def conversation(client: EtcdClient) -> None:
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

    talk(EtcdSpec(etcd.places), conversation)


@pytest.mark.parametrize(
    ("txn", "remedy"),
    [
        (put("/k", b"x" * 2_000_000), "--max-request-bytes"),
        (Txn(then=tuple(Put(f"/{number}", b"") for number in range(200))), "--max-txn-ops"),
    ],
)
def test_what_is_too_much_for_etcd_is_refused_in_one_sentence(etcd: Etcd, txn: Txn, remedy: str) -> None:
    with pytest.raises(Mistake, match=remedy):
        talk(EtcdSpec(etcd.places), lambda client: client.commit(txn))


# --- leases


def test_a_lease_lives_while_it_is_renewed_and_takes_its_keys_along(etcd: Etcd) -> None:
    async def conversation(client: EtcdClient) -> None:
        lease = await client.grant(1)
        outcome = await client.commit(put("/k", b"", lease))
        changes = resumed(client, [ALL], outcome.revision + 1)
        assert await client.renew(lease)
        assert (await read(client)).found["/k"].lease == lease
        assert await anext(changes) == [Change("/k", None)]
        assert not await client.renew(lease)
        with pytest.raises(LeaseGone):
            await client.commit(put("/k", b"", lease))
        assert not (await read(client)).found
        await client.revoke(lease)

    talk(EtcdSpec(etcd.places), conversation)


def test_a_revoked_lease_takes_its_keys_along_at_once(etcd: Etcd) -> None:
    async def conversation(client: EtcdClient) -> None:
        lease = await client.grant(3600)
        await client.commit(put("/k", b"", lease))
        await client.revoke(lease)
        assert not (await read(client)).found
        assert not await client.renew(lease)

    talk(EtcdSpec(etcd.places), conversation)


# --- watches


def test_whoever_watches_before_he_reads_hears_what_changes_after_that_and_nothing_before(etcd: Etcd) -> None:
    async def conversation(client: EtcdClient) -> None:
        async with client.watch([Range("/a"), Range("/b")]) as watch:
            await client.commit(put("/a", b"old"))
            read_at = (await client.commit(put("/b", b"old"))).revision
            await client.commit(put("/a", b"new"))
            await client.commit(put("/b", b"new"))
            changes = watch.after(read_at)
            heard = [change for _ in range(2) for change in await anext(changes)]
            values = sorted((change.key, change.now and change.now.value) for change in heard)
            assert values == [("/a", b"new"), ("/b", b"new")]

    talk(EtcdSpec(etcd.places), conversation)


def test_a_member_that_dies_between_watching_and_reading_hides_nothing(etcd: Etcd) -> None:
    async def conversation(client: EtcdClient) -> None:
        async with client.watch([Range("/a")]) as watch:
            etcd.kill()
            await asyncio.to_thread(etcd.start)
            read_at = (await client.commit(put("/b"))).revision
            await client.commit(put("/a", b"new"))
            assert await next_keys(watch.after(read_at), 1) == ["/a"]

    talk(EtcdSpec(etcd.places), conversation)


def test_a_watch_that_knows_more_than_etcd_does_is_not_deaf_but_says_so(etcd: Etcd) -> None:
    """As after a loss of data, or where a backup was restored."""

    async def conversation(client: EtcdClient) -> None:
        revision = (await client.commit(put("/a"))).revision
        with pytest.raises(Away, match="does not know yet what others have told"):
            await anext(resumed(client, [ALL], revision + 2))
        async with client.watch([ALL]) as watch:
            with pytest.raises(Away, match="lost data since the watch began"):
                await anext(watch.after(revision - 1))

    talk(EtcdSpec(etcd.places), conversation)


def test_a_watch_tells_all_from_its_revision_on_in_order(etcd: Etcd) -> None:
    async def conversation(client: EtcdClient) -> None:
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

    talk(EtcdSpec(etcd.places), conversation)


def test_all_ranges_of_a_watch_share_one_stream(etcd: Etcd) -> None:
    async def conversation(client: EtcdClient) -> None:
        changes = resumed(client, [Range("/leader"), Range("/words/", prefix=True)], 1)
        told = asyncio.ensure_future(next_keys(changes, 3))
        for key in ("/words/1", "/leader", "/other", "/words/2"):
            await client.commit(put(key))
        assert sorted(await told) == ["/leader", "/words/1", "/words/2"]

    talk(EtcdSpec(etcd.places), conversation)
    assert (etcd.calls()["Watch"], etcd.requests()["Watch"]) == (1, 2)


def test_a_watch_from_a_revision_that_is_not_kept_says_so(etcd: Etcd) -> None:
    async def conversation(client: EtcdClient) -> None:
        for _ in range(3):
            revision = (await client.commit(put("/k"))).revision
        etcd.ctl("compaction", str(revision))
        with pytest.raises(Compacted):
            await anext(resumed(client, [Range("/other"), Range("/k")], 1))
        assert await next_keys(resumed(client, [Range("/k")], revision), 1) == ["/k"]

    talk(EtcdSpec(etcd.places), conversation)


def test_whoever_is_cancelled_while_he_waits_is_told_so(etcd: Etcd) -> None:
    """gRPC uses the same exception for a connection that was broken off."""

    async def conversation(client: EtcdClient) -> None:
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

    talk(EtcdSpec(etcd.places), conversation)


# --- members that die


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_all_goes_on_when_a_member_dies_and_nothing_is_told_twice(etcd_cluster: Etcd, victim: int) -> None:
    async def conversation(client: EtcdClient) -> None:
        lease = await client.grant(30)
        start = (await client.commit(put("/mine", b"", lease))).revision
        changes = resumed(client, [Range("/n/", prefix=True), Range("/mine")], start)
        assert await next_keys(changes, 1) == ["/mine"]
        # Each one in turn is the one that is talked with.
        for member in etcd_cluster.members[: victim + 1]:
            await write_once(client, f"/n/{member.name}/before")
            member.kill()
            await write_once(client, f"/n/{member.name}/after")
            assert await client.renew(lease)
            expected = [f"/n/{member.name}/before", f"/n/{member.name}/after"]
            assert await next_keys(changes, 2) == expected
            await asyncio.to_thread(etcd_cluster.start)
        assert (await read(client)).found["/mine"].lease == lease

    talk(EtcdSpec(etcd_cluster.places), conversation)


def test_a_member_that_hangs_is_left_for_another_one(etcd_cluster: Etcd) -> None:
    async def conversation(client: EtcdClient) -> None:
        lease = await client.grant(30)
        await write_once(client, "/n/0")
        changes = resumed(client, [ALL], 1)
        assert await next_keys(changes, 1) == ["/n/0"]
        etcd_cluster.members[0].stop()
        assert await client.renew(lease)
        await write_once(client, "/n/1")
        assert await next_keys(changes, 1) == ["/n/1"]
        etcd_cluster.members[0].resume()

    talk(EtcdSpec(etcd_cluster.places), conversation)


def test_a_watch_that_slept_through_a_compaction_says_so(etcd_cluster: Etcd) -> None:
    first = etcd_cluster.members[0]

    async def conversation(client: EtcdClient) -> None:
        await write_once(client, "/n/0")
        changes = resumed(client, [Range("/n/", prefix=True)], 1)
        assert await next_keys(changes, 1) == ["/n/0"]
        first.stop()
        # Whoever needs the leader has waited for a new one when this is answered.
        other = EtcdClient(EtcdSpec(etcd_cluster.places[1:]))
        for _ in range(3):
            revision = (await other.commit(put("/n/1"))).revision
        await other.close()
        etcd_cluster.ctl("compaction", str(revision))
        first.kill()
        with pytest.raises(Compacted):
            await anext(changes)

    talk(EtcdSpec(etcd_cluster.places), conversation)


def test_calls_that_fail_together_go_on_to_the_same_member(etcd_cluster: Etcd) -> None:
    first, second, third = etcd_cluster.members

    async def conversation(client: EtcdClient) -> None:
        await read(client)
        first.kill()
        # The others choose a leader before they answer this, so that none of the calls below is in vain.
        await read(EtcdClient(EtcdSpec(etcd_cluster.places[1:2])))
        before = third.counted("grpc_server_started_total")["Txn"]
        await asyncio.gather(*(read(client) for _ in range(10)))
        assert third.counted("grpc_server_started_total")["Txn"] == before
        assert second.counted("grpc_server_started_total")["Txn"] >= 10

    talk(EtcdSpec(etcd_cluster.places), conversation)


def test_clients_begin_at_different_members(etcd_cluster: Etcd) -> None:
    async def conversation() -> None:
        for chances in ([0.5, 0.1, 0.9], [0.1, 0.5, 0.9], [0.9, 0.5, 0.1]):
            client = EtcdClient(EtcdSpec(etcd_cluster.places), chance=iter(chances).__next__)
            await read(client)
            await client.close()

    asyncio.run(conversation())
    assert [member.counted("grpc_server_started_total")["Txn"] for member in etcd_cluster.members] == [1, 1, 1]


def test_where_nobody_listens_etcd_is_away_and_each_endpoint_is_named(etcd: Etcd) -> None:
    ports = [quiet_port(), quiet_port()]
    etcd.kill()
    for places in ([*etcd.places], [("127.0.0.1", port) for port in ports]):
        with pytest.raises(Away, match="the connection was refused, so nobody listens there"):
            talk(EtcdSpec(tuple(places)), read)
    with pytest.raises(Away, match=r"127.0.0.1:\d+: the connection was refused.*; no-such-host.invalid:2379: no-such-"):
        talk(EtcdSpec((*etcd.places, ("no-such-host.invalid", 2379))), read)


def test_a_server_that_comes_back_on_its_data_is_found_again(etcd: Etcd) -> None:
    async def conversation(client: EtcdClient) -> None:
        lease = await client.grant(60)
        revision = (await client.commit(put("/k", b"1", lease))).revision
        changes = resumed(client, [ALL], revision)
        await next_keys(changes, 1)
        waiting = asyncio.ensure_future(anext(changes))
        etcd.kill()
        with pytest.raises(Away, match="refused"):
            await waiting
        with pytest.raises(Away, match="refused"):
            await client.renew(lease)
        await asyncio.to_thread(etcd.start)
        assert await client.renew(lease)
        assert (await read(client)).found["/k"].value == b"1"

    talk(EtcdSpec(etcd.places), conversation)


def test_members_without_a_leader_are_away(etcd_cluster: Etcd) -> None:
    etcd_cluster.members[1].kill()
    etcd_cluster.members[2].kill()

    async def conversation(client: EtcdClient) -> None:
        with pytest.raises(Away):
            await client.commit(put("/k"))
        with pytest.raises(Away):
            await anext(resumed(client, [ALL], 1))

    talk(EtcdSpec(etcd_cluster.places[:1]), conversation)


def test_a_name_is_looked_up_as_the_system_does_it(etcd: Etcd) -> None:
    talk(EtcdSpec((("localhost", etcd.members[0].port),)), hold)


def test_whoever_has_let_go_of_etcd_asks_in_vain(etcd: Etcd) -> None:
    async def conversation(client: EtcdClient) -> None:
        await read(client)
        await client.close()
        with pytest.raises(Away, match="has let go"):
            await read(client)

    talk(EtcdSpec(etcd.places), conversation)


# --- users


def known(etcd: Etcd, **changes: Any) -> EtcdSpec:
    return EtcdSpec(etcd.places, **{"user": "trainer", "password": PASSWORD, **changes})


def test_a_user_may_do_what_is_permitted_without_tls(etcd: Etcd) -> None:
    etcd.demand_users()
    talk(known(etcd), hold)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"password": "wrong"}, "no user 'trainer' with the password.*DLROVER_ETCD_PASSWORD or password_file=PATH"),
        ({"user": "stranger"}, "no user 'stranger' with the password.*user=NAME"),
        ({"password": ""}, "demands a password of the user 'trainer'.*DLROVER_ETCD_PASSWORD.*password_file=PATH"),
        ({"user": "", "password": ""}, "demands a user and none was given.*user=NAME.*DLROVER_ETCD_PASSWORD"),
    ],
)
def test_who_is_not_known_gets_one_sentence(etcd: Etcd, changes: dict[str, str], words: str) -> None:
    etcd.demand_users()
    with pytest.raises(Mistake, match=words) as caught:
        talk(known(etcd, **changes), read)
    assert "\n" not in str(caught.value)
    assert "wrong" not in str(caught.value)
    assert repr(known(etcd)).find(PASSWORD) < 0


def test_what_is_not_permitted_is_one_sentence(etcd: Etcd) -> None:
    etcd.demand_users()
    words = "'trainer' may not read and write below /other/ in etcd.*grant-permission --prefix ROLE readwrite /other/"

    async def watch(client: EtcdClient) -> None:
        await anext(resumed(client, [Range("/other/", prefix=True)], 1))

    for conversation in (lambda client: client.commit(put("/other/k")), watch):
        with pytest.raises(Mistake, match=words):
            talk(known(etcd, prefix="/other"), conversation)


OWN = Range("/dlrover-run/", prefix=True)


def forget_tokens(etcd: Etcd) -> None:
    etcd.members[0].terminate()
    etcd.start()


@pytest.mark.parametrize(
    "ask",
    [
        hold,
        lambda client: read(client, OWN),
        lambda client: next_keys(resumed(client, [OWN], 1), 1),
        lambda client: asyncio.gather(*(read(client, OWN) for _ in range(20))),
    ],
    ids=["all", "read", "watch", "many"],
)
def test_a_token_that_died_with_the_server_is_made_anew_once(
    etcd: Etcd, ask: Callable[[EtcdClient], Awaitable[Any]]
) -> None:
    etcd.demand_users()

    async def conversation(client: EtcdClient) -> None:
        await client.commit(put("/dlrover-run/k"))
        await asyncio.to_thread(forget_tokens, etcd)
        await ask(client)

    talk(known(etcd), conversation)
    assert etcd.calls()["Authenticate"] == 1


def test_a_watch_goes_on_with_a_new_token(etcd_cluster: Etcd) -> None:
    etcd_cluster.demand_users()

    async def conversation(client: EtcdClient) -> None:
        revision = (await client.commit(put("/dlrover-run/0"))).revision
        changes = resumed(client, [OWN], revision)
        assert await next_keys(changes, 1) == ["/dlrover-run/0"]
        first, second, _ = etcd_cluster.members
        # The second one has forgotten the token by the time that the watch comes there.
        await asyncio.to_thread(second.terminate)
        await asyncio.to_thread(etcd_cluster.start)
        first.kill()
        told = asyncio.ensure_future(next_keys(changes, 1))
        await write_once(client, "/dlrover-run/1")
        assert await told == ["/dlrover-run/1"]

    talk(known(etcd_cluster), conversation)


def test_users_survive_the_death_of_a_member(etcd_cluster: Etcd) -> None:
    etcd_cluster.demand_users()

    async def conversation(client: EtcdClient) -> None:
        changes = resumed(client, [Range("/dlrover-run/", prefix=True)], 1)
        for member in etcd_cluster.members:
            await write_once(client, f"/dlrover-run/{member.name}")
            assert await next_keys(changes, 1) == [f"/dlrover-run/{member.name}"]
            member.kill()
            await asyncio.to_thread(etcd_cluster.start)

    talk(known(etcd_cluster), conversation)


def test_a_user_that_etcd_does_not_ask_for_yet_does_no_harm(etcd: Etcd) -> None:
    async def conversation(client: EtcdClient) -> None:
        await hold(client)
        await asyncio.to_thread(etcd.demand_users)
        await hold(client)

    talk(known(etcd), conversation)


# --- TLS


@pytest.fixture
def etcd_tls(tmp_path: Path, etcd_certificates: Path) -> Iterator[Etcd]:
    """A server that demands certificates of its clients."""
    with serving(tmp_path / "etcd-tls", tls=Tls(etcd_certificates)) as server:
        yield server


def files(folder: Path, ca: str | None = "ca", name: str | None = "client", key: str | None = None) -> TlsSpec:
    cert = None if name is None else str(folder / f"{name}.pem")
    return TlsSpec(
        None if ca is None else str(folder / f"{ca}.pem"),
        cert,
        None if name is None else str(folder / f"{key or name}.key"),
    )


def test_a_certificate_of_the_right_authority_lets_a_node_in(etcd_tls: Etcd, etcd_certificates: Path) -> None:
    etcd_tls.demand_users()
    talk(known(etcd_tls, tls=files(etcd_certificates)), hold)


def test_a_server_may_demand_no_certificates(tmp_path: Path, etcd_certificates: Path) -> None:
    with serving(tmp_path / "e", tls=Tls(etcd_certificates, authority=None)) as server:
        talk(EtcdSpec(server.places, tls=files(etcd_certificates, name=None)), hold)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": None}, "demands a certificate of this node.*cert=PATH,key=PATH"),
        ({"name": "stranger"}, "does not take the certificate of this node, .*stranger.pem"),
        ({"ca": "other-ca"}, "is not signed by cacert, .*other-ca.pem"),
        ({"ca": None}, "This system does not trust who signed the certificate.*cacert=PATH"),
        ({"key": "server"}, "client.pem, and key, .*server.key, do not belong together"),
        ({"ca": "nowhere"}, r"cacert, .*nowhere.pem, cannot be used \(No such file or directory\)"),
        ({"ca": "empty"}, "cacert, .*empty.pem, cannot be used"),
        ({"name": "nowhere"}, r"nowhere.pem, or key, .*, cannot be used \(No such file or directory\)"),
        ({"name": "empty"}, "empty.pem, or key, .*empty.key, cannot be used"),
        ({"name": "client", "key": "locked"}, "a key without a password"),
    ],
)
def test_each_wrong_file_of_tls_is_one_sentence(
    etcd_tls: Etcd, etcd_certificates: Path, given: dict[str, str | None], words: str
) -> None:
    with pytest.raises(Mistake, match=words) as caught:
        talk(EtcdSpec(etcd_tls.places, tls=files(etcd_certificates, **given)), read)
    assert "\n" not in str(caught.value)


def test_a_certificate_for_another_name_is_one_sentence(tmp_path: Path, etcd_certificates: Path) -> None:
    with (
        serving(tmp_path / "e", tls=Tls(etcd_certificates, "elsewhere", None)) as server,
        pytest.raises(Mistake, match=r"is for another name than 127\.0\.0\.1.*--rdzv-endpoint"),
    ):
        talk(EtcdSpec(server.places, tls=files(etcd_certificates)), read)


@pytest.mark.parametrize("authority", ["ca", None])
def test_plain_words_to_a_server_with_tls_are_one_sentence(
    tmp_path: Path, etcd_certificates: Path, authority: str | None
) -> None:
    with (
        serving(tmp_path / "e", tls=Tls(etcd_certificates, authority=authority)) as server,
        pytest.raises(Mistake, match=r"speaks TLS: add protocol=https.*cacert=PATH"),
    ):
        talk(EtcdSpec(server.places), read)


def test_tls_to_a_server_without_it_is_one_sentence(etcd: Etcd, etcd_certificates: Path) -> None:
    with pytest.raises(Mistake, match="does not speak TLS: leave protocol=https"):
        talk(EtcdSpec(etcd.places, tls=files(etcd_certificates)), read)


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_wrong_with_one_endpoint_is_no_matter_while_another_one_works(
    etcd: Etcd, etcd_tls: Etcd, order: int
) -> None:
    talk(EtcdSpec((*etcd.places, *etcd_tls.places)[::order]), hold)


# --- other programs


@contextlib.asynccontextmanager
async def gateway(watch: Callable[[Any, Any], AsyncIterator[Any]] | None = None) -> AsyncIterator[EtcdSpec]:
    """A server of gRPC that offers this handler for watches, if any, and nothing else."""
    grpc = transport.load_grpc()
    method = messages.load().method("Watch.Watch")
    decode, encode = method.request.FromString, method.response.SerializeToString
    handlers = {} if watch is None else {"Watch": grpc.stream_stream_rpc_method_handler(watch, decode, encode)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("etcdserverpb.Watch", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield EtcdSpec((("127.0.0.1", port),))
    finally:
        await server.stop(None)


def test_a_stream_that_ends_whenever_it_is_opened_is_not_opened_for_ever() -> None:
    opened = 0

    async def end_at_once(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        nonlocal opened
        opened += 1
        await anext(requests)
        yield messages.load().message("WatchResponse")(created=True)

    async def conversation() -> None:
        async with gateway(end_at_once) as spec:
            client = EtcdClient(spec)
            with pytest.raises(Away, match="it ended the connection"):
                await anext(resumed(client, [ALL], 1))
            await client.close()

    asyncio.run(conversation())
    assert opened == 2


def test_a_server_of_grpc_that_is_no_etcd_is_away() -> None:
    async def conversation() -> None:
        async with gateway() as spec:
            client = EtcdClient(spec)
            with pytest.raises(Away, match="another program listens there, which is no etcd v3"):
                await read(client)
            await client.close()

    asyncio.run(conversation())


@contextlib.contextmanager
def other_program(says: bytes | None) -> Iterator[tuple[str, int]]:
    """A server that says something to everybody who has spoken, or None: nothing, for ever."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while says is not None:
                with server.accept()[0] as connection:
                    connection.recv(4096)
                    connection.sendall(says)

    serving_thread = threading.Thread(target=serve, daemon=True)
    serving_thread.start()
    yield "127.0.0.1", server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    serving_thread.join(WAIT)
    server.close()


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"SSH-2.0-Other\r\n", b""])
def test_another_program_is_no_etcd(etcd_certificates: Path, says: bytes, tls: bool) -> None:
    with other_program(says) as place, pytest.raises(Away, match="another program listens there, which is no etcd"):
        talk(EtcdSpec((place,), tls=files(etcd_certificates) if tls else None), read)


def test_a_program_that_says_nothing_is_no_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "PROBE_TIMEOUT", 0.2)
    with other_program(None) as place:
        found = asyncio.run(diagnosis.examine(EtcdSpec((place,))))
    assert found == {
        f"127.0.0.1:{place[1]}": "whoever listens there says nothing: another program, or a member that is stopped"
    }
