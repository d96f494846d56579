"""An event loop whose time passes only when it has nothing to do, and then at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class _Selector(selectors.DefaultSelector):
    """Looks for ready descriptors, and advances the time instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "all tasks wait, and none of them for a time"
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def pause(self, seconds: float) -> None:
        """As if this process had been stopped for that long, when it comes to its next turn."""
        self._virtual.now += seconds


def run_virtually(main: Coroutine[Any, Any, Answer]) -> Answer:
    """As `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
