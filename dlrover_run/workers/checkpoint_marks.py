"""The checkpoints that the workers of a node mark, and the planned change for which they wait: two pipes of the agent.

The workers open both by their paths and inherit no descriptor. A worker that marks a checkpoint while a change is
announced waits for its end, so no step is made after a checkpoint that begins another round.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable

from dlrover_run.coordination.records.round import PlannedChange
from dlrover_run.events.records import CheckpointSeen, Events

MARK_VARIABLE = "DLROVER_CHECKPOINT_MARK"
"""The variable of a worker that names the file to which a line is written after a checkpoint: its step, or anything
(`dlrover_run.training.reports` does it)."""

CHANGE_VARIABLE = "DLROVER_PLANNED_CHANGE"
"""The variable of a worker that names a pipe which is empty while a planned change is announced."""

MARK_BYTES = 1 << 16
"""What the kernel keeps in a pipe."""

_STEP = re.compile(rb"\d{1,15}\n")


class CheckpointMarks:
    """Receives the marks of the workers of one node."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._go_on, self._announcing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._announced = True
        self._listener: Callable[[int | None], None] = lambda step: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.any = False
        """Whether a worker has marked a checkpoint."""
        self.announce(False)

    def environment(self) -> dict[str, str]:
        """What tells a worker where the pipes are."""
        own = f"/proc/{os.getpid()}/fd"
        return {MARK_VARIABLE: f"{own}/{self._writing}", CHANGE_VARIABLE: f"{own}/{self._go_on}"}

    def listen(self, listener: Callable[[int | None], None]) -> None:
        """Have `listener` called at once with the step of the latest checkpoint, None if the worker has not written it.
        Several that come together are one call."""
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reading, self.read)

    def read(self) -> None:
        """Note the checkpoints that workers have marked since the last call."""
        with contextlib.suppress(BlockingIOError):
            *_, last = os.read(self._reading, MARK_BYTES).splitlines(keepends=True)
            self.any = True
            self._listener(int(last) if _STEP.fullmatch(last) else None)

    def announce(self, change: bool) -> None:
        """Let workers wait after their next checkpoint, or go on. Idempotent."""
        if change != self._announced:
            self._announced = change
            with contextlib.suppress(BlockingIOError):
                os.read(self._go_on, 1) if change else os.write(self._announcing, b"\n")

    def close(self) -> None:
        """Close the pipes; workers that wait go on."""
        if self._loop is not None:
            self._loop.remove_reader(self._reading)
        for fd in (self._reading, self._writing, self._go_on, self._announcing):
            os.close(fd)


class RoundCheckpoints:
    """What the workers of one round, which has that number, have marked. `on_news` is called when a decision of the
    coordinator depends on it; each other mark is an event alone."""

    def __init__(self, marks: CheckpointMarks, number: int, events: Events, on_news: Callable[[], None]) -> None:
        self._marks = marks
        self._round = number
        self._events = events
        self._on_news = on_news
        self._change: PlannedChange | None = None
        self._last_step: int | None = None
        self._closed = False
        self.saves = False
        """Whether a worker has marked a checkpoint."""
        self.saved_for: PlannedChange | None = None
        """The planned change after whose announcement a worker has marked a checkpoint."""

    def listen(self) -> None:
        """Take the marks from now on: the workers start."""
        self._marks.listen(self._note)

    def read(self) -> None:
        """Take what has been marked already, as before the end of a worker is handled."""
        self._marks.read()

    def follow(self, change: PlannedChange | None) -> None:
        """Note which planned change waits for a checkpoint. Idempotent."""
        if change != self._change and not self._closed:
            # Those that have been marked already are before the announcement.
            self._marks.read()
            self._change = change
            self._marks.announce(change is not None)

    def close(self) -> None:
        """Announce nothing more: the marks are closed next, or belong to another round."""
        self._closed = True

    def _note(self, step: int | None) -> None:
        if step is None or step != self._last_step:
            self._events.emit(CheckpointSeen(round=self._round, step=step))
        self._last_step = step
        is_news = not self.saves or self._change not in (None, self.saved_for)
        self.saves = True
        if self._change is not None:
            self.saved_for = self._change
        if is_news:
            self._on_news()
