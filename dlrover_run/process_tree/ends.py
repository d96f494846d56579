"""Reports the end of a process to the event loop: a child through its pidfd, any other process through a pipe.

A *parent-death pipe* is a pipe whose writing end only one process holds. The kernel closes it when that process ends,
also by SIGKILL, and the reader sees the end of file.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


def watch_pipe(fd: int, on_end: Callable[[], None]) -> None:
    """Call `on_end` once when every holder of the other end of this pipe has ended."""
    os.set_blocking(fd, False)
    loop = asyncio.get_running_loop()

    def readable() -> None:
        loop.remove_reader(fd)
        on_end()

    loop.add_reader(fd, readable)


def watch_child(pid: int, on_end: Callable[[], None]) -> None:
    """Call `on_end` once when this child has ended.

    `on_end` has to collect the exit status. Until then the pid stays the child's, so signals cannot reach another
    process.
    """
    pidfd = os.pidfd_open(pid)

    def ended() -> None:
        os.close(pidfd)
        on_end()

    # A pidfd becomes readable when its process ends.
    watch_pipe(pidfd, ended)
