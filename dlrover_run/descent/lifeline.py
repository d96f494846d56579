"""A pipe whose end tells that a process has died, however it died: the kernel closes it for the dead."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


def watch(fd: int, on_lost: Callable[[], None]) -> None:
    """Call `on_lost` once when every holder of the other end is gone. Nothing is ever written to a lifeline."""
    os.set_blocking(fd, False)
    loop = asyncio.get_running_loop()

    def readable() -> None:
        loop.remove_reader(fd)
        on_lost()

    loop.add_reader(fd, readable)
