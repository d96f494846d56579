"""What makes a node leave a job that is not over: a signal, or the loss of the process that it works for."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from dlrover_run.descent import guard, lifeline


class Departure:
    """Remembers why this node has to go, and calls `on_signal` and `on_lost` with each thing that happens.

    `on_signal` gets the signal that is meant for the workers: SIGKILL for a second Ctrl-C, since somebody at the
    keyboard who presses it again does not want to wait for anyone's grace.
    """

    def __init__(self, on_signal: Callable[[signal.Signals], None], on_lost: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._on_lost = on_lost
        self._interrupted = False
        self.signal: signal.Signals | None = None
        self.orphaned = False

    @property
    def wanted(self) -> bool:
        """Whether this node has to go."""
        return self.signal is not None or self.orphaned

    def listen(self, signals: Sequence[signal.Signals], lifelines: Sequence[int]) -> None:
        """Hear of both from now on. The signals have been held back since before the guard forked the agent."""
        loop = asyncio.get_running_loop()
        # The pipe by which the loop wakes up is filled by a crowd of orphans that end at once. Nobody need be warned of
        # that, but a signal that finds it full must not be lost, so these are heard of without it.
        signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)
        for number in signals:
            # Whoever starts a launcher with nohup wants SIGHUP ignored, so what was ignored stays so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: loop.call_soon_threadsafe(self._take, signal.Signals(number)))
        for fd in lifelines:
            lifeline.watch(fd, self._lose)
        guard.unblock()

    def _take(self, number: signal.Signals) -> None:
        insists = self._interrupted and number is signal.SIGINT
        self._interrupted = self._interrupted or number is signal.SIGINT
        self._on_signal(signal.SIGKILL if insists else number)
        self.signal = self.signal or number

    def _lose(self) -> None:
        self.orphaned = True
        self._on_lost()
