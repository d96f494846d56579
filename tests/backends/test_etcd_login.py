"""The etcd client with real servers that require a user."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from etcd_conversation import (
    OWN,
    hold,
    known,
    next_keys,
    put,
    read,
    resumed,
    talk,
    write_once,
)
from support.etcd_server import PASSWORD, Etcd, serving

from dlrover_run.store.etcd.store import EtcdStore
from dlrover_run.store.operations import (
    Range,
    StoreMisconfigured,
)


@pytest.fixture(scope="module")
def etcd_of_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """A server that requires a user."""
    with serving(tmp_path_factory.mktemp("etcd")) as etcd:
        etcd.demand_users()
        yield etcd


def test_a_user_can_do_what_is_permitted_without_tls(etcd_of_users: Etcd) -> None:
    talk(known(etcd_of_users), hold)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"password": "wrong"}, "no user 'trainer' with the password.*DLROVER_ETCD_PASSWORD or password_file=PATH"),
        ({"user": "stranger"}, "no user 'stranger' with the password.*user=NAME"),
        ({"password": ""}, "demands a password of the user 'trainer'.*DLROVER_ETCD_PASSWORD.*password_file=PATH"),
        ({"user": "", "password": ""}, "demands a user and none was given.*user=NAME.*DLROVER_ETCD_PASSWORD"),
    ],
)
def test_an_unknown_user_or_password_is_reported_in_one_sentence(
    etcd_of_users: Etcd, changes: dict[str, str], words: str
) -> None:
    with pytest.raises(StoreMisconfigured, match=words) as caught:
        talk(known(etcd_of_users, **changes), read)
    assert "\n" not in str(caught.value)
    assert "wrong" not in str(caught.value)
    assert repr(known(etcd_of_users)).find(PASSWORD) < 0


def test_a_request_that_is_not_permitted_is_reported_in_one_sentence(etcd_of_users: Etcd) -> None:
    words = "'trainer' may not read and write below /other/ in etcd.*grant-permission --prefix ROLE readwrite /other/"

    async def watch(client: EtcdStore) -> None:
        await anext(resumed(client, [Range("/other/", prefix=True)], 1))

    for conversation in (lambda client: client.commit(put("/other/k")), watch):
        with pytest.raises(StoreMisconfigured, match=words):
            talk(known(etcd_of_users, prefix="/other"), conversation)


def forget_tokens(etcd: Etcd) -> None:
    etcd.members[0].terminate()
    etcd.start()


REQUESTS: dict[str, Callable[[EtcdStore], Awaitable[Any]]] = {
    "all": hold,
    "read": lambda client: read(client, OWN),
    "watch": lambda client: next_keys(resumed(client, [OWN], 1), 1),
    "many": lambda client: asyncio.gather(*(read(client, OWN) for _ in range(20))),
}


def test_a_token_that_the_restarted_server_rejects_is_renewed_once(etcd: Etcd) -> None:
    etcd.demand_users()

    async def conversation(client: EtcdStore) -> None:
        await client.commit(put("/dlrover-run/k"))
        for name, request in REQUESTS.items():
            await asyncio.to_thread(forget_tokens, etcd)
            await request(client)
            # The counters of a server start at zero when it starts.
            assert etcd.calls()["Authenticate"] == 1, name

    talk(known(etcd), conversation)


def test_a_watch_continues_with_a_new_token(etcd_cluster: Etcd) -> None:
    etcd_cluster.demand_users()

    async def conversation(client: EtcdStore) -> None:
        revision = (await client.commit(put("/dlrover-run/0"))).revision
        changes = resumed(client, [OWN], revision)
        assert await next_keys(changes, 1) == ["/dlrover-run/0"]
        first, second, _ = etcd_cluster.members
        # The second member has forgotten the token by the time that the watch reconnects to it.
        await asyncio.to_thread(second.terminate)
        await asyncio.to_thread(etcd_cluster.start)
        first.kill()
        found = asyncio.ensure_future(next_keys(changes, 1))
        await write_once(client, "/dlrover-run/1")
        assert await found == ["/dlrover-run/1"]

    talk(known(etcd_cluster), conversation)


def test_a_user_is_accepted_where_etcd_does_not_require_one_yet(etcd: Etcd) -> None:
    async def conversation(client: EtcdStore) -> None:
        await hold(client)
        await asyncio.to_thread(etcd.demand_users)
        await hold(client)

    talk(known(etcd), conversation)
