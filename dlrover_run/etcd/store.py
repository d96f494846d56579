"""A watch that goes on where it stopped, on another member if need be: nothing is left out and nothing comes twice.

A store for the records of a job in a cluster of etcd v3."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from dlrover_run.etcd import codec, endpoints
from dlrover_run.etcd.connection import CALL_TIMEOUT, EtcdConnection
from dlrover_run.etcd.endpoints import EndpointChannel, Metadata
from dlrover_run.etcd.errors import EndpointFailed, LoginRequired, error_for_status
from dlrover_run.etcd.operations import (
    Change,
    Compacted,
    EtcdUnavailable,
    KeyValueStore,
    LeaseExpired,
    Range,
    Txn,
    TxnResult,
)
from dlrover_run.spec import EtcdSpec
from dlrover_run.transport import grpc_errors

MIN_STREAM_LIFE = 1.0
"""Seconds below which a stream counts as one more failure although its watches were created. Else something between us
and etcd that ends every stream at once would be called without a pause."""

_FROM_NOW = 0
"""As a revision to begin with: that at which the watch is created."""

_HAS_LEADER = ("hasleader", "true")
"""Has a member end the stream when it has lost its leader, for then it would fall silent without a word."""


class Watch:
    """The changes of some ranges since `begin`, over one stream at a time, until `end`."""

    def __init__(self, connection: EtcdConnection, ranges: Sequence[Range]) -> None:
        self._connection = connection
        self._ranges = tuple(ranges)
        # Of each range. Not the revision of the whole store, for an answer may be about the past.
        self._next_revisions = [_FROM_NOW] * len(ranges)
        self._indexes: dict[int, int] = {}
        self._unseen: deque[Sequence[Any]] = deque()
        self._held: tuple[EndpointChannel, Any] | None = None

    async def begin(self) -> None:
        """Have it created. Raises Away and Mistake."""
        self._held = await self._connection.carry_out(self._create)

    def end(self) -> None:
        """Let go of the stream."""
        if self._held is not None:
            self._held[1].cancel()
            self._held = None

    async def after(self, revision: int) -> AsyncIterator[Sequence[Change]]:
        """All that changes after that revision, for ever.

        Raises Compacted, Mistake, and Away when no endpoint takes the watch up again.
        """
        if any(revision < following - 1 for following in self._next_revisions):
            raise EtcdUnavailable("it has lost data since the watch began")
        clock = asyncio.get_running_loop()
        failures = 0
        why = ""
        while failures < self._connection.tries:
            if self._held is None:
                await self.begin()
            assert self._held is not None, "it has just begun"
            held, stream = self._held
            created = clock.time()
            try:
                while True:
                    while self._unseen:
                        events = self._unseen.popleft()
                        if new := [event for event in events if event.kv.mod_revision > revision]:
                            yield codec.read_changes(new)
                    self._take(await held.settle(stream.read(), None))
            except LoginRequired as refusal:
                why = str(refusal)
            except EndpointFailed as error:
                why = str(error)
                await self._connection.leave(held)
            finally:
                self.end()
            failures = failures + 1 if clock.time() - created < MIN_STREAM_LIFE else 0
        raise EtcdUnavailable(why)

    async def _create(self, channel: Any, metadata: Metadata) -> Any:
        """A stream on which every range is watched."""
        api = self._connection.api
        stream = endpoints.open_stream(channel, api.method("Watch.Watch"), (*metadata, _HAS_LEADER))
        self._indexes = {}
        try:
            for range, revision in zip(self._ranges, self._next_revisions, strict=True):
                await stream.write(codec.write_watch(api, range, revision))
            while len(self._indexes) < len(self._ranges):
                self._take(await stream.read())
        except BaseException:
            stream.cancel()
            raise
        return stream

    def _take(self, response: Any) -> None:
        """Keep what a WatchResponse brings. Raises for one that says that a watch has ended."""
        # At the end of a stream gRPC gives something that is no response.
        if not isinstance(response, self._connection.api.message("WatchResponse")):
            raise EndpointFailed(grpc_errors.ENDED)
        if response.compact_revision:
            raise Compacted
        if response.canceled:
            raise error_for_status("", response.cancel_reason, self._connection.spec)
        if response.created:
            # They are created in the order in which that was asked for.
            index = self._indexes[response.watch_id] = len(self._indexes)
            if self._next_revisions[index] == _FROM_NOW:
                self._next_revisions[index] = response.header.revision + 1
            elif response.header.revision < self._next_revisions[index] - 1:
                # A member that lags behind for a moment, or all of them after a backup was restored, on which this
                # watch would be silent until the past has come back.
                raise EndpointFailed("it does not know yet what others have told")
        if response.events:
            # All changes of one revision come in one response.
            self._next_revisions[self._indexes[response.watch_id]] = response.events[-1].kv.mod_revision + 1
            self._unseen.append(response.events)


class EtcdStore(KeyValueStore):
    """`operations.Store` with etcd. A member has `renew_timeout` seconds to renew a lease before the next is asked, or
    the time of any other call where that is less; `chance` returns a random number from 0 to 1.

    Raises PackageMissing where the packages that it needs are not installed.
    """

    def __init__(self, spec: EtcdSpec, renew_timeout: float, chance: Callable[[], float] = random.random) -> None:
        self._connection = EtcdConnection(spec, chance)
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
            stream = endpoints.open_stream(channel, method, metadata)
            try:
                await stream.write(method.request(ID=lease))
                await stream.done_writing()
                response = await stream.read()
            finally:
                stream.cancel()
            if not isinstance(response, method.response):
                raise EndpointFailed(grpc_errors.ENDED)
            left: int = response.TTL
            return left > 0

        _, lives = await self._connection.carry_out(keep_alive, self._renew_timeout)
        return lives

    async def revoke(self, lease: int) -> None:
        """End a lease; one that has run out is no error."""
        try:
            await self._connection.ask("Lease.LeaseRevoke", self._api.message("LeaseRevokeRequest")(ID=lease))
        except LeaseExpired:
            return

    async def commit(self, txn: Txn) -> TxnResult:
        """Carry out a transaction. Raises LeaseExpired."""
        request = codec.write_txn(self._api, txn)
        return codec.read_outcome(await self._connection.ask("KV.Txn", request))

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
