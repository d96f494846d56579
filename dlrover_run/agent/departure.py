"""What comes to this node from outside: signals, and the loss of the process that it works for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

from dlrover_run.agent.delivery import Deliveries, Delivery
from dlrover_run.process_tree import signals, watchdog
from dlrover_run.spec import JobSpec


class Departure:
    """Remembers why this node has to go, and calls `on_stop`, `on_forward` and `on_lost` with each thing that happens.

    `on_stop` gets the signal that ends the launcher, the one that is meant for the workers, and when they got that from
    elsewhere, None if they did not. Meant is SIGKILL for a second Ctrl-C, since somebody at the keyboard who presses it
    again does not want to wait for anyone's grace, and SIGTERM for a signal that is not one of `--signals-to-handle`,
    which the workers may not know. `on_forward` gets a signal of `--forward-signals`, after which training goes on.
    """

    def __init__(
        self,
        spec: JobSpec,
        on_stop: Callable[[signal.Signals, signal.Signals, float | None], None],
        on_forward: Callable[[signal.Signals, float | None], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._on_stop = on_stop
        self._on_forward = on_forward
        self._on_lost = on_lost
        self._interrupted = False
        self._deliveries = Deliveries()
        self._timer: asyncio.TimerHandle | None = None
        self.signal: signal.Signals | None = None
        """What ends this launcher."""
        self.stop_signal = signal.SIGTERM
        """What its workers are sent for that."""
        self.told_at: float | None = None
        """When the workers got `stop_signal` from whoever sent `signal`; None if they did not."""
        self.orphaned = False

    @property
    def wanted(self) -> bool:
        """Whether this node has to go."""
        return self.signal is not None or self.orphaned

    def listen(self, lifelines: Sequence[int]) -> None:
        """Hear of both from now on. The signals have been held back since before the guard forked the agent."""
        loop = asyncio.get_running_loop()

        def note(number: int) -> None:
            # The time is taken here: the loop may be starting workers, and those that it starts after this signal have
            # not got it.
            with contextlib.suppress(RuntimeError):  # The loop is closed: nothing is decided by it any more.
                loop.call_soon_threadsafe(self._note_own, number, time.monotonic())

        signals.catch(note)
        for fd in lifelines:
            os.set_blocking(fd, False)
            loop.add_reader(fd, self._hear, fd)
        signals.release()

    def close(self) -> None:
        """Decide nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _hear(self, fd: int) -> None:
        loop = asyncio.get_running_loop()
        received = watchdog.receive(fd)
        if received is None:
            loop.remove_reader(fd)
            self.orphaned = True
            self._on_lost()
            return
        for each in received:
            self._act(self._deliveries.to_launcher(each, loop.time()))

    def _note_own(self, number: int, at: float) -> None:
        self._act(self._deliveries.to_agent(number, at, asyncio.get_running_loop().time()))

    def _look(self) -> None:
        self._act(self._deliveries.look(asyncio.get_running_loop().time()))

    def _act(self, decided: Sequence[Delivery]) -> None:
        for each in decided:
            self._take(signal.Signals(each.number), each.told_at)
        if self._timer is not None:
            self._timer.cancel()
        due = self._deliveries.due
        self._timer = None if due is None else asyncio.get_running_loop().call_at(due, self._look)

    def _take(self, number: signal.Signals, told_at: float | None) -> None:
        if number in self._spec.forward_signals:
            self._on_forward(number, told_at)
            return
        insists = self._interrupted and number is signal.SIGINT
        self._interrupted = self._interrupted or number is signal.SIGINT
        if number not in self._spec.signals:
            meant, told_at = signal.SIGTERM, None
        else:
            meant = signal.SIGKILL if insists else number
        if self.signal is None:
            self.stop_signal, self.told_at = meant, told_at
        self._on_stop(number, meant, None if meant is signal.SIGKILL else told_at)
        self.signal = self.signal or number


def received_words(number: signal.Signals, meant: signal.Signals) -> str:
    """The beginning of the line about a signal that ends the launcher; `meant` is what the workers are sent."""
    if meant in (number, signal.SIGKILL):
        return f"{number.name} received"
    return f"{number.name} received, which ends this launcher (--forward-signals={number.name} would pass it on)"
