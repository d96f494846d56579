"""The key-value store of a job in a cluster of etcd v3, and its watches."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from dlrover_run.rendezvous import kinds
from dlrover_run.store.etcd import codec
from dlrover_run.store.etcd.connection import CALL_TIMEOUT, EndpointChannel, EtcdConnection, Metadata, open_stream
from dlrover_run.store.etcd.errors import EndpointFailed, LoginRequired, error_for_status
from dlrover_run.store.operations import (
    Change,
    Compacted,
    KeyValueStore,
    LeaseExpired,
    Range,
    StoreUnavailable,
    Txn,
    TxnResult,
)
from dlrover_run.transport import grpc_errors

MIN_STREAM_LIFE = 1.0
"""Seconds below which a stream counts as one more failure although its watches were created. Otherwise a proxy before
etcd that ends every stream at once would be called without a pause."""

_FROM_NOW = 0
"""As the first revision of a watch: the one at which the watch is created."""

_HAS_LEADER = ("hasleader", "true")
"""Makes a member end the stream if it loses its leader; otherwise it would send nothing."""


class EtcdStore(KeyValueStore):
    """`operations.KeyValueStore` in etcd. A member has `renew_timeout` seconds to renew a lease before the next one is
    called, or the time of any other call if that is less; `rng` returns a random number from 0 to 1.

    Raises PackageMissing if the packages that it needs are not installed.
    """

    def __init__(self, spec: kinds.Store, renew_timeout: float, rng: Callable[[], float] = random.random) -> None:
        self._connection = EtcdConnection(spec, rng)
        self._api = self._connection.api
        self._renew_timeout = min(CALL_TIMEOUT, renew_timeout)

    async def grant(self, seconds: int) -> int:
        """Grant a new lease. If the answer comes too late, it expires unused."""
        request = self._api.message("LeaseGrantRequest")(TTL=seconds)
        lease: int = (await self._connection.request("Lease.LeaseGrant", request)).ID
        return lease

    async def renew(self, lease: int) -> bool:
        method = self._api.method("Lease.LeaseKeepAlive")

        async def keep_alive(channel: Any, metadata: Metadata) -> bool:
            stream = open_stream(channel, method, metadata)
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

        _, is_alive = await self._connection.call(keep_alive, self._renew_timeout)
        return is_alive

    async def revoke(self, lease: int) -> None:
        try:
            await self._connection.request("Lease.LeaseRevoke", self._api.message("LeaseRevokeRequest")(ID=lease))
        except LeaseExpired:
            return

    async def commit(self, txn: Txn) -> TxnResult:
        request = codec.write_txn(self._api, txn)
        return codec.read_outcome(await self._connection.request("KV.Txn", request))

    @asynccontextmanager
    async def watch(self, ranges: Sequence[Range]) -> AsyncIterator[EtcdWatch]:
        watch = EtcdWatch(self._connection, ranges)
        await watch.begin()
        try:
            yield watch
        finally:
            watch.end()

    async def close(self) -> None:
        await self._connection.close()


class EtcdWatch:
    """The changes of some ranges from `begin` to `end`, over one stream at a time. It continues where it stopped, on
    another member if necessary: no change is missed or repeated."""

    def __init__(self, connection: EtcdConnection, ranges: Sequence[Range]) -> None:
        self._connection = connection
        self._ranges = tuple(ranges)
        # One for each range, not the revision of the whole store, because a response may be about the past.
        self._next_revisions = [_FROM_NOW] * len(ranges)
        self._indexes: dict[int, int] = {}
        self._unread: deque[Sequence[Any]] = deque()
        self._open: tuple[EndpointChannel, Any] | None = None

    async def begin(self) -> None:
        self._open = await self._connection.call(self._create)

    def end(self) -> None:
        if self._open is not None:
            self._open[1].cancel()
            self._open = None

    async def after(self, revision: int) -> AsyncIterator[Sequence[Change]]:
        """All changes after that revision, for ever.

        Raises Compacted, StoreMisconfigured, and StoreUnavailable if no endpoint continues the watch.
        """
        if any(revision < following - 1 for following in self._next_revisions):
            raise StoreUnavailable("it has lost data since the watch began")
        clock = asyncio.get_running_loop()
        failures = 0
        reason = ""
        while failures < self._connection.tries:
            if self._open is None:
                await self.begin()
            assert self._open is not None, "it has just begun"
            channel, stream = self._open
            created = clock.time()
            try:
                while True:
                    while self._unread:
                        events = self._unread.popleft()
                        if new := [event for event in events if event.kv.mod_revision > revision]:
                            yield codec.read_changes(new)
                    self._take(await channel.wait_for(stream.read(), None))
            except LoginRequired as refusal:
                reason = str(refusal)
            except EndpointFailed as error:
                reason = str(error)
                await self._connection.leave(channel)
            finally:
                self.end()
            failures = failures + 1 if clock.time() - created < MIN_STREAM_LIFE else 0
        raise StoreUnavailable(reason)

    async def _create(self, channel: Any, metadata: Metadata) -> Any:
        """A stream on which every range is watched."""
        api = self._connection.api
        stream = open_stream(channel, api.method("Watch.Watch"), (*metadata, _HAS_LEADER))
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
        """Keep the content of a WatchResponse. Raises if it reports the end of a watch."""
        # At the end of a stream gRPC returns something that is not a response.
        if not isinstance(response, self._connection.api.message("WatchResponse")):
            raise EndpointFailed(grpc_errors.ENDED)
        if response.compact_revision:
            raise Compacted
        if response.canceled:
            raise error_for_status("", response.cancel_reason, self._connection.spec)
        if response.created:
            # Watches are created in the order of the requests.
            index = self._indexes[response.watch_id] = len(self._indexes)
            if self._next_revisions[index] == _FROM_NOW:
                self._next_revisions[index] = response.header.revision + 1
            elif response.header.revision < self._next_revisions[index] - 1:
                # A member that lags behind for a moment, or all members after a backup was restored. It would send
                # nothing until it has reached that revision again.
                raise EndpointFailed("its data is older than what other members have sent")
        if response.events:
            # All changes of one revision come in one response.
            self._next_revisions[self._indexes[response.watch_id]] = response.events[-1].kv.mod_revision + 1
            self._unread.append(response.events)
