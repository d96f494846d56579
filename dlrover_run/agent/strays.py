"""Processes that a dead worker left behind: they get a moment to end by themselves, then they are killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from . import lineage

if TYPE_CHECKING:
    from collections.abc import Iterator


class StraySweep:
    """Ends this process's adopted children while the job runs, without waiting for them.

    `spared` names the children that are ours: workers, template, relay. Each stray has STRAY_GRACE seconds from when it was
    first seen.
    """

    def __init__(self, spared: Callable[[], set[int]]) -> None:
        self._spared = spared
        self._first_seen: dict[int, float] = {}
        self._paused = False
        self._next_look: asyncio.TimerHandle | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Touch nothing meanwhile: a worker that is just being forked is our child before we have been told its pid."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self._look_after(lineage.STRAY_GRACE)

    def look(self) -> None:
        """Reap what has ended, kill what is overdue, and come back as long as there is something to see."""
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        if self._paused:
            return
        now = asyncio.get_running_loop().time()
        lineage.reap(self._spared())
        strays = lineage.children() - self._spared()
        self._first_seen = {pid: self._first_seen.get(pid, now) for pid in strays}
        if not strays:
            return
        for pid, seen in self._first_seen.items():
            if now - seen >= lineage.STRAY_GRACE:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._look_after(lineage.STRAY_GRACE)

    def close(self) -> None:
        """Look no more; what is left is the business of the sweep at the end."""
        if self._next_look is not None:
            self._next_look.cancel()

    def _look_after(self, seconds: float) -> None:
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(seconds, self.look)
