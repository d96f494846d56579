"""The names of etcd's endpoints while the name server is slow, unreachable, or answers late."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from etcd_conversation import read, talk, write_ahead
from support.etcd_server import Etcd

from dlrover_run.rendezvous import kinds
from dlrover_run.store.etcd import connection
from dlrover_run.store.etcd.connection import AddressCache
from dlrover_run.store.etcd.errors import EndpointFailed
from dlrover_run.store.etcd.store import EtcdStore
from dlrover_run.store.operations import StoreUnavailable
from dlrover_run.transport import addresses
from dlrover_run.transport.addresses import Address

HERE = Address(socket.AF_INET, "127.0.0.1", 2379)
ELSEWHERE = Address(socket.AF_INET, "127.0.0.2", 2379)


class NameServer:
    """Answers each query with the current `answer`: addresses, or an error, or None: no answer before `speak` is
    called.
    """

    def __init__(self) -> None:
        self.answer: list[Address] | Exception | None = None
        self.asked = 0
        self._waiting: list[asyncio.Future[None]] = []

    async def look_up(self, host: str, port: int) -> list[Address]:
        self.asked += 1
        if self.answer is None:
            silence: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(silence)
            await silence
        assert self.answer is not None
        if isinstance(self.answer, Exception):
            raise self.answer
        return [address._replace(port=port) for address in self.answer]

    def fail(self, error: Exception) -> None:
        """End what waits, and each later query, with this error."""
        self._answer_all(error)

    def speak(self, answer: list[Address]) -> None:
        self._answer_all(answer)

    def _answer_all(self, answer: list[Address] | Exception) -> None:
        self.answer = answer
        for silence in self._waiting:
            silence.set_result(None)


@pytest.fixture
def name_server(monkeypatch: pytest.MonkeyPatch) -> NameServer:
    server = NameServer()
    monkeypatch.setattr(addresses, "resolve", server.look_up)
    monkeypatch.setattr(connection, "RESOLVE_SHARE", 0.01)
    return server


def ask(question: Callable[[AddressCache], Awaitable[None]]) -> None:
    async def whole() -> None:
        names = AddressCache()
        await question(names)
        names.close()

    asyncio.run(whole())


@pytest.mark.parametrize("answer", [None, addresses.UnresolvedHost("etcd.test has no address")], ids=["silent", "lost"])
def test_a_name_that_no_longer_resolves_keeps_its_addresses(
    name_server: NameServer, answer: addresses.UnresolvedHost | None
) -> None:
    async def question(names: AddressCache) -> None:
        name_server.answer = [HERE]
        await names.find("etcd.test", 2379, 1)
        name_server.answer = answer
        assert await names.find("etcd.test", 2379, 0.01) == [HERE]
        with pytest.raises(EndpointFailed):
            await names.find("other.test", 2379, 0.01)

    ask(question)


def test_a_name_whose_address_changed_resolves_to_the_new_one(name_server: NameServer) -> None:
    async def question(names: AddressCache) -> None:
        for answer in ([HERE], [ELSEWHERE]):
            name_server.answer = answer
            assert await names.find("etcd.test", 2379, 1) == answer

    ask(question)


def test_a_late_answer_serves_the_next_request(name_server: NameServer) -> None:
    async def question(names: AddressCache) -> None:
        for _ in range(3):
            with pytest.raises(
                EndpointFailed, match=r"no name server returned an address for etcd\.test within 0\.01 s"
            ):
                await names.find("etcd.test", 2379, 0.01)
        name_server.speak([HERE])
        assert await names.find("etcd.test", 2379, 1) == [HERE]
        assert name_server.asked == 1

    ask(question)


def test_an_internal_error_while_no_request_waits_is_raised_by_the_next_one_that_meets_it(
    name_server: NameServer,
) -> None:
    """The resolution goes on after a request has given it up, and nothing gets the error of that one."""

    async def question(names: AddressCache) -> None:
        with pytest.raises(EndpointFailed):
            await names.find("etcd.test", 2379, 0.01)
        name_server.fail(ZeroDivisionError("planted"))
        await asyncio.sleep(0.01)
        with pytest.raises(ZeroDivisionError):
            await names.find("etcd.test", 2379, 1)
        name_server.answer = [HERE]
        assert await names.find("etcd.test", 2379, 1) == [HERE]

    ask(question)


def test_a_lease_is_renewed_over_a_new_connection_while_no_name_server_answers(
    etcd: Etcd, name_server: NameServer
) -> None:
    async def conversation(client: EtcdStore) -> None:
        name_server.answer = [HERE]
        lease = await client.grant(60)
        await write_ahead(client)
        name_server.answer = None
        etcd.kill()
        with pytest.raises(StoreUnavailable, match="refused"):
            await client.renew(lease)
        await asyncio.to_thread(etcd.start)
        assert await client.renew(lease)

    talk(kinds.Store((("etcd.test", etcd.members[0].port),)), conversation)


def test_a_name_server_that_never_answers_is_reported_and_blocks_no_request(
    etcd: Etcd, name_server: NameServer
) -> None:
    async def conversation(client: EtcdStore) -> None:
        with pytest.raises(StoreUnavailable, match=r"no name server returned an address for etcd\.test"):
            await asyncio.gather(*(read(client) for _ in range(5)))
        name_server.speak([HERE])
        await read(client)
        assert name_server.asked <= 2

    talk(kinds.Store((("etcd.test", etcd.members[0].port),)), conversation)
