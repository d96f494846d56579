"""A temporary directory that does not stay behind a process that was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class OwnedDirectory:
    """A directory that this process holds by a lock on it, which the kernel releases however the process ends. One that
    nothing holds any more is removed by the next process that makes one with the same prefix."""

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        parent = parent or tempfile.gettempdir()
        for left in Path(parent).glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                lock = _hold(str(left))
                # The lock is kept meanwhile: a process that has just made the directory gets none, and makes another.
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        while True:
            self.path = tempfile.mkdtemp(prefix=prefix, dir=parent)
            # Another process may have taken it for one that is left behind.
            with contextlib.suppress(OSError):
                self._lock = _hold(self.path)
                if os.path.exists(self.path):
                    break

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _hold(path: str) -> int:
    """A descriptor with the lock of the directory. Raises OSError if another process has it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd
