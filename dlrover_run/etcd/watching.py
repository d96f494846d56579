"""A watch that goes on where it stopped, on another member if need be: nothing is left out and nothing comes twice."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from dlrover_run.etcd import line, translation
from dlrover_run.etcd.answers import Broken, LoginNeeded, judge
from dlrover_run.etcd.connection import Connection
from dlrover_run.etcd.line import Line, Metadata
from dlrover_run.etcd.operations import Away, Change, Compacted, Range
from dlrover_run.wire import clauses

SHORT_LIFE = 1.0
"""Seconds below which a stream counts as one more failure although its watches were created. Else something between us
and etcd that ends every stream at once would be called without a pause."""

_FROM_NOW = 0
"""As a revision to begin with: that at which the watch is created."""

_HAS_LEADER = ("hasleader", "true")
"""Has a member end the stream when it has lost its leader, for then it would fall silent without a word."""


class Watch:
    """The changes of some ranges since `begin`, over one stream at a time, until `end`."""

    def __init__(self, connection: Connection, ranges: Sequence[Range]) -> None:
        self._connection = connection
        self._ranges = tuple(ranges)
        # Of each range. Not the revision of the whole store, for an answer may be about the past.
        self._next_revisions = [_FROM_NOW] * len(ranges)
        self._indexes: dict[int, int] = {}
        self._unseen: deque[Sequence[Any]] = deque()
        self._held: tuple[Line, Any] | None = None

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
            raise Away("it has lost data since the watch began")
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
                            yield translation.read_changes(new)
                    self._take(await held.settle(stream.read(), None))
            except LoginNeeded as refusal:
                why = str(refusal)
            except Broken as error:
                why = str(error)
                await self._connection.leave(held)
            finally:
                self.end()
            failures = failures + 1 if clock.time() - created < SHORT_LIFE else 0
        raise Away(why)

    async def _create(self, channel: Any, metadata: Metadata) -> Any:
        """A stream on which every range is watched."""
        api = self._connection.api
        stream = line.open_stream(channel, api.method("Watch.Watch"), (*metadata, _HAS_LEADER))
        self._indexes = {}
        try:
            for range, revision in zip(self._ranges, self._next_revisions, strict=True):
                await stream.write(translation.write_watch(api, range, revision))
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
            raise Broken(clauses.ENDED)
        if response.compact_revision:
            raise Compacted
        if response.canceled:
            raise judge("", response.cancel_reason, self._connection.spec)
        if response.created:
            # They are created in the order in which that was asked for.
            index = self._indexes[response.watch_id] = len(self._indexes)
            if self._next_revisions[index] == _FROM_NOW:
                self._next_revisions[index] = response.header.revision + 1
            elif response.header.revision < self._next_revisions[index] - 1:
                # A member that lags behind for a moment, or all of them after a backup was restored, on which this
                # watch would be silent until the past has come back.
                raise Broken("it does not know yet what others have told")
        if response.events:
            # All changes of one revision come in one response.
            self._next_revisions[self._indexes[response.watch_id]] = response.events[-1].kv.mod_revision + 1
            self._unseen.append(response.events)
