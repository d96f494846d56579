"""Finds the steps of a worker in its output, by a regular expression of the user (`--progress-regex`).

It runs in the relay, on which the console waits, so its cost is bounded whatever the expression is and however much a
worker prints: only the beginning of a line is searched, only the end of a large block, and only while a share of a
processor is not used up. A search that takes too long is interrupted: Python's engine lets a signal handler do that.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from dlrover_run.observe.page import Area, StepSource, Writer, open_writer
from dlrover_run.output.relay.lines import LineCutter

LINE_BYTES = 2048
"""Bytes of a line that are searched. Some expressions take the square of it."""

BLOCK_BYTES = 64 * 1024
"""Bytes at the end of a block that are searched: some hundred lines, of blocks that are read every few milliseconds."""

SEARCH_SECONDS = 0.02
"""Seconds of processor time after which the search of a block is given up."""

SHARE = 0.05
"""The share of a processor that all searches may use."""

MAX_CREDIT = 0.1
"""Seconds of processor time that searches may use at once after a quiet time."""


class Budget:
    """Processor time for searches: it grows with the time, up to a limit. `now` and `used` are clocks, in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic, used: Callable[[], float] = time.process_time):
        self._now = now
        self._used = used
        self._credit = MAX_CREDIT
        self._at = now()

    def has_credit(self) -> bool:
        """Whether another search may begin."""
        now = self._now()
        self._credit = min(MAX_CREDIT, self._credit + SHARE * (now - self._at))
        self._at = now
        return self._credit > 0

    @contextlib.contextmanager
    def charged(self) -> Iterator[None]:
        """Charge what is used meanwhile."""
        before = self._used()
        try:
            yield
        finally:
            self._credit -= self._used() - before


class _TooLong(Exception):
    pass


_armed = False


def _on_alarm(number: int, frame: FrameType | None) -> None:
    if _armed:
        raise _TooLong


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise _TooLong after this processor time. Only in the main thread, for a process that uses no SIGVTALRM."""
    global _armed
    signal.signal(signal.SIGVTALRM, _on_alarm)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    _armed = True
    try:
        yield
    finally:
        # First, since the signal may arrive until the next statement has ended.
        _armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


class LogStepCounter:
    """Counts the steps that the outputs of one worker name, in the worker's page.

    The worker may start at any step, and may begin to count anew with each epoch. So the first number counts as one
    step, a larger one as the difference, and a smaller one as one step. The counter of a relay that replaces a killed
    one starts from the worker's page, and counts the first number as one step again.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._number: int | None = None

    def count(self, numbers: Sequence[int | None]) -> None:
        """Count matches in their order: each is a number, or a step without one."""
        steps = 0
        for number in numbers:
            if number is None or self._number is None or number < self._number:
                steps += 1
            else:
                steps += number - self._number
            self._number = self._number if number is None else number
        if steps:
            self._writer.add(StepSource.LOG, steps, 0, 0.0)

    def close(self) -> None:
        """Unmap the page."""
        self._writer.close()


class LogSteps:
    """Searches one output of a worker. `warn` is called once, with a sentence, if a search took too long."""

    def __init__(self, regex: str, counter: LogStepCounter, budget: Budget, warn: Callable[[str], None]) -> None:
        self._counter = counter
        self._pattern = re.compile(regex.encode())
        self._budget = budget
        self._warn = warn
        self._cutter = LineCutter(BLOCK_BYTES)

    def feed(self, data: bytes) -> None:
        """Search the lines that are complete with these bytes, or skip them if there is no budget."""
        lines = self._cutter.feed(_end_of(data))
        if lines and self._budget.has_credit():
            with self._budget.charged():
                self._counter.count(self._search(lines))

    def _search(self, lines: bytes) -> list[int | None]:
        found: list[int | None] = []
        try:
            with _interrupted_after(SEARCH_SECONDS):
                for line in lines.splitlines():
                    if match := self._pattern.search(line[:LINE_BYTES]):
                        found.append(_number(match))  # noqa: PERF401 (these count if the next line is interrupted)
        except _TooLong:
            warn, self._warn = self._warn, _ignore
            warn(
                f"--progress-regex {self._pattern.pattern.decode()!r} takes more than {SEARCH_SECONDS:g} s to search "
                "some lines: these are skipped; use a simpler expression"
            )
        return found


class LogStepSearches:
    """The searches of a relay, by the number of their output: all have one budget, and the outputs of a worker share a
    counter."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._budget = Budget()
        self._counters: dict[tuple[int, int], LogStepCounter] = {}
        self._used: dict[int, tuple[int, int]] = {}

    def open(self, output: int, regex: str, page: str) -> Callable[[bytes], None] | None:
        """What to call with the bytes of an output of the worker with the page at that path; None if the page cannot be
        opened."""
        try:
            # This tells two pages apart, also where the second has got the path of the first.
            found = os.stat(page)
        except OSError:
            return None
        key = found.st_dev, found.st_ino
        counter = self._counters.get(key)
        if counter is None:
            writer = open_writer(page, Area.LOG)
            if writer is None:
                return None
            counter = self._counters[key] = LogStepCounter(writer)
        self._used[output] = key
        return LogSteps(regex, counter, self._budget, self._warn).feed

    def close(self, output: int) -> None:
        """The output has ended. The page is closed with the last output of its worker."""
        key = self._used.pop(output, None)
        if key is not None and key not in self._used.values():
            self._counters.pop(key).close()


def _end_of(data: bytes) -> bytes:
    """The end of a block, beginning with a whole line."""
    if len(data) <= BLOCK_BYTES:
        return data
    # Of a line that was begun before, the rest is a line of its own.
    return b"\n" + data[-BLOCK_BYTES:].partition(b"\n")[2]


def _number(match: re.Match[bytes]) -> int | None:
    """The number in the first group; None without a group, or if the group holds no number."""
    try:
        text = match[1]
    except IndexError:
        return None
    return int(text) if text is not None and text.isdigit() and len(text) < 19 else None


def _ignore(sentence: str) -> None:
    pass
