"""Runs a coroutine in an event loop that handles signals, as `asyncio.run` does, and ends quietly."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in a new event loop in the main thread and return its result."""
    with asyncio.Runner(loop_factory=_EventLoop) as runner:
        return runner.run(main)


class _EventLoop(asyncio.SelectorEventLoop):
    """Python writes the number of each signal to a pipe of the loop, the wakeup descriptor."""

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        super().add_signal_handler(sig, callback, *args)
        # Many children that end at once fill the pipe. A further SIGCHLD is then lost, but the ones in the pipe have
        # the same meaning, and the end of a worker is also reported by its pidfd. So no warning is printed.
        signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)

    def close(self) -> None:
        # asyncio closes the pipe first and only then removes the handlers. A signal between the two (the end of a
        # child, for example) would be written to a closed descriptor, and Python prints a traceback for that, or to
        # another file that has got the same number.
        signal.set_wakeup_fd(-1)
        super().close()
