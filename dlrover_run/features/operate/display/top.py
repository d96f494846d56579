"""`top`: the status of a job on the screen, once a second, which scrolls, and ends with the job's result."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dlrover_run.background import beside
from dlrover_run.features.operate.display.text import Line, StatusLines
from dlrover_run.words.text import counted

INTERVAL = 1.0
"""Seconds between two looks at a job."""

KEYS = {
    b"\x1b[A": -1, b"k": -1, b"\x1b[B": 1, b"j": 1,
    b"\x1b[5~": -20, b"b": -20, b"\x1b[6~": 20, b" ": 20,
    b"\x1b[H": -100_000, b"g": -100_000, b"\x1b[F": 100_000, b"G": 100_000,
}  # fmt: skip
"""The rows by which each key scrolls."""

QUIT = (b"q", b"Q", b"\x03")

_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)


class Window(NamedTuple):
    """What fits on the screen, and the first row that is shown of those that scroll."""

    lines: list[Line]
    first: int


def window(status: StatusLines, height: int, first: int) -> Window:
    """The lines of a status on a screen of that height; what does not fit scrolls from the row `first` on: the nodes,
    and what follows them."""
    fixed, rows = [*status.top, *status.head], [*status.nodes, *status.end]
    room = max(1, height - len(fixed) - 1)
    if len(rows) <= room:
        return Window([*status.all, Line("q: quit")], 0)
    first = max(0, min(first, len(rows) - room))
    below = len(rows) - first - room
    nodes = len(status.nodes) - first - room
    more = counted(nodes, "more node") if nodes > 0 else counted(below, "more line")
    parts = [f"… {more}" if below else "", f"{first} above" if first else ""]
    hint = "   ".join([*filter(None, [", ".join(filter(None, parts))]), "arrows: scroll   q: quit"])
    return Window([*fixed, *rows[first : first + room], Line(hint)], first)


class Screen:
    """Draws a status, and follows the keys. `ended` is set once the user quits."""

    def __init__(self, live: Live) -> None:
        self.ended = asyncio.Event()
        self._live = live
        self._first = 0
        self._status: StatusLines | None = None

    def show(self, status: StatusLines) -> None:
        self._status = status
        size = self._live.console.size
        shown, self._first = window(status, size.height, self._first)
        text = Text(no_wrap=True, overflow="ellipsis")
        for place, line in enumerate(shown):
            text.append("\n" * bool(place) + line.text, "bold red" if line.bad else "")
        self._live.update(text, refresh=True)

    def press(self, keys: bytes) -> None:
        pressed = _KEY.findall(keys)
        if any(key in QUIT for key in pressed):
            self.ended.set()
        elif self._status is not None:
            # Some terminals send O in place of the bracket.
            self._first += sum(KEYS.get(key.replace(b"\x1bO", b"\x1b["), 0) for key in pressed)
            self.show(self._status)


async def watch(look: Callable[[], Coroutine[Any, Any, StatusLines | None]]) -> StatusLines | None:
    """Show what `look` returns, each second, until it returns None: the job has ended; then the last that was shown.
    None if the user quits first."""
    last: StatusLines | None = None
    with Live(console=Console(), screen=True, auto_refresh=False) as live, _keys() as keyboard:
        screen = Screen(live)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, screen.ended.set)
        if keyboard is not None:
            loop.add_reader(keyboard, lambda: screen.press(os.read(keyboard, 64)))
        try:
            async with beside(screen.ended.wait()) as quitting:
                while not quitting.done():
                    async with beside(look()) as looking:
                        both: set[asyncio.Future[Any]] = {looking, quitting}
                        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                        if not looking.done():
                            break
                        now = looking.result()
                    if now is None:
                        return last
                    last = now
                    screen.show(now)
                    await asyncio.wait({quitting}, timeout=INTERVAL)
        finally:
            if keyboard is not None:
                loop.remove_reader(keyboard)
    return None


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """The keyboard, which gives each key at once and does not show it; None without one."""
    if not sys.stdin.isatty():
        yield None
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
