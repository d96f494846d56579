"""Output that nobody shows, because no relay can live.

It is read all the same, or its worker would wait for a full pipe for ever, and the end of it is remembered: it may say
why the worker died.
"""

from __future__ import annotations

import asyncio
import os

from dlrover_run.output.lines import TailBuffer
from dlrover_run.output.streams import TAIL_BYTES, tail_text

READ_BYTES = 64 * 1024
"""The most that is read from one pipe at a time, so that the agent's loop has its other work done in between."""

LAST_BYTES = 2 * 1024 * 1024
"""The most that is read from one pipe before its end is told: more than it holds, so only a live writer can have more.
"""


class Unshown:
    """Empties pipes on the running loop. They stay their owner's, who calls `forget` before closing one."""

    def __init__(self) -> None:
        self._ends: dict[int, TailBuffer] = {}

    def read(self, pipe: int, before: int) -> None:
        """Empty `pipe`, which does not block, from now on. The file `before` has what was read from it until now."""
        ring = self._ends[pipe] = TailBuffer()
        size = os.fstat(before).st_size
        ring.add(os.pread(before, TAIL_BYTES, max(0, size - TAIL_BYTES)))
        ring.cut = ring.cut or size > TAIL_BYTES
        asyncio.get_running_loop().add_reader(pipe, self._some, pipe)

    def end(self, pipe: int) -> str:
        """The end of what was written to it until now."""
        left = LAST_BYTES
        while left > 0 and (count := self._some(pipe)):
            left -= count
        return tail_text(self._ends[pipe].content(), self._ends[pipe].cut)

    def forget(self, pipe: int) -> None:
        """Read nothing more from it."""
        if self._ends.pop(pipe, None) is not None:
            asyncio.get_running_loop().remove_reader(pipe)

    def _some(self, pipe: int) -> int:
        try:
            data = os.read(pipe, READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""  # EIO is how a pseudo-terminal says that its last writer has closed it.
        if not data:
            asyncio.get_running_loop().remove_reader(pipe)
        self._ends[pipe].add(data)
        return len(data)
