"""Helpers for tests of the etcd client: run a coroutine with a client, and the requests that it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from support.etcd_server import PASSWORD, Etcd
from support.harness import WAIT

from dlrover_run.rendezvous import kinds
from dlrover_run.store.etcd.store import EtcdStore, EtcdWatch
from dlrover_run.store.operations import Absent, Change, Get, Put, Range, Txn, TxnResult

ALL = Range("/", prefix=True)

OWN = Range("/dlrover-run/", prefix=True)
"""The keys that the user of `Etcd.demand_users` may read and write."""

RENEW_TIMEOUT = 3.0
"""Seconds, as for the default lease of a node."""

Answer = TypeVar("Answer")


def talk(spec: kinds.Store, conversation: Callable[[EtcdStore], Awaitable[Answer]]) -> Answer:
    """Run `conversation` with a client that tries the first endpoint first."""

    async def whole() -> Answer:
        client = EtcdStore(spec, RENEW_TIMEOUT, rng=lambda: 0.0)
        try:
            return await asyncio.wait_for(conversation(client), WAIT)
        finally:
            await client.close()

    return asyncio.run(whole())


def put(key: str, value: bytes = b"", lease: int = 0) -> Txn:
    return Txn(then=(Put(key, value, lease),))


async def write_once(client: EtcdStore, key: str) -> None:
    """Create a key if it does not exist. Idempotent."""
    await client.commit(Txn((Absent(Range(key)),), (Put(key, b""),)))


async def read(client: EtcdStore, range: Range = ALL) -> TxnResult:
    return await client.commit(Txn(then=(Get(range),)))


async def write_ahead(client: EtcdStore) -> None:
    """Make sure that every acknowledged write is in etcd's log: a member completes a write before it starts the next
    one.

    A single-member etcd before 3.5.5 may acknowledge a write before it is in the log (etcd issue 14370).
    """
    await client.commit(put("/later"))


async def next_keys(changes: AsyncIterator[Sequence[Change]], count: int) -> list[str]:
    """Return the keys of the next changes."""
    keys: list[str] = []
    while len(keys) < count:
        keys += [change.key for change in await anext(changes)]
    return keys


async def resumed(client: EtcdStore, ranges: Sequence[Range], revision: int) -> AsyncIterator[Sequence[Change]]:
    """Yield the changes from that revision on, as a watch that lost its stream resumes after the last revision it
    received.
    """
    watch = EtcdWatch(client._connection, ranges)
    watch._next_revisions = [revision] * len(ranges)
    try:
        async for changes in watch.after(revision - 1):
            yield changes
    finally:
        watch.end()


async def hold(client: EtcdStore) -> None:
    """The requests of a node: write under a lease, read, watch, renew."""
    lease = await client.grant(60)
    outcome = await client.commit(Txn(then=(Put("/dlrover-run/a", b"1", lease),)))
    async with client.watch([Range("/dlrover-run/", prefix=True)]) as watch:
        await client.commit(Txn(then=(Put("/dlrover-run/b", b"1", lease),)))
        assert await next_keys(watch.after(outcome.revision), 1) == ["/dlrover-run/b"]
    assert await client.renew(lease)
    await client.revoke(lease)


def known(etcd: Etcd, **changes: Any) -> kinds.Store:
    """The endpoints with the user that `Etcd.demand_users` creates."""
    return kinds.Store(etcd.places, **{"user": "trainer", "password": PASSWORD, **changes})


def files(folder: Path, ca: str | None = "ca", name: str | None = "client", key: str | None = None) -> kinds.TlsSpec:
    """The TLS options for the files in a folder, by their names without an extension."""
    cert = None if name is None else str(folder / f"{name}.pem")
    return kinds.TlsSpec(
        None if ca is None else str(folder / f"{ca}.pem"),
        cert,
        None if name is None else str(folder / f"{key or name}.key"),
    )
