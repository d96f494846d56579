"""Tells when something has changed in directories, by inotify. What has changed is not needed: `changes` compares."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection
from functools import partial

from dlrover_run.background import begin_in_thread

GROUPED_MS = 50
STEP_MS = 10
"""`watchfiles` returns what has changed once nothing more does for a step, after the first of these at the latest."""


class Watcher:
    """Calls `on_change` with the paths that have changed, in the loop; with none once a watch of other directories has
    begun, since the files may have changed before.

    `works` is false while nothing is watched: the library is not installed, or the kernel allows no more watches. The
    owner looks at the files by itself then.
    """

    def __init__(self, on_change: Callable[[Collection[str]], None]) -> None:
        self._on_change = on_change
        self._directories: frozenset[str] = frozenset()
        self._stopped = threading.Event()
        self._begun = 0
        self.works = False

    def watch(self, directories: frozenset[str]) -> None:
        """Watch these directories, and no others; not what is below them."""
        if directories == self._directories:
            return
        self._directories = directories
        self.close()
        self._stopped = stopped = threading.Event()
        self._begun += 1
        loop, begun = asyncio.get_running_loop(), self._begun

        def tell(paths: Collection[str]) -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(self._note, begun, paths)

        ended, _ = begin_in_thread(partial(_run, sorted(directories), stopped, tell), "reload")
        ended.add_done_callback(partial(self._note_end, begun))

    def close(self) -> None:
        """Watch nothing any more."""
        self.works = False
        self._stopped.set()

    def _note(self, begun: int, paths: Collection[str]) -> None:
        if begun == self._begun:
            self.works = not self._stopped.is_set()
            self._on_change(paths)

    def _note_end(self, begun: int, ended: asyncio.Future[None]) -> None:
        # An error of the library is no reason to end a job: files are looked at without it.
        if (ended.cancelled() or ended.exception() is not None) and begun == self._begun:
            self.works = False
            self._on_change(())


def _run(directories: list[str], stopped: threading.Event, tell: Callable[[Collection[str]], None]) -> None:
    """Watch until `stopped`. Raises ImportError without the library, OSError if the kernel refuses."""
    # It is optional, and takes a moment to import, for which no worker waits in this thread.
    from watchfiles._rust_notify import RustNotify

    with RustNotify(directories, False, False, 0, False, True) as notify:
        tell(())
        while not stopped.is_set():
            found = notify.watch(GROUPED_MS, STEP_MS, 0, stopped)
            if not isinstance(found, str):
                tell({path for _, path in found})
