"""Notice that log files have grown, with inotify or by reading them at intervals."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from collections.abc import Callable, Collection

from dlrover_run.output.relay.sources import LogSource

POLL_SECONDS = 0.1
"""Seconds between two reads of a log file for which the kernel has no inotify watch, or that could not be read."""

GATHER_SECONDS = 0.005
"""Seconds after log files have grown before they are read again.

The first line is shown at once. A worker that writes line by line would otherwise wake the relay for every line, and
run at a third of its speed.
"""

_IN_MODIFY = 0x2
_EVENT = struct.Struct("iIII")
_EVENT_BYTES = 64 * 1024
_WAKES_ONCE = select.EPOLLIN | select.EPOLLONESHOT
_libc = ctypes.CDLL(None, use_errno=True)


class LogWatcher:
    """Marks log files as grown: by inotify, or every POLL_SECONDS those for which the kernel had no watch left."""

    def __init__(self, poller: select.epoll, warn: Callable[[str], None]) -> None:
        self._poller = poller
        self._warn = warn
        self.fd = -1
        """The inotify descriptor, readable when a log file has grown; -1 before the first log file."""
        self.due: float | None = None
        """When `resume` has something to do."""
        self._warned = False

    def add(self, log: LogSource) -> None:
        try:
            if self.fd < 0:
                self._open()
            log.watch = self._watch(log)
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._warn(f"no inotify watch for log files ({error.strerror}): they are read every {POLL_SECONDS} s")
            self.due = time.monotonic()

    def _watch(self, log: LogSource) -> int:
        """The number of the watch, the same one for the same file."""
        try:
            # The file that is read, which may have another name by now.
            return _checked(_libc.inotify_add_watch(self.fd, b"/proc/self/fd/%d" % log.fd, _IN_MODIFY))
        except FileNotFoundError:  # There is no /proc.
            return _checked(_libc.inotify_add_watch(self.fd, os.fsencode(log.path), _IN_MODIFY))

    def _open(self) -> None:
        fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            self._poller.register(fd, _WAKES_ONCE)
        except OSError:
            os.close(fd)
            raise
        self.fd = fd

    def retry(self) -> None:
        """A log file could not be read, as on a network file system that is gone for now: read it again soon."""
        if self.due is None:
            self.due = time.monotonic() + POLL_SECONDS

    def remove(self, log: LogSource, others: Collection[LogSource]) -> None:
        """Watch the file no more, unless one of the `others` is the same file."""
        if log.watch >= 0 and all(other.watch != log.watch for other in others):
            _libc.inotify_rm_watch(self.fd, log.watch)

    def on_change(self, logs: Collection[LogSource]) -> None:
        """Read the events of `fd`; the next ones are read after GATHER_SECONDS."""
        self.due = time.monotonic() + GATHER_SECONDS
        changed = self._changed()
        for log in logs:
            log.grown = log.grown or changed is None or log.watch in changed

    def resume(self, logs: Collection[LogSource]) -> None:
        """Wait for events again if enough growth may have been gathered; have the logs read that have no events."""
        if self.due is None or time.monotonic() < self.due:
            return
        self.due = None
        if self.fd >= 0:
            self._poller.modify(self.fd, _WAKES_ONCE)
        for log in logs:
            if log.watch < 0 or log.refused:
                self.due = time.monotonic() + POLL_SECONDS
                log.grown = True

    def _changed(self) -> set[int] | None:
        """The watches of the files written to since the last call; None: events were lost, it may be any file."""
        numbers: set[int] = set()
        try:
            data = os.read(self.fd, _EVENT_BYTES)
        except BlockingIOError:
            return numbers
        position = 0
        while position < len(data):
            number, _, _, length = _EVENT.unpack_from(data, position)
            if number < 0:
                return None
            numbers.add(number)
            position += _EVENT.size + length
        return numbers


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
