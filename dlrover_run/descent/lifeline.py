"""How an event loop hears that a process has ended: a child through its pidfd, any other through a lifeline.

A lifeline is a pipe that the kernel closes for the dead, however they died. Only the guard writes to one: signals.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


def watch(fd: int, on_lost: Callable[[], None]) -> None:
    """Call `on_lost` once when every holder of the other end of this lifeline is gone."""
    os.set_blocking(fd, False)
    loop = asyncio.get_running_loop()

    def readable() -> None:
        loop.remove_reader(fd)
        on_lost()

    loop.add_reader(fd, readable)


def watch_child(pid: int, on_end: Callable[[], None]) -> None:
    """Call `on_end` once when this process's child has ended. The exit status is left for `on_end` to collect, and
    until then the number stays the child's, so that it can be signalled by it."""
    pidfd = os.pidfd_open(pid)

    def ended() -> None:
        os.close(pidfd)
        on_end()

    watch(pidfd, ended)
