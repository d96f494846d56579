"""Keys of the user: lines that are typed into the launcher's terminal.

The terminal stays in its usual mode, so a key is followed by Enter, and a launcher that is killed leaves the terminal
as it was.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

STDIN = 0

MAX_LINE = 1024


class Keys:
    """Calls `on_line` with each line while it reads. The workers have the same standard input, so the owner reads only
    while none of them needs it."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._reads = False

    def begin(self) -> bool:
        """Read lines from now on, if this launcher has a terminal; returns whether it has. Idempotent."""
        if not self._reads and has_terminal():
            asyncio.get_running_loop().add_reader(STDIN, self._read)
            self._reads = True
        return self._reads

    def end(self) -> None:
        """Read no more. Idempotent."""
        if self._reads:
            asyncio.get_running_loop().remove_reader(STDIN)
            self._reads = False

    def _read(self) -> None:
        if not has_terminal():
            self.end()
            return
        try:
            line = os.read(STDIN, MAX_LINE)
        except OSError:
            line = b""
        if not line:
            self.end()
        else:
            self._on_line(line.decode(errors="replace").strip().lower())


def has_terminal() -> bool:
    """Whether standard input is a terminal, and the launcher its foreground job.

    The agent has a session of its own, in which no terminal stops a reader in the background: it would take what the
    user types into the shell. So the launcher's main process, its parent, counts.
    """
    try:
        if not os.isatty(STDIN):
            return False
        stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    except OSError:
        return False
    # After the name, which may contain spaces: state, parent, group, session, terminal, and its foreground group.
    fields = stat.rpartition(")")[2].split()
    return fields[2] == fields[5]
