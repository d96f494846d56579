"""Notice that log files have grown, with inotify or by reading them at intervals."""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Callable, Collection

from dlrover_run.output.sources import Source

POLL_SECONDS = 0.1
"""Seconds between two reads of log files if the kernel has no inotify watch left."""

GATHER_SECONDS = 0.005
"""Seconds after log files have grown before they are read again.

The first line is shown at once. A worker that writes line by line would otherwise wake the relay for every line, and
run at a third of its speed.
"""

IN_MODIFY = 0x2
"""The inotify event for bytes written to a file."""

EVENT_BYTES = 64 * 1024
"""Bytes of one read of inotify events."""


class LogWatcher:
    """Marks log files as grown: by inotify, or all of them every POLL_SECONDS once the kernel has no watch left."""

    def __init__(self, poller: select.epoll, warn: Callable[[str], None]) -> None:
        self._poller = poller
        self._warn = warn
        self._inotify: Inotify | None = None
        self._resume_at: float | None = None
        self.polling = False

    @property
    def fd(self) -> int:
        """The descriptor that becomes readable when a log file has grown; -1 if there is none."""
        return -1 if self._inotify is None else self._inotify.fd

    @property
    def due(self) -> float | None:
        return self._resume_at

    def add(self, log: Source) -> None:
        try:
            if self._inotify is None:
                self._inotify = Inotify()
                self._poller.register(self._inotify.fd, select.EPOLLIN | select.EPOLLONESHOT)
            log.watch = self._inotify.watch(log.path)
        except OSError as error:
            if not self.polling:
                self._warn(f"no inotify watch for log files ({error.strerror}): they are read every {POLL_SECONDS} s")
            self.polling = True

    def remove(self, log: Source, others: Collection[Source]) -> None:
        """Watch the file no more, unless one of the `others` is the same file."""
        if self._inotify is not None and log.watch >= 0 and all(other.watch != log.watch for other in others):
            self._inotify.remove(log.watch)

    def on_change(self, logs: Collection[Source]) -> None:
        """Read the events of `fd`; the next ones are read after GATHER_SECONDS."""
        assert self._inotify is not None
        self._resume_at = time.monotonic() + GATHER_SECONDS
        changed = self._inotify.changed()
        for log in logs:
            log.grown = log.grown or changed is None or log.watch in changed

    def resume(self) -> None:
        """Wait for events again if enough growth may have been gathered."""
        if self._inotify is not None and self._resume_at is not None and time.monotonic() >= self._resume_at:
            self._resume_at = None
            self._poller.modify(self._inotify.fd, select.EPOLLIN | select.EPOLLONESHOT)


class Inotify:
    """Inotify through ctypes. Raises OSError when the kernel has no instance or watch left."""

    def __init__(self) -> None:
        # Imported here: only the relay of a job that tees needs it, and importing it slows the start of every process.
        import ctypes

        self._libc = ctypes.CDLL(None, use_errno=True)
        self._errno = ctypes.get_errno
        self.fd = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def _checked(self, result: int) -> int:
        if result < 0:
            number = self._errno()
            raise OSError(number, os.strerror(number))
        return result

    def watch(self, path: str) -> int:
        """Watch a file and return the watch's number, the same for the same file."""
        return self._checked(self._libc.inotify_add_watch(self.fd, os.fsencode(path), IN_MODIFY))

    def remove(self, watch: int) -> None:
        self._libc.inotify_rm_watch(self.fd, watch)

    def changed(self) -> set[int] | None:
        """The watches of the files written to since the last call; None: events were lost, it may be any file."""
        numbers: set[int] = set()
        try:
            data = os.read(self.fd, EVENT_BYTES)
        except BlockingIOError:
            return numbers
        position = 0
        while position < len(data):
            number, _, _, length = struct.unpack_from("iIII", data, position)
            if number < 0:
                return None
            numbers.add(number)
            position += struct.calcsize("iIII") + length
        return numbers
