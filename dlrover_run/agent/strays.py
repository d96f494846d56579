"""Processes that a dead worker left behind: they get a moment to end by themselves, then they are killed.

An orphan of a worker that lives is none of our business: many services of training scripts detach themselves on
purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from . import lineage

if TYPE_CHECKING:
    import psutil


class StraySweep:
    """Ends what dead workers left behind while the job goes on, without anybody waiting for it.

    `spared` names the children that are ours: workers, template, relay.
    """

    def __init__(self, spared: Callable[[], set[int]]) -> None:
        self._spared = spared
        self._paused = False
        self._sentences: set[asyncio.TimerHandle] = set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Reap nothing meanwhile: a worker that is just being forked is our child before we have been told its pid."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self.reap()

    def reap(self) -> None:
        """Collect the orphans that have ended, so that they do not stay as zombies."""
        if not self._paused:
            lineage.reap(self._spared())

    def condemn_all(self) -> None:
        """No worker lives: everything below us that is not ours has been left behind."""
        self._condemn(lineage.descendants(self._spared()))

    def condemn_session(self, worker: int) -> None:
        """One worker has ended while others go on: what is still in its session is its own."""
        left = []
        for process in lineage.descendants(self._spared()):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(process.pid) == worker:
                    left.append(process)
        self._condemn(left)

    def close(self) -> None:
        """Leave what is left to the sweep at the end."""
        for sentence in self._sentences:
            sentence.cancel()

    def _condemn(self, processes: list[psutil.Process]) -> None:
        if processes:
            loop = asyncio.get_running_loop()
            self._sentences.add(loop.call_later(lineage.STRAY_GRACE, self._execute, processes))

    def _execute(self, processes: list[psutil.Process]) -> None:
        import psutil

        for process in processes:
            # psutil compares the start time, so a number that was given to somebody else meanwhile is safe.
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in (*process.children(recursive=True), process):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
