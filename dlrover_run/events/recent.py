"""The last events of one agent, in its memory: they answer `why` and `events` where its log cannot be read.

There may be no log (`--journal=/dev/null`), its directory may not be writable, or the log may be a file of a container
whose files the operator does not see. The events are kept as lines of a log, so that one reader reads both.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from dlrover_run.events.records import Event, Events, LogOpened, WorkerProgress, WorkerResources, stamped

MAX_KIND_BYTES = 64 * 1024
"""Bytes of the events of one name that are kept: some 200 events. Each name has its own limit, so that figures, which
come each minute, do not push out the start of the round that they are about. All together are less than 2 MiB."""


class RecentEvents(Events):
    """Keeps the last events of one agent, each name up to `max_bytes`, and passes all on to `log`. `now` and `mono` are
    the clocks."""

    def __init__(
        self,
        opened: LogOpened,
        log: Events,
        max_bytes: int = MAX_KIND_BYTES,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self._opened = opened
        self._log = log
        self._max_bytes = max_bytes
        self._now = now
        self._mono = mono
        self._count = 0
        self._is_torn = False
        self._kept: dict[type[Event], deque[tuple[int, bytes]]] = {}
        self._sizes: dict[type[Event], int] = {}

    def emit(self, event: Event) -> None:
        self._log.emit(event)
        line = msgspec.json.encode(stamped(event, self._now(), self._mono()))
        kind = type(event)
        kept = self._kept.setdefault(kind, deque())
        kept.append((self._count, line))
        self._count += 1
        self._sizes[kind] = self._sizes.get(kind, 0) + len(line)
        while self._sizes[kind] > self._max_bytes and len(kept) > 1:
            self._sizes[kind] -= len(kept.popleft()[1])
            self._is_torn |= kind not in (WorkerProgress, WorkerResources)

    def close(self) -> bool:
        return self._log.close()

    @property
    def path(self) -> str:
        return self._log.path

    def lines(self) -> list[bytes]:
        events = sorted(each for kept in self._kept.values() for each in kept)
        # As after a rotation: what was before the first line is not known. Figures that are gone change nothing else.
        opened = msgspec.structs.replace(self._opened, part=int(self._is_torn))
        return [msgspec.json.encode(opened), *(line for _, line in events)]
