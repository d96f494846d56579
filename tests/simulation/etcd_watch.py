"""An etcd watch of a node over the simulated network: it lags, breaks, and resumes where it stopped."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dlrover_run.store.operations import Change, Compacted, Range, StoreMisconfigured, StoreUnavailable
from simulation.etcd import Follower
from simulation.network import TO_MASTER, TO_NODE

if TYPE_CHECKING:
    from simulation.etcd_client import Client

TO_ETCD = TO_MASTER

REQUEST_TIMEOUT = 5.0
"""Timeout of a request in seconds. The request may still be carried out later."""

DENIED = "etcd: permission denied"
"""The error that a client receives while its rights are revoked."""


class Watch:
    """One watch of several ranges, each with a lag of its own. It begins when it is entered, at the current revision of
    some member."""

    def __init__(self, client: Client, ranges: Sequence[Range]) -> None:
        self._client = client
        self._next: dict[Range, int | None] = dict.fromkeys(ranges)
        # What has arrived since is not read yet, so only the revisions at which it began tell whether data was lost.
        self._starts: dict[Range, int] = {}
        self._due = dict.fromkeys(ranges, 0.0)
        self._followers: list[Follower] = []
        self._begun_ranges: set[Range] = set()
        self._connection = 0
        self._received: deque[tuple[int, Sequence[Change]]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._ended = False

    async def __aenter__(self) -> Watch:
        self._client._watches[self] = None
        self._connect()
        while len(self._begun_ranges) < len(self._next):
            await self._wait()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.end(None)

    async def after(self, revision: int) -> AsyncIterator[Sequence[Change]]:
        """Yield the changes after that revision."""
        if any(revision < start - 1 for start in self._starts.values()):
            raise StoreUnavailable("etcd has lost data since the watch began")
        while True:
            while not self._received:
                await self._wait()
            number, changes = self._received.popleft()
            if number > revision:
                yield changes

    async def _wait(self) -> None:
        """Wait for an event of this watch. Raises the error that has ended it."""
        if self._error is not None:
            raise self._error
        self._waiter = self._client.process.create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            # As with a generator: after a cancellation it does not continue.
            self.end(None)
            raise

    def break_off(self) -> None:
        """Lose the connection, with all messages in transit, and look for another one."""
        if self._ended:
            return
        self._unfollow()
        process = self._client.process
        process.call_later(process.timeline.random.uniform(0, 1), self._connect)

    def end(self, error: BaseException | None) -> None:
        """End the watch: it yields nothing more, and raises the error."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._unfollow()
            self._client._watches.pop(self, None)
            self._wake()

    def _connect(self) -> None:
        self._unfollow()
        if self._ended:
            return
        connection = self._connection
        for range in self._next:
            self._client.send(TO_ETCD, partial(self._follow, range, connection))
        process = self._client.process
        process.call_later(REQUEST_TIMEOUT, self._retry, connection, "it did not take the watch up in time")

    def _unfollow(self) -> None:
        self._connection += 1
        self._begun_ranges.clear()
        for follower in self._followers:
            self._client.cluster.unfollow(follower)
        self._followers.clear()

    def _follow(self, range: Range, connection: int) -> None:
        """At etcd: handle the request, which has arrived."""
        client = self._client
        if connection != self._connection:
            return
        if self._client.denied:
            denied = StoreMisconfigured(DENIED)
            client.send(TO_NODE, lambda: client.process.run(lambda: self._fail(connection, denied)))
            return

        def follow() -> None:
            def notify(revision: int, changes: list[Change]) -> None:
                self._notify(range, connection, revision, changes)

            self._followers.append(client.cluster.follow(range, start, notify))

        # A member may lag behind the others.
        behind = client.process.timeline.random.choice((0, 0, 0, 2))
        start = self._next[range] or max(client.cluster.compacted, client.cluster.revision - behind) + 1
        try:
            client.cluster.answer(follow)
            client.send(TO_NODE, lambda: client.process.run(lambda: self._note_begun(connection, range, start)))
        except Compacted:
            client.send(TO_NODE, lambda: client.process.run(lambda: self._fail(connection, Compacted())))
        except StoreUnavailable:
            client.send(TO_NODE, lambda: client.process.run(lambda: self._retry(connection, "no member has a leader")))

    def _notify(self, range: Range, connection: int, revision: int, changes: list[Change]) -> None:
        """At etcd: send a notification, which arrives after all earlier notifications of this range."""
        client = self._client
        now = client.process.timeline.now
        self._due[range] = max(now + client.delay() + client.lag(), self._due[range])

        def arrive() -> None:
            if connection == self._connection:
                client.process.run(lambda: self._receive(range, connection, revision, changes))

        client.send(TO_NODE, arrive, self._due[range])

    def _receive(self, range: Range, connection: int, revision: int, changes: list[Change]) -> None:
        if connection == self._connection:
            self._next[range] = revision + 1
            self._received.append((revision, changes))
            self._wake()

    def _fail(self, connection: int, error: BaseException) -> None:
        if connection == self._connection:
            self.end(error)

    def _note_begun(self, connection: int, range: Range, start: int) -> None:
        if connection == self._connection:
            self._starts.setdefault(range, start)
            self._next[range] = self._next[range] or start
            self._begun_ranges.add(range)
            self._wake()

    def _retry(self, connection: int, why: str) -> None:
        """Retry after a failed attempt to follow; after several failures the watch ends with the error."""
        if connection != self._connection or len(self._begun_ranges) == len(self._next):
            return
        if self._client.process.timeline.random.random() < 0.5:
            self.break_off()
        else:
            self.end(StoreUnavailable(why))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
