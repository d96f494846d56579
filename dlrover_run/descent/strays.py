"""Processes that a dead worker left behind: they get a moment to end by themselves, then they are killed.

An orphan of a worker that lives is none of our business: many services of training scripts detach themselves on
purpose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dlrover_run.descent import lineage

SESSION_DELAY = 0.1
"""Seconds from a worker's end to the look at what it left in its session; with the grace it stays well within one."""


class StraySweep:
    """Ends what dead workers left behind while the job goes on, without anybody waiting for it.

    `spared` names the children that are ours: workers, template, relay.
    """

    def __init__(self, spared: Callable[[], set[int]]) -> None:
        self._spared = spared
        self._paused = False
        self._sentences: set[asyncio.TimerHandle] = set()
        self._left_sessions: set[int] = set()
        self._look: asyncio.TimerHandle | None = None

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
        self._forget_sessions()
        self._condemn(lineage.descendants(self._spared()))

    def condemn_session(self, worker: int) -> None:
        """One worker has ended while others go on: what is still in its session is its own."""
        if not self._left_sessions:
            # Looking at every process takes milliseconds on a large machine, and many workers may end at once. After a
            # failure the round most often ends meanwhile, and the restart does not wait for this.
            self._look = asyncio.get_running_loop().call_later(SESSION_DELAY, self._condemn_sessions)
        self._left_sessions.add(worker)

    def _condemn_sessions(self) -> None:
        self._condemn([each for each in lineage.descendants(self._spared()) if each.session in self._left_sessions])
        self._forget_sessions()

    def _forget_sessions(self) -> None:
        self._left_sessions.clear()
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def close(self) -> None:
        """Leave what is left to the sweep at the end."""
        self._forget_sessions()
        for sentence in self._sentences:
            sentence.cancel()

    def _condemn(self, left: list[lineage.Relative]) -> None:
        if not left:
            return

        def execute() -> None:
            self._sentences.discard(sentence)
            lineage.end(left, self._spared())

        sentence = asyncio.get_running_loop().call_later(lineage.STRAY_GRACE, execute)
        self._sentences.add(sentence)
