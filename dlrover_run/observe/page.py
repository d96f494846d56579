"""The progress page: a memory file of the agent, in which a worker counts its steps.

The agent creates a page for each worker of a round and names it in the worker's environment. The worker maps it, and a
step costs it a microsecond and no system call. The agent reads the page whenever something asks for it. A worker whose
steps are shorter than STORE_INTERVAL counts each of them and stores the counts only as often.

A page has an area for each process that may write: the worker itself, and the relay, which finds steps in the log. An
area has two slots, and its writer fills them in turn. So the last complete record can be read at any moment, also while
the writer is stopped in the middle of a write, and neither side waits for the other. Each record has a checksum: a
reader that meets a slot while it is written rejects it, whatever the order in which a processor shows the bytes.

This module is loaded in workers, also in an interpreter without this package: it needs the standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import fcntl
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

VARIABLE = "DLROVER_PROGRESS"
"""The variable of a worker that holds the path of its page."""

PAGE_BYTES = 4096

SLOT_BYTES = 128

AREA_BYTES = 2 * SLOT_BYTES

STOP_OFFSET = 2 * AREA_BYTES
"""Where the byte of `Stop` is, behind the areas."""

MAX_COUNT = 2**63 - 1
"""The largest count of steps or samples; a larger one stays there."""

MAX_FIRST_STEPS = 2**32 - 1

STORE_INTERVAL = 20_000_000
"""Nanoseconds between two records of a worker: the counts of a step that follows sooner are stored with a later one, or
at the end of the process. To store takes longer than to count, and nothing reads a page fifty times a second."""

UNKNOWN = 2**64 - 1
"""Stands in a record for an amount of work that is left and is not known."""

LAYOUT = 4
"""The version of a record; a reader rejects any other."""

_RECORD = struct.Struct("<QQQdqqqQIBBBx")
"""Number of the record, steps, samples, waited, at, first, ended, left, first steps, layout, source, phase; then
follows the checksum."""

_CHECKSUM = struct.Struct("<I")

_CHECKED_BYTES = _RECORD.size + _CHECKSUM.size


class Area(enum.IntEnum):
    """Where a process writes: the offset of its area."""

    WORKER = 0
    LOG = AREA_BYTES


class StepSource(enum.IntEnum):
    """Where the counts come from. A source replaces the counts of a source before it in this list, and from then on
    that one is ignored: the same step must not be counted twice."""

    LOG = 1
    """`--progress-regex`."""
    OPTIMIZER = 2
    """`--progress=optimizer`."""
    SAMPLER = 3
    """`ElasticDistributedSampler.advance`."""
    REPORT = 4
    """`dlrover_run.training.report`."""
    TASK = 5
    """The session of a TensorFlow task; it is in no page."""


class Stop(enum.IntEnum):
    """What a stop finds the worker in, as the block that saves its last step notes it: one byte at STOP_OFFSET."""

    NO_BLOCK = 0
    ANSWERS = 1
    """It answers as soon as Python runs, at the latest when a collective has failed: it saves its step, and ends."""
    WAITS_FOR_DEVICE = 2
    """If it has lost a peer, its device waits for a collective that never ends, and nothing is saved."""


class Phase(enum.IntEnum):
    """What the worker does between two steps."""

    TRAINING = 0
    SAVING = 1
    """It writes a checkpoint."""


class Progress(NamedTuple):
    """What one worker has done since its start.

    `steps` and `samples` are counts, `waited` is the seconds that it waited for data, and `at` is the time of the last
    step, in nanoseconds of `time.monotonic_ns` on this machine. `first` is the time at which this source first counted
    steps, and `first_steps` how many it counted then: one, unless it counts several at a time. Both are 0 without steps
    and for a source that does not note them. `left` is how much the job has still to train, in samples of all workers
    if the source counts samples, else in steps; None if that is not known. `ended` is when the script was over and its
    interpreter began to end, which may take seconds; 0 before that, and for a worker that was killed.
    """

    steps: int
    samples: int
    waited: float
    at: int
    source: StepSource
    phase: Phase
    first: int = 0
    first_steps: int = 0
    left: int | None = None
    ended: int = 0


class _Numbered(NamedTuple):
    number: int
    progress: Progress


def encode(number: int, progress: Progress) -> bytes:
    """One record, with its checksum."""
    steps, samples, waited, at, source, phase, first, first_steps, left, ended = progress
    counts = (steps, samples, waited, at, first, ended, UNKNOWN if left is None else left, first_steps)
    record = _RECORD.pack(number, *counts, LAYOUT, source, phase)
    return record + _CHECKSUM.pack(zlib.crc32(record))


def decode(data: bytes) -> Progress | None:
    """The last record of an area, from a copy of its bytes; None if it has none that is complete."""
    newest = _newest(data)
    return None if newest is None else newest.progress


def is_blank(data: bytes) -> bool:
    """Whether nothing was written to an area."""
    return not any(data)


def _newest(data: bytes) -> _Numbered | None:
    return max(filter(None, (_decode_slot(data, start) for start in (0, SLOT_BYTES))), default=None)


def _decode_slot(data: bytes, start: int) -> _Numbered | None:
    record = data[start : start + _RECORD.size]
    checksum = data[start + _RECORD.size : start + _CHECKED_BYTES]
    if len(checksum) < _CHECKSUM.size or _CHECKSUM.pack(zlib.crc32(record)) != checksum:
        return None
    number, steps, samples, waited, at, first, ended, left, first_steps, layout, source, phase = _RECORD.unpack(record)
    if layout != LAYOUT:
        return None
    try:
        source, phase = StepSource(source), Phase(phase)
        known = None if left == UNKNOWN else left
        return _Numbered(number, Progress(steps, samples, waited, at, source, phase, first, first_steps, known, ended))
    except ValueError:
        return None


class Writer:
    """The only writer of an area. It continues from the record that it finds there, and stores at most one record in
    `interval` nanoseconds of the clock `now`, besides those of a new source or phase."""

    def __init__(
        self,
        memory: mmap.mmap,
        area: Area,
        lock_fd: int = -1,
        interval: int = 0,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._memory = memory
        self._lock_fd = lock_fd
        self._area = area
        self._interval = interval
        self._now = now
        self._due = 0
        self._pending = False
        found = _newest(memory[area : area + AREA_BYTES])
        self._number = found.number if found is not None else 0
        last = found.progress if found is not None else (0, 0, 0.0, 0, 0, 0, 0, 0, None, 0)
        self._steps, self._samples, self._waited, self._at, self._source, _, self._first, self._first_steps = last[:8]
        self._left = UNKNOWN if last[8] is None else last[8]
        self._phase = int(Phase.TRAINING)
        self._ended = 0
        # Reentrant: a signal handler of the script may report a step in the middle of another report.
        self._lock = threading.RLock()

    def add(self, source: int, steps: int, samples: int, waited: float, left: int | None = None) -> None:
        """Count steps and samples, and seconds waited for data; `left` is what is left after them, if that is known."""
        with self._lock:
            if source != self._source and not self._takes(source):
                return
            self._steps += steps
            self._samples += samples
            self._waited += waited
            self._left = UNKNOWN if left is None else left
            self._at = now = self._now()
            if not self._first_steps:
                self._first, self._first_steps = (now, min(steps, MAX_FIRST_STEPS)) if steps else (0, 0)
            if now < self._due:
                self._pending = True
                return
            self._due = now + self._interval
            self._store()

    def enter(self, phase: int) -> None:
        """Note what the worker does from now on. Nothing is noted before the first step."""
        with self._lock:
            self._phase = phase
            if self._source:
                self._store()

    def note_stop(self, stop: Stop) -> None:
        """Note what a stop will find this worker in."""
        self._memory[STOP_OFFSET] = stop

    def flush(self) -> None:
        """Store what was counted."""
        with self._lock:
            if self._pending:
                self._store()

    def end(self) -> None:
        """Note that the script is over, and store what was counted."""
        with self._lock:
            self._ended = self._now()
            if self._source:
                self._store()

    def close(self) -> None:
        """Store what was counted, unmap the page, and let another process write."""
        self.flush()
        self._memory.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)

    def _takes(self, source: int) -> bool:
        """Whether this source counts from now on; one that does not count yet begins at 0."""
        if source < self._source:
            return False
        self._source, self._due = source, 0
        self._steps, self._samples, self._waited, self._first, self._first_steps = 0, 0, 0.0, 0, 0
        return True

    def _store(self) -> None:
        self._pending = False
        self._number = number = self._number + 1
        self._steps, self._samples = min(self._steps, MAX_COUNT), min(self._samples, MAX_COUNT)
        times = (self._waited, self._at, self._first, self._ended)
        counts = (self._steps, self._samples, *times, self._left, self._first_steps)
        record = _RECORD.pack(number, *counts, LAYOUT, self._source, self._phase)
        start = self._area + (number & 1) * SLOT_BYTES
        self._memory[start : start + _CHECKED_BYTES] = record + _CHECKSUM.pack(zlib.crc32(record))


def open_writer(path: str, area: Area) -> Writer | None:
    """The writer of an area of a page; None if the page cannot be opened, or another process writes this area."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # A lock of the kernel's: a child of the worker that inherits the variable does not write too. It is held for
        # the life of this process, or until the process executes another program, which may then take it.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, AREA_BYTES, area)
        # The relay does not wait for a page, and its last line may be the last for a long time.
        return Writer(mmap.mmap(fd, PAGE_BYTES), area, fd, STORE_INTERVAL if area is Area.WORKER else 0)
    except (OSError, ValueError):
        os.close(fd)
        return None


