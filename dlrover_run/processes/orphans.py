"""Kills the processes that an ended worker left behind, after a grace period.

An orphan of a running worker is left alone: many services of training scripts detach themselves on purpose.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dlrover_run import linux
from dlrover_run.background import wait_for_event
from dlrover_run.processes import tree

SESSION_DELAY = 0.1
"""Seconds from a worker's end to the search for processes of its session. With the grace period it stays well within
one second."""


class OrphanKiller:
    """Kills what ended workers left behind while the job goes on. Nothing waits for it.

    `spared` returns the pids of this process's own children: workers, template, relay.
    """

    def __init__(self, spared: Callable[[], set[int]]) -> None:
        self._spared = spared
        self._pauses = 0
        self._pending_kills: set[asyncio.TimerHandle] = set()
        self._ended_sessions: set[int] = set()
        self._session_search: asyncio.TimerHandle | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not reap inside this block: a worker that is being forked is a child before its pid is known here."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self.reap()

    def reap(self) -> None:
        """Collect the orphans that have ended, so that they do not stay as zombies."""
        if not self._pauses:
            tree.reap(self._spared())

    def kill_orphans(self) -> None:
        """Kill every process below this one that is not spared. Called when no worker runs: between two rounds, and
        after the end of a node of `--local-nodes`."""
        self._forget_sessions()
        self._kill_later(tree.descendants(self._spared()))

    def end_now(self) -> None:
        """End every process below this one that is not spared, and return when they have ended."""
        tree.end_children(self._spared())

    def find(self, is_meant: Callable[[tree.ProcessInfo], bool]) -> list[tree.ProcessInfo]:
        """The processes below this one that are meant, except those that are spared and what is below these."""
        return [one for one in tree.descendants(self._spared()) if is_meant(one)]

    async def end(self, is_meant: Callable[[tree.ProcessInfo], bool], timeout: float) -> list[int]:
        """Kill at once what `find` returns, with all below it, again until there is none: it may fork meanwhile.
        Returns the pids of those that run on, after `timeout` seconds or because this user may not end them."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        refused: set[int] = set()
        while found := [one for one in self.find(is_meant) if one.pid not in refused]:
            if loop.time() >= until:
                return [*refused, *(one.pid for one in found)]
            refused.update(tree.kill(found, self._spared()))
            for one in found:
                if one.pid not in refused:
                    await _until_ended(one.pid, until - loop.time())
            self.reap()
        return list(refused)

    def kill_session(self, worker: int) -> None:
        """Kill what is still in the session of one worker that has ended while others run."""
        if not self._ended_sessions:
            # Reading every process takes milliseconds on a large machine, and many workers may end at once. After a
            # failure the round usually ends before this timer fires, and a restart does not wait for it.
            self._session_search = asyncio.get_running_loop().call_later(SESSION_DELAY, self._kill_sessions)
        self._ended_sessions.add(worker)

    def _kill_sessions(self) -> None:
        self._kill_later([each for each in tree.descendants(self._spared()) if each.session in self._ended_sessions])
        self._forget_sessions()

    def _forget_sessions(self) -> None:
        self._ended_sessions.clear()
        if self._session_search is not None:
            self._session_search.cancel()
            self._session_search = None

    def close(self) -> None:
        """Cancel pending kills; `tree.end_children` ends what is left when this process ends."""
        self._forget_sessions()
        for pending in self._pending_kills:
            pending.cancel()

    def _kill_later(self, orphans: list[tree.ProcessInfo]) -> None:
        if not orphans:
            return

        def kill() -> None:
            self._pending_kills.discard(pending)
            tree.kill(orphans, self._spared())

        pending = asyncio.get_running_loop().call_later(tree.ORPHAN_GRACE, kill)
        self._pending_kills.add(pending)


async def _until_ended(pid: int, timeout: float) -> None:
    """Return when a process that was killed has ended, at most `timeout` seconds later; where the kernel gives no
    pidfds, sooner."""
    if not linux.has_pidfd():
        await asyncio.sleep(tree.LOOK_INTERVAL)
        return
    try:
        fd = linux.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await wait_for_event(ended, timeout)
    finally:
        loop.remove_reader(fd)
        os.close(fd)
