"""Pipes whose ends no fork of this process keeps.

The reader of a pipe learns of the end of its writer only if no other process holds the writing end. Python closes
descriptors in a new program, but not in a fork (multiprocessing, a notebook), which any thread may do at any time.
"""

from __future__ import annotations

import os
import threading

_ends: set[int] = set()
# Held while a pipe is made and while a process forks: a fork between the two calls would not know the descriptors.
_lock = threading.Lock()


def make_pipe() -> tuple[int, int]:
    """The reading and the writing end of a new pipe. Close them with `close`."""
    with _lock:
        ends = os.pipe()
        _ends.update(ends)
    return ends


def close(fd: int) -> None:
    """Close an end of a pipe of `make_pipe`."""
    with _lock:
        _ends.discard(fd)
        os.close(fd)


def _close_in_child() -> None:
    for fd in _ends:
        os.close(fd)
    _ends.clear()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_close_in_child)
