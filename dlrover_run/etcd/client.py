"""A store for the records of a job in a cluster of etcd v3."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from dlrover_run.etcd import line, translation
from dlrover_run.etcd.answers import Broken
from dlrover_run.etcd.connection import CALL_TIMEOUT, Connection
from dlrover_run.etcd.line import Metadata
from dlrover_run.etcd.operations import LeaseGone, Outcome, Range, Store, Txn
from dlrover_run.etcd.watching import Watch
from dlrover_run.spec import EtcdSpec
from dlrover_run.wire import clauses


class EtcdClient(Store):
    """`operations.Store` with etcd. A member has `renew_timeout` seconds to renew a lease before the next is asked, or
    the time of any other call where that is less; `chance` returns a random number from 0 to 1.

    Raises PackageMissing where the packages that it needs are not installed.
    """

    def __init__(self, spec: EtcdSpec, renew_timeout: float, chance: Callable[[], float] = random.random) -> None:
        self._connection = Connection(spec, chance)
        self._api = self._connection.api
        self._renew_timeout = min(CALL_TIMEOUT, renew_timeout)

    async def grant(self, seconds: int) -> int:
        """A new lease. One whose grant was answered too late runs out unused."""
        request = self._api.message("LeaseGrantRequest")(TTL=seconds)
        lease: int = (await self._connection.ask("Lease.LeaseGrant", request)).ID
        return lease

    async def renew(self, lease: int) -> bool:
        """Let a lease run its whole time again; False when it has run out."""
        method = self._api.method("Lease.LeaseKeepAlive")

        async def keep_alive(channel: Any, metadata: Metadata) -> bool:
            stream = line.open_stream(channel, method, metadata)
            try:
                await stream.write(method.request(ID=lease))
                await stream.done_writing()
                response = await stream.read()
            finally:
                stream.cancel()
            if not isinstance(response, method.response):
                raise Broken(clauses.ENDED)
            left: int = response.TTL
            return left > 0

        _, lives = await self._connection.carry_out(keep_alive, self._renew_timeout)
        return lives

    async def revoke(self, lease: int) -> None:
        """End a lease; one that has run out is no error."""
        try:
            await self._connection.ask("Lease.LeaseRevoke", self._api.message("LeaseRevokeRequest")(ID=lease))
        except LeaseGone:
            return

    async def commit(self, txn: Txn) -> Outcome:
        """Carry out a transaction. Raises LeaseGone."""
        request = translation.write_txn(self._api, txn)
        return translation.read_outcome(await self._connection.ask("KV.Txn", request))

    @asynccontextmanager
    async def watch(self, ranges: Sequence[Range]) -> AsyncIterator[Watch]:
        """Watch these ranges from now on, over one stream."""
        watch = Watch(self._connection, ranges)
        await watch.begin()
        try:
            yield watch
        finally:
            watch.end()

    async def close(self) -> None:
        """Let go of the connection. What is still asked breaks off."""
        await self._connection.close()
