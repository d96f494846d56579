"""The launcher's console: whole lines, and on a terminal one line that is updated while the node waits.

A table may stand below the updated line. The cursor stays at the end of the line, above the table. If something else
writes to the terminal, such as the last output of a worker, it overwrites the table, and line and table are drawn below
it at the next update. With the cursor at the end of the table, redrawing would have to move up over the table's lines,
and would erase that output.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping

from dlrover_run.console.rounds import render_waiting
from dlrover_run.console.text import (
    BOLD,
    RED,
    colored,
    format_time_of_day,
    node_prefix,
    prefix_with_node,
    sanitize,
    truncate,
    use_color,
)

REFRESH_SECONDS = 1.0
"""Seconds between two updates of the waiting line on a terminal, and before the first: shorter waits are not shown."""

REPEAT_SECONDS = 10.0
"""Minimum seconds between two waiting lines where lines stay, as in a file. A new text replaces an unwritten one."""

DEFAULT_COLUMNS = 80
"""Columns of a file, and of a terminal of unknown size."""

DEFAULT_LINES = 24
"""Lines of a terminal of unknown size."""

DrawTable = Callable[[int, int], list[str]]
"""Draws a table, given the maximum columns of a line and the maximum number of lines."""

_ERASE = "\r\x1b[K"
_ERASE_BELOW = "\r\x1b[J"


class Console:
    """Writes with `write`, which must not block.

    `columns` returns the width of the terminal, None if there is no terminal, and `lines` its height; both are called
    again at each update. `name` is the node's name on a console that several nodes share, empty on a console of its
    own: the name then prefixes each line and no line is updated, because erasing would erase the lines of other nodes.
    `program` prefixes the launcher's own lines, after the time of day if `clock` (Unix time) is given. The updated line
    has no time: it is not kept. `color` is whether to write color.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        columns: Callable[[], int | None],
        lines: Callable[[], int] = lambda: DEFAULT_LINES,
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
        self._waiting_for = ""
        self._draw_table: DrawTable | None = None
        self._deadline: float | None = None
        self._written_text = ""
        self._written_at = -math.inf
        self._drawn = False
        self._drawn_table = False
        self._next: asyncio.TimerHandle | None = None

    @property
    def columns(self) -> int | None:
        """The width of the terminal, None if there is no terminal or it is shared."""
        return self._columns()

    @property
    def width(self) -> int:
        """The columns of a printed line."""
        return (self._columns() or DEFAULT_COLUMNS) - len(node_prefix(self._name))

    def info(self, line: str) -> None:
        """Print one line under the launcher's name, without control characters."""
        self._print_own(line, BOLD)

    def error(self, line: str, *, timed: bool = True) -> None:
        """Print one line that must stand out: why something ended. An error of the command line has no time of day,
        wherever it is found."""
        self._print_own(line, RED, timed)

    def _print_own(self, line: str, color: str, timed: bool = True) -> None:
        text = f"{self._program}: {sanitize(line)}"
        self.print(colored(text, color if self.color else ""), timed=timed)

    def break_line(self) -> None:
        """End the line on which a terminal echoes a key such as ^C; without a terminal do nothing."""
        if self._columns() is not None and not self._drawn:
            self._write("\n")

    def print(self, text: str, *, timed: bool = False) -> None:
        """Print lines unchanged, behind the node's name if it has one, above the updated line. `timed` puts the time of
        day before the first line."""
        was_drawn = self._drawn
        self._erase()
        when = f"{format_time_of_day(self._clock())} " if timed and self._clock is not None else ""
        self._write(prefix_with_node(when + text, self._name) + "\n")
        if was_drawn:
            self._draw(self._columns())

    def show_waiting(self, text: str, seconds: float | None, draw_table: DrawTable | None = None) -> None:
        """Show that the node waits for `text`, for at most `seconds` from now (None: no limit). On a terminal the table
        of `draw_table` stands below, as far as it fits."""
        loop = asyncio.get_running_loop()
        self._draw_table = draw_table
        self._waiting_for = " ".join(sanitize(text).split())
        self._deadline = None if seconds is None else loop.time() + seconds
        if self._next is None:
            self._next = loop.call_later(REFRESH_SECONDS, self._update)

    def clear_waiting(self) -> None:
        """The wait is over: erase the updated line."""
        self._erase()
        self._written_text = ""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _update(self) -> None:
        self._next = None
        loop = asyncio.get_running_loop()
        columns = self._columns()
        if columns is not None:
            self._draw(columns)
            if self._remaining():
                self._next = loop.call_later(REFRESH_SECONDS, self._update)
        elif self._waiting_for != self._written_text:
            pause = self._written_at + REPEAT_SECONDS - loop.time()
            if pause > 0:
                self._next = loop.call_later(pause, self._update)
            else:
                self._written_text, self._written_at = self._waiting_for, loop.time()
                self.info(render_waiting(self._waiting_for, self._remaining()))

    def _draw(self, columns: int | None) -> None:
        if columns is not None:
            # A terminal wraps a line that fills its last column, and erasing would leave the first half.
            line = truncate(f"{self._program}: {render_waiting(self._waiting_for, self._remaining())}", columns - 1)
            # One line above stays free for the last printed line.
            table = self._draw_table(columns - 1, self._lines() - 2) if self._draw_table is not None else []
            erase = _ERASE_BELOW if table or self._drawn_table else _ERASE
            self._write(f"{erase}{_below(table)}{line}")
            self._drawn, self._drawn_table = True, bool(table)

    def _remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - asyncio.get_running_loop().time())

    def _erase(self) -> None:
        if self._drawn:
            self._write(_ERASE_BELOW if self._drawn_table else _ERASE)
            self._drawn = self._drawn_table = False


def _below(lines: list[str]) -> str:
    """Lines below the cursor's line; the cursor returns to the beginning of its line."""
    if not lines:
        return ""
    return "".join(f"\r\n{line}" for line in lines) + f"\r\x1b[{len(lines)}A"


def open_console(write: Callable[[str], None], name: str = "", program: str = "dlrover-run") -> Console:
    """The console of a launcher that writes to its standard error; for the parameters see `Console`."""
    term = os.environ.get("TERM")
    color = use_color(os.isatty(2), os.environ)
    return Console(write, lambda: terminal_columns(2, term), lambda: terminal_lines(2), name, program, time.time, color)


def terminal_columns(fd: int, term: str | None) -> int | None:
    """The width of the terminal behind a descriptor; None if it is no terminal or one that cannot erase a line."""
    if term in (None, "", "dumb") or not os.isatty(fd):
        return None
    # A terminal of unknown size reports 0.
    return os.get_terminal_size(fd).columns or DEFAULT_COLUMNS


def terminal_lines(fd: int) -> int:
    """The height of the terminal behind a descriptor, `DEFAULT_LINES` if unknown."""
    try:
        return os.get_terminal_size(fd).lines or DEFAULT_LINES
    except OSError:
        return DEFAULT_LINES


def is_verbose(environ: Mapping[str, str]) -> bool:
    """Whether the user wants more than the necessary messages (LOGLEVEL=INFO or DEBUG)."""
    return environ.get("LOGLEVEL", "").upper() in ("INFO", "DEBUG")
