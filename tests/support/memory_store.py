"""A key-value store with leases in the memory of this process: the five operations that a backend needs.

Its clients share one `Shelf`. A lease that has expired ends with the next operation of any client.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from dlrover_run.store.operations import (
    Absent,
    Change,
    CreateRevisionIs,
    Delete,
    Get,
    KeyValue,
    KeyValueStore,
    LeaseExpired,
    LeaseIs,
    ModRevisionIs,
    Put,
    Range,
    Txn,
    TxnResult,
)

Condition = Absent | CreateRevisionIs | ModRevisionIs | LeaseIs


class Shelf:
    """The keys, the leases by their ids with their seconds and their ends, and all changes by their revisions. `clock`
    is the one clock by which leases expire."""

    def __init__(self) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self.keys: dict[str, KeyValue] = {}
        self.leases: dict[int, tuple[int, float]] = {}
        self.changes: list[tuple[int, Change]] = []
        self.revision = 1
        self.ids = itertools.count(1)
        self.watches: set[asyncio.Event] = set()


class MemoryWatch:
    """A watch that has begun."""

    def __init__(self, shelf: Shelf, ranges: Sequence[Range], news: asyncio.Event) -> None:
        self._shelf = shelf
        self._ranges = ranges
        self._news = news

    async def after(self, revision: int) -> AsyncIterator[Sequence[Change]]:
        while True:
            self._news.clear()
            new = [(number, change) for number, change in self._shelf.changes if number > revision]
            revision = max((number for number, _ in new), default=revision)
            if seen := [change for _, change in new if any(range.has(change.key) for range in self._ranges)]:
                yield seen
            else:
                await self._news.wait()


class MemoryStore(KeyValueStore):
    """One client of a shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def grant(self, seconds: int) -> int:
        lease = next(self._shelf.ids)
        self._shelf.leases[lease] = (seconds, self._now() + seconds)
        return lease

    async def renew(self, lease: int) -> bool:
        self._expire()
        if lease not in self._shelf.leases:
            return False
        seconds, _ = self._shelf.leases[lease]
        self._shelf.leases[lease] = (seconds, self._now() + seconds)
        return True

    async def revoke(self, lease: int) -> None:
        self._shelf.leases.pop(lease, None)
        self._write([Change(key, None) for key, kept in self._shelf.keys.items() if kept.lease == lease])

    async def commit(self, txn: Txn) -> TxnResult:
        self._expire()
        found: dict[str, KeyValue] = {}
        return TxnResult(self._apply(txn, found), self._shelf.revision, found)

    @asynccontextmanager
    async def watch(self, ranges: Sequence[Range]) -> AsyncIterator[MemoryWatch]:
        news = asyncio.Event()
        self._shelf.watches.add(news)
        try:
            yield MemoryWatch(self._shelf, ranges, news)
        finally:
            self._shelf.watches.discard(news)

    async def close(self) -> None:
        pass

    def _now(self) -> float:
        return self._shelf.clock()

    def _expire(self) -> None:
        ended = {lease for lease, (_, end) in self._shelf.leases.items() if end <= self._now()}
        for lease in ended:
            del self._shelf.leases[lease]
        self._write([Change(key, None) for key, kept in self._shelf.keys.items() if kept.lease in ended])

    def _apply(self, txn: Txn, found: dict[str, KeyValue]) -> bool:
        shelf, holds = self._shelf, all(map(self._holds, txn.conditions))
        operations = txn.then if holds else txn.otherwise
        if any(isinstance(one, Put) and one.lease and one.lease not in shelf.leases for one in operations):
            raise LeaseExpired
        for operation in operations:
            if isinstance(operation, Txn):
                self._apply(operation, found)
            elif isinstance(operation, Put):
                before, number = shelf.keys.get(operation.key), shelf.revision + 1
                created = before.created if before else number
                now = KeyValue(operation.key, operation.value, created, number, operation.lease)
                self._write([Change(operation.key, now)])
            else:
                inside = {key: kept for key, kept in shelf.keys.items() if operation.range.has(key)}
                if isinstance(operation, Get):
                    found.update(inside)
                elif isinstance(operation, Delete):
                    self._write([Change(key, None) for key in inside])
        return holds

    def _holds(self, condition: Condition) -> bool:
        if isinstance(condition, Absent):
            return not any(condition.range.has(key) for key in self._shelf.keys)
        kept = self._shelf.keys.get(condition.key)
        if kept is None:
            return False
        if isinstance(condition, LeaseIs):
            return kept.lease == condition.lease
        return (kept.created if isinstance(condition, CreateRevisionIs) else kept.changed) == condition.revision

    def _write(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        shelf = self._shelf
        shelf.revision += 1
        for change in changes:
            if change.now is None:
                del shelf.keys[change.key]
            else:
                shelf.keys[change.key] = change.now
            shelf.changes.append((shelf.revision, change))
        for news in shelf.watches:
            news.set()
