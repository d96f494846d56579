"""When a master that was started for its jobs has nobody left to serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Idleness:
    """Calls `on_idle` once, with the reason, when nobody was there for `timeout` seconds; None is for ever."""

    def __init__(self, timeout: float | None, on_idle: Callable[[str], None]) -> None:
        self._timeout = timeout
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def look(self, nodes: int, all_over: bool) -> None:
        """Take how many nodes are connected, and whether every job that there was has ended and is forgotten."""
        if self._timeout is None:
            return
        if nodes and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif all_over and not nodes:
            self._on_idle("every job is over")
        elif not nodes and self._timer is None:
            words = f"no node was here for {self._timeout:g} s"
            self._timer = self._loop.call_later(self._timeout, self._on_idle, words)
