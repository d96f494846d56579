"""The answer of this node to a question for the output of its workers. Imported with the first one.

What goes to a file is read from it. Of what goes to the console the relay keeps the end in a ring, also of a worker
that has ended, until the one that takes its place has ended too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dlrover_run.background import wait_for_event
from dlrover_run.coordination.records.bounds import MAX_TOTAL
from dlrover_run.job_status.questions import (
    MAX_NODE_BYTES,
    LogCursor,
    LogPiece,
    LogRequest,
)
from dlrover_run.output import ring
from dlrover_run.output.destinations import Inherited, LogFile, RankStreams, Relayed
from dlrover_run.output.run_directory import earlier_log

LOOK_INTERVAL = 0.1
"""Seconds between two looks for new output while a reader waits. A memory file gives no notice of it."""

LAST_QUESTION = 2.0
"""Seconds for which the end of this agent waits for the last question of a reader that follows."""

FOLLOWED = 5.0
"""Seconds after a question that could wait, for which its reader counts as one that follows."""


class WorkerOutput(NamedTuple):
    """Where a stream of a worker can be read: in a file, or at the relay under a key. `worker` is a rank or a task."""

    worker: int | str
    stream: str
    path: str = ""
    key: str = ""


class _Written(NamedTuple):
    """What a stream was written to: a file, or a ring of the relay."""

    fd: int
    is_ring: bool

    @property
    def source(self) -> int:
        """A number that tells it from others."""
        return os.fstat(self.fd).st_ino % MAX_TOTAL

    @property
    def size(self) -> int:
        """Bytes that were written, kept or not."""
        return ring.written(self.fd) if self.is_ring else os.fstat(self.fd).st_size

    def read(self, start: int, count: int) -> tuple[int, bytes]:
        """The number of the first byte from `start` on that is kept, and at most that number of bytes from it on."""
        if self.is_ring:
            return ring.read(self.fd, start, count)
        return start, os.pread(self.fd, count, start)


class WorkerLogs:
    """Answers questions. `outputs` returns the streams of this node's workers, and `rings` the descriptors of what the
    relay keeps under a key, the latest last."""

    def __init__(self, outputs: Callable[[], Sequence[WorkerOutput]], rings: Callable[[str], Sequence[int]]) -> None:
        self._outputs = outputs
        self._rings = rings
        self._known: list[WorkerOutput] = []
        self._earlier: dict[tuple[int | str, str], str] = {}
        self._followed_at = float("-inf")
        self._over = False
        self._told_last = asyncio.Event()

    async def read(self, request: LogRequest) -> tuple[LogPiece, ...]:
        """The pieces that a question asks for."""
        if request.wait:
            self._followed_at = time.monotonic()
        deadline = time.monotonic() + request.wait
        while not (found := self._look(request)) and not self._over and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_INTERVAL)
        if request.wait:
            self._followed_at = time.monotonic()
        if self._over:
            self._told_last.set()
        return found

    async def end(self) -> None:
        """Nothing more is written. Answer those that wait; a reader that follows may ask once more."""
        self._over = True
        if time.monotonic() - self._followed_at < FOLLOWED:
            await wait_for_event(self._told_last, LAST_QUESTION)

    def _look(self, request: LogRequest) -> tuple[LogPiece, ...]:
        if outputs := list(self._outputs()):
            now = {(one.worker, one.stream): one.path for one in outputs}
            for before in self._known:
                place = before.worker, before.stream
                if now.get(place) != before.path:
                    self._earlier[place] = before.path
            self._known = outputs
        wanted = [one for one in self._known if request.worker in ("", str(one.worker))]
        after = {(cursor.worker, cursor.stream): cursor for cursor in request.after}
        room = MAX_NODE_BYTES // max(1, len(wanted))
        pieces = []
        for one in wanted:
            cursor = after.get((one.worker, one.stream))
            with contextlib.suppress(OSError), self._files(one) as files:
                # The last one is that of the worker that runs now.
                chosen = files[:-1] if request.previous else files
                if (piece := self._piece(one, chosen, cursor, request, room)) is not None:
                    pieces.append(piece)
        return tuple(pieces)

    @contextlib.contextmanager
    def _files(self, output: WorkerOutput) -> Iterator[list[_Written]]:
        """The files of a stream, the latest last: the one before it is that of a worker that has ended."""
        with contextlib.ExitStack() as opened:
            if not output.path:
                yield [_Written(fd, is_ring=True) for fd in self._rings(output.key)]
                return
            earlier = self._earlier.get((output.worker, output.stream)) or earlier_log(output.path)
            found = []
            for path in dict.fromkeys([*([earlier] if earlier else []), output.path]):
                with contextlib.suppress(OSError):
                    found.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
                    opened.callback(os.close, found[-1])
            yield [_Written(fd, is_ring=False) for fd in found if stat.S_ISREG(os.fstat(fd).st_mode)]

    def _piece(
        self, output: WorkerOutput, files: Sequence[_Written], cursor: LogCursor | None, request: LogRequest, room: int
    ) -> LogPiece | None:
        """What there is to read of a stream; None for nothing."""
        if not files:
            return None
        by_source = {file.source: file for file in files}
        file, start = files[-1], 0
        known = by_source.get(cursor.source) if cursor is not None else None
        if cursor is not None and known is not None and (known is files[-1] or cursor.offset < known.size):
            file, start = known, cursor.offset
        size = file.size
        if start > size:
            # It was truncated.
            start = 0
        is_tail = cursor is None and not request.after
        wanted = max(start, size - room) if is_tail else start
        first, data = file.read(wanted, min(room, size - wanted))
        # What is followed is shown in whole lines, unless its writer has ended.
        whole = not request.wait or self._over or file is not files[-1]
        kept = data if whole or len(data) == room else data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
        end = first + len(kept)
        is_cut = first > start
        if is_cut:
            kept = kept[kept.find(b"\n") + 1 :]
        if is_tail and request.lines:
            lines = kept.splitlines(keepends=True)
            is_cut = is_cut or len(lines) > request.lines
            kept = b"".join(lines[-request.lines :])
        if not kept and cursor is not None and (cursor.source, cursor.offset) == (file.source, end):
            return None
        return LogPiece(LogCursor(output.worker, output.stream, file.source, end), kept, is_cut)


def outputs_of(worker: int | str, planned: RankStreams, key: str) -> list[WorkerOutput]:
    """The outputs of one process that can be read again: its files, and what the relay knows by `key`."""
    found = []
    for name, destination, own, fd in (("err", planned.stderr, key, 2), ("out", planned.stdout, f"{key} stdout", 1)):
        match destination:
            case LogFile(path=path):
                found.append(WorkerOutput(worker, name, path=path))
            case Relayed():
                found.append(WorkerOutput(worker, name, key=own))
            case Inherited():
                # Only a file of the user's can be read again.
                found.append(WorkerOutput(worker, name, path=f"/proc/self/fd/{fd}"))
    return found