_own: Writer | None = None
_tried = False


def own_writer() -> Writer | None:
    """The writer of this worker's page; None if this process has none."""
    global _own, _tried
    if not _tried:
        _tried = True
        path = os.environ.get(VARIABLE)
        _own = open_writer(path, Area.WORKER) if path else None
        if _own is not None:
            atexit.register(_end_own)
    return _own


def _end_own() -> None:
    if _own is not None:
        _own.end()


def add(source: int, steps: int = 1, samples: int = 0, waited: float = 0.0, left: int | None = None) -> None:
    """Count in this worker's page, if it has one."""
    writer = _own if _tried else own_writer()
    if writer is not None:
        writer.add(source, steps, samples, waited, left)


@contextlib.contextmanager
def during(phase: int) -> Iterator[None]:
    """Note in this worker's page, if it has one, that the worker is in another phase meanwhile."""
    writer = own_writer()
    if writer is None:
        yield
        return
    writer.enter(phase)
    try:
        yield
    finally:
        writer.enter(Phase.TRAINING)


def note_stop(stop: Stop) -> None:
    """Note in this worker's page, if it has one, what a stop will find it in."""
    writer = own_writer()
    if writer is not None:
        writer.note_stop(stop)


def _forget_in_child() -> None:
    global _own
    _own = None


# The child of a worker, such as a loader of data, has the mapping, and perhaps a lock that it cannot release.
os.register_at_fork(after_in_child=_forget_in_child)
