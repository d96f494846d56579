"""Writes the event log of one agent. Neither a slow disk nor a full one holds the agent up.

Events are written by a thread of their own: a disk, or a file system of the network, may block for minutes. The number
of events that wait for it is limited, and so is the size of all files. What could not be written is counted, and noted
in the log (`dlrover.log.gap`) as soon as it can be written again; the first error is printed on the console.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from dlrover_run.events.records import ERROR, Event, Events, LogGap, LogOpened, stamped

MAX_BYTES = 8 * 1024 * 1024
"""The size at which a file is rotated: more than 20,000 events."""

KEPT_FILES = 4
"""Rotated files that are kept besides the one that is written."""

MAX_PENDING = 4096
"""Events that wait for the disk. Further ones are dropped."""

CLOSE_TIMEOUT = 10.0
"""Seconds that the end of an agent waits for a disk that does not take its last events. A disk that many processes
write to may take seconds for one `fsync`."""


def rotated(path: Path, number: int) -> Path:
    """The file that was rotated `number` files ago."""
    return path.with_name(f"{path.name}.{number}")


class EventFile:
    """The file of one agent at `path`, which must not exist. It is rotated before it would exceed `max_bytes`.

    `prepare` is called before the file is opened, and may raise OSError. A `private` one is for this user alone, and no
    failure waits for the disk itself."""

    def __init__(
        self,
        path: Path,
        opened: LogOpened,
        max_bytes: int = MAX_BYTES,
        kept_files: int = KEPT_FILES,
        prepare: Callable[[], None] = lambda: None,
        private: bool = False,
    ) -> None:
        self.path = path
        self._prepare = prepare
        self._private = private
        self._opened = opened
        self._max_bytes = max_bytes
        self._kept_files = kept_files
        self._fd = -1
        self._size = 0
        self._part = 0
        self._has_head = False
        self._torn = False

    def append(self, event: Event) -> None:
        """Write one event as a line. Raises OSError; the event is then not in the log, or only as the incomplete line
        that a reader ignores."""
        line = msgspec.json.encode(event) + b"\n"
        self._follow()
        if self._fd >= 0 and self._size + len(line) > self._max_bytes:
            self._rotate()
        if self._fd < 0:
            self._open()
        if not self._has_head:
            # Where the disk was full when the file was opened, the first line follows as soon as there is room.
            self._write(msgspec.json.encode(msgspec.structs.replace(self._opened, part=self._part)) + b"\n")
            self._has_head = True
        self._write(line)

    def sync(self) -> None:
        """Wait until the disk itself has what is written. Raises OSError."""
        if self._fd >= 0 and not self._private:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; a later event opens it again, and repeats its first line."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _follow(self) -> None:
        """Close a file that another program has moved or removed, so that the next one is written at `path`; begin one
        anew that it has truncated."""
        if self._fd < 0:
            return
        own = os.fstat(self._fd)
        try:
            there: os.stat_result | None = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            self.close()
        elif own.st_size < self._size:
            self._size, self._has_head, self._torn = own.st_size, own.st_size > 0, own.st_size > 0

    def _open(self) -> None:
        self._prepare()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags, 0o600 if self._private else 0o666)
        self._size = os.fstat(self._fd).st_size
        self._torn = self._size > 0
        self._has_head = False

    def _rotate(self) -> None:
        self.close()
        for number in range(self._kept_files, 0, -1):
            newer = self.path if number == 1 else rotated(self.path, number - 1)
            with contextlib.suppress(FileNotFoundError):
                newer.replace(rotated(self.path, number))
        self._part += 1

    def _write(self, line: bytes) -> None:
        """Write a line. After an incomplete one it begins with a newline, so that no more than that one is lost."""
        data = b"\n" + line if self._torn else line
        self._torn = True
        while data:
            written = os.write(self._fd, data)
            self._size += written
            data = data[written:]
        self._torn = False


class EventWriter(Events):
    """Keeps the events of one agent in `file`.

    `warn` is called once, from the thread, with a sentence if the log cannot be written. The thread is ended by
    `close`, and dies with the process in any case. `now` and `mono` are the clocks.
    """

    def __init__(
        self,
        file: EventFile,
        warn: Callable[[str], None],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        mono: Callable[[], float] = time.monotonic,
        close_timeout: float = CLOSE_TIMEOUT,
    ) -> None:
        self._close_timeout = close_timeout
        self._file = file
        self._warn = warn
        self._now = now
        self._mono = mono
        self._pending: deque[Event] = deque()
        self._overflow = 0
        self._unwritten = 0
        self._unsynced = False
        self._warned = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def emit(self, event: Event) -> None:
        event = self._stamped_now(event)
        with self._changed:
            if self._closed:
                return
            if len(self._pending) >= MAX_PENDING:
                self._overflow += 1
                return
            self._note_overflow()
            self._pending.append(event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="events", daemon=True)
                self._thread.start()
            self._changed.notify()

    @property
    def path(self) -> str:
        return "" if self._warned else str(self._file.path)

    def close(self, timeout: float | None = None) -> bool:
        """Write what waits, and close the file. Returns whether that was done in `timeout` seconds, those of this
        writer if None."""
        with self._changed:
            self._closed = True
            self._note_overflow()
            self._changed.notify()
            thread = self._thread
        if thread is None:
            return True
        thread.join(self._close_timeout if timeout is None else timeout)
        return not thread.is_alive()

    def _stamped_now(self, event: Event) -> Event:
        return stamped(event, self._now(), self._mono())

    def _note_overflow(self) -> None:
        """Put a gap where events were dropped: after those that wait, and before the next one."""
        if self._overflow:
            self._pending.append(self._stamped_now(LogGap(dropped=self._overflow)))
            self._overflow = 0

    def _run(self) -> None:
        while (event := self._next()) is not None:
            self._append(event)
            self._unsynced = self._unsynced or event.severity == ERROR
            # A failure goes to the disk itself, after all that waits: a slow disk then delays no line.
            if self._unsynced and not self._pending:
                self._unsynced = False
                with contextlib.suppress(OSError):
                    self._file.sync()
        with contextlib.suppress(OSError):
            self._file.close()

    def _next(self) -> Event | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closed)
            return self._pending.popleft() if self._pending else None

    def _append(self, event: Event) -> None:
        try:
            if self._unwritten:
                self._file.append(stamped(LogGap(dropped=self._unwritten), event.time, event.mono))
                self._unwritten = 0
            self._file.append(event)
        except OSError as error:
            self._unwritten += event.dropped if isinstance(event, LogGap) else 1
            if not self._warned:
                self._warned = True
                self._warn(
                    f"warning: the event log {self._file.path} cannot be written ({error.strerror}); "
                    "the job continues without it"
                )
