"""When a master that was started for its jobs has nobody left to serve."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

ASKED_TIMEOUT = 5.0
"""Seconds without a node after which a master that was asked to end does so. Nodes that only lost their streams come
back within `backends.patience.RETRY_MOST`, and may train on."""


class Idleness:
    """Calls `on_idle`, with the reason, when nobody was there for `timeout` seconds; None is for ever."""

    def __init__(self, timeout: float | None, on_idle: Callable[[str], None]) -> None:
        self._timeout = timeout
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._asked = ""

    def ask(self, reason: str) -> None:
        """End soon after the last node, for `reason`. A `look` follows."""
        self._asked = self._asked or reason
        self._stop_timer()

    def look(self, nodes: int, all_over: bool) -> None:
        """Take how many nodes are connected, and whether every job that there was has ended and is forgotten."""
        if self._timeout is None and not self._asked:
            return
        if nodes:
            self._stop_timer()
        elif all_over:
            self._on_idle(self._asked or "every job is over")
        elif self._timer is None:
            timeout = min(
                math.inf if self._timeout is None else self._timeout, ASKED_TIMEOUT if self._asked else math.inf
            )
            words = self._asked or f"no node was here for {timeout:g} s"
            self._timer = self._loop.call_later(timeout, self._on_idle, words)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
