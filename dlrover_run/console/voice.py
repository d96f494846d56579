"""The launcher's own voice on the console: whole lines, and one that changes while the node waits.

Below the line that changes there may be a table, on a terminal. The cursor stays at the end of the line, above the
table: should something come to the terminal that does not pass here, as the last words of a worker do, it is written
over the table, and the two are drawn below it the next time. Were the cursor at the end of the table, whoever draws it
anew would have to begin as many lines above, and take those words away.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable

from dlrover_run.console.mark import mark_of, marked
from dlrover_run.console.paint import BOLD, RED, painted, wants_color
from dlrover_run.console.rounds import render_waiting
from dlrover_run.console.words import clip, harmless, time_of_day

TICK = 1.0
"""Seconds between two sights of a line that changes on a terminal, and before its first: who waits for less long need
not read that he does."""

REPEAT_AFTER = 10.0
"""The least seconds between two lines of waiting where each stays, as in a file; a later text replaces an earlier one
that has not been written yet."""

PLAIN_WIDTH = 80
"""Columns of what goes to a file, or to a terminal whose size nobody knows."""

PLAIN_LINES = 24
"""Lines of a terminal whose size nobody knows."""

Below = Callable[[int, int], list[str]]
"""Draws a table: given the most columns that a line of it may have, and the most lines."""

_ERASE = "\r\x1b[K"
_ERASE_BELOW = "\r\x1b[J"


class Voice:
    """Writes with `write`, which must not block. `columns` answers the width of the terminal, None where there is none,
    and `lines` its height; they are asked again for each sight of the changing line.

    `name` is what this node is called on a console that it shares with others, empty where it has one to itself. The
    name stands before each line then, and nothing is drawn that changes: what is erased would be somebody else's.
    `program` is the launcher's own name, which begins its lines, after the time of day by `clock` (Unix time) if that
    is given. The line that changes has no time: it is gone when somebody asks when something was. `color` says whether
    to write in colour.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        columns: Callable[[], int | None],
        lines: Callable[[], int] = lambda: PLAIN_LINES,
        name: str = "",
        program: str = "dlrover-run",
        clock: Callable[[], float] | None = None,
        color: bool = False,
    ) -> None:
        self._write = write
        self._columns = columns if not name else lambda: None
        self._lines = lines
        self._name = name
        self._program = program
        self._clock = clock
        self.color = color
        self._text = ""
        self._below: Below | None = None
        self._until: float | None = None
        self._written_text = ""
        self._written_at = -math.inf
        self._drawn = False
        self._drawn_below = False
        self._next: asyncio.TimerHandle | None = None

    @property
    def columns(self) -> int | None:
        """The width of the terminal, None where there is none or it is shared."""
        return self._columns()

    @property
    def width(self) -> int:
        """How many columns there are for a line that is printed."""
        return (self._columns() or PLAIN_WIDTH) - len(mark_of(self._name))

    def say(self, line: str) -> None:
        """Print one line under the launcher's name; it is made harmless."""
        self._say(line, BOLD)

    def alarm(self, line: str, *, timed: bool = True) -> None:
        """The same for what a person looks for first among all the lines: why something ended. A mistake on the command
        line has no time, wherever it is found."""
        self._say(line, RED, timed)

    def _say(self, line: str, paint: str, timed: bool = True) -> None:
        text = f"{self._program}: {harmless(line)}"
        self.print(painted(text, paint if self.color else ""), timed=timed)

    def break_line(self) -> None:
        """End the line of a terminal on which it shows a key, such as ^C; elsewhere do nothing."""
        if self._columns() is not None and not self._drawn:
            self._write("\n")

    def print(self, text: str, *, timed: bool = False) -> None:
        """Print lines as they are, after the node's name if it has one, and let the changing line follow them. `timed`
        puts the time of day before the first."""
        was_drawn = self._drawn
        self._erase()
        when = f"{time_of_day(self._clock())} " if timed and self._clock is not None else ""
        self._write(marked(when + text, self._name) + "\n")
        if was_drawn:
            self._draw(self._columns())

    def wait_for(self, text: str, seconds: float | None, below: Below | None = None) -> None:
        """Show that the node waits for `text`, for at most that many seconds from now; None is without a limit. On a
        terminal the table that `below` draws stands under it, as far as there is room."""
        loop = asyncio.get_running_loop()
        self._below = below
        self._text, self._until = " ".join(harmless(text).split()), None if seconds is None else loop.time() + seconds
        if self._next is None:
            self._next = loop.call_later(TICK, self._show)

    def wait_no_more(self) -> None:
        """The node waits no more; a line on a terminal goes."""
        self._erase()
        self._written_text = ""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _show(self) -> None:
        self._next = None
        loop = asyncio.get_running_loop()
        columns = self._columns()
        if columns is not None:
            self._draw(columns)
            if self._left():
                self._next = loop.call_later(TICK, self._show)
        elif self._text != self._written_text:
            pause = self._written_at + REPEAT_AFTER - loop.time()
            if pause > 0:
                self._next = loop.call_later(pause, self._show)
            else:
                self._written_text, self._written_at = self._text, loop.time()
                self.say(render_waiting(self._text, self._left()))

    def _draw(self, columns: int | None) -> None:
        if columns is not None:
            # A line that fills the last column would be broken, and only its second half be erased.
            line = clip(f"{self._program}: {render_waiting(self._text, self._left())}", columns - 1)
            # One line above is left for what was said before.
            below = self._below(columns - 1, self._lines() - 2) if self._below is not None else []
            erase = _ERASE_BELOW if below or self._drawn_below else _ERASE
            self._write(f"{erase}{_under(below)}{line}")
            self._drawn, self._drawn_below = True, bool(below)

    def _left(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - asyncio.get_running_loop().time())

    def _erase(self) -> None:
        if self._drawn:
            self._write(_ERASE_BELOW if self._drawn_below else _ERASE)
            self._drawn = self._drawn_below = False


def _under(lines: list[str]) -> str:
    """Lines below the one in which the cursor is, which returns to the beginning of that one."""
    if not lines:
        return ""
    return "".join(f"\r\n{line}" for line in lines) + f"\r\x1b[{len(lines)}A"


def console_voice(write: Callable[[str], None], name: str = "", program: str = "dlrover-run") -> Voice:
    """The voice of a launcher whose standard error is the console, in the words of `Voice`."""
    term = os.environ.get("TERM")
    color = wants_color(os.isatty(2), os.environ)
    return Voice(write, lambda: terminal_columns(2, term), lambda: terminal_lines(2), name, program, time.time, color)


def terminal_columns(fd: int, term: str | None) -> int | None:
    """The width of the terminal behind a descriptor; None for anything else, and for one that cannot erase a line."""
    if term in (None, "", "dumb") or not os.isatty(fd):
        return None
    # A terminal that does not know its size says 0.
    return os.get_terminal_size(fd).columns or PLAIN_WIDTH


def terminal_lines(fd: int) -> int:
    """The height of the terminal behind a descriptor, or a usual one where nobody knows it."""
    try:
        return os.get_terminal_size(fd).lines or PLAIN_LINES
    except OSError:
        return PLAIN_LINES
