"""How a worker tells the template which modules it imported: a finder that finds nothing, and a piece of shared memory.

Anonymous shared memory leaves no descriptor open in the worker, can neither block nor raise a signal there, and is gone
with its last process. When it is full, further names are dropped.
"""

from __future__ import annotations

import _thread
import mmap
import os
import sys
from collections.abc import Sequence
from types import ModuleType

CAPACITY = 1 << 18
"""Bytes for the names of one worker: torch with its compiler is about 60 KB."""

_HEADER = 8


class ImportLog:
    """A list of module names in memory that processes forked later share: one of them writes, the template reads."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._memory = mmap.mmap(-1, capacity)
        self._capacity = capacity

    def append(self, name: str) -> bool:
        """Add a name; False when there is no room or nobody wants more."""
        if self._memory[4]:
            return False
        used = int.from_bytes(self._memory[:4], "little")
        line = name.encode("utf-8", "replace") + b"\n"
        start = _HEADER + used
        if start + len(line) > self._capacity:
            return False
        self._memory[start : start + len(line)] = line
        # The count comes last, so that a reader never sees half a name.
        self._memory[:4] = (used + len(line)).to_bytes(4, "little")
        return True

    def finish(self) -> list[str]:
        """Tell the writer to stop, and read what it wrote."""
        self._memory[4] = 1
        used = int.from_bytes(self._memory[:4], "little")
        return self._memory[_HEADER : _HEADER + used].decode("utf-8", "replace").splitlines()


class ImportRecorder:
    """Stands first in `sys.meta_path` of one worker, notes each module looked for there and finds none of them.

    It leaves by itself once the log takes no more, and in any process forked from the worker.
    """

    def __init__(self, log: ImportLog) -> None:
        self._log = log
        self._process = os.getpid()
        self._lock = _thread.allocate_lock()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Note the name."""
        if os.getpid() != self._process:
            self._leave()
            return
        with self._lock:
            wanted = self._log.append(fullname)
        if not wanted:
            self._leave()

    def _leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
