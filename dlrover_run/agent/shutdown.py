"""Shutdown requests: signals, and the loss of the process that this node works for.

A signal that has already reached the workers must not be sent to them again. `slurmstepd` (with proctrack/linuxproc)
and `systemctl stop` signal every process of a job, the workers among them; `slurmstepd` with proctrack/cgroup and a
user's `kill` signal the launcher alone. No variable distinguishes these cases; the agent's own copy of the signal does.
Like a worker, the agent has a session of its own, so no process group and no session contains both it and the launcher.
A sender that has signalled both, and is an ancestor of the launcher, signals the whole tree. It has to be an ancestor,
because `pkill dlrover` would match launcher and agent by their names, and no worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dlrover_run.background import wait_for_event
from dlrover_run.processes import signals, watchdog
from dlrover_run.processes.watchdog import ReceivedSignal
from dlrover_run.spec import JobSpec, PreemptionNotice

WITNESS_SECONDS = 0.25
"""How long the agent waits for its own copy of a signal that an ancestor has sent to the launcher. A scheduler signals
all processes in one loop, which takes milliseconds."""

SAME_SIGNAL_SECONDS = 2.0
"""If two ancestors send the same signal within this time, it is one signal: a scheduler signals the supervisor of a
local cluster and its nodes, and the supervisor passes the signal on to the nodes."""


class AcceptedSignal(NamedTuple):
    """A signal that the launcher acts on now. `delivered_at` is when its sender began to signal the workers as well;
    None if the workers have not received it."""

    number: int
    delivered_at: float | None


class SignalDeduplicator:
    """Takes the signals received by the launcher and by the agent, and returns those to act on.

    Pure: the caller passes the times, in seconds of one monotonic clock. There are two for each signal: `at`, when the
    process received it, which is compared, and `now`, when the agent's loop reads it, from which the agent waits. The
    loop may be busy for seconds between the two, for example while it starts workers.

    `due` is the time at which `look` has something to return, None if no signal waits.
    """

    def __init__(self) -> None:
        self._own: dict[int, float] = {}
        self._last: dict[int, ReceivedSignal] = {}
        self._waiting: list[tuple[ReceivedSignal, float]] = []
        """Each signal that is not decided, and when it was read."""

    @property
    def due(self) -> float | None:
        return min((read_at + WITNESS_SECONDS for _, read_at in self._waiting), default=None)

    def undecided_until(self, now: float) -> float | None:
        """When it is known at the latest whether the workers have received each signal that has reached the launcher or
        the agent; None if nothing is to be waited for."""
        ends = [read_at + WITNESS_SECONDS for _, read_at in self._waiting]
        ends += [at + WITNESS_SECONDS for at in self._own.values() if at + WITNESS_SECONDS > now]
        return max(ends, default=None)

    def to_agent(self, number: int, at: float, now: float) -> list[AcceptedSignal]:
        """The agent itself received a signal at the time `at`."""
        self._own[number] = at
        return self.look(now)

    def to_launcher(self, received: ReceivedSignal, now: float) -> list[AcceptedSignal]:
        """The launcher received a signal."""
        if not received.above:
            return [AcceptedSignal(received.number, None)]
        last = self._last.get(received.number)
        if last is not None and last.sender != received.sender and received.at - last.at < SAME_SIGNAL_SECONDS:
            return []
        self._last[received.number] = received
        self._waiting.append((received, now))
        return self.look(now)

    def look(self, now: float) -> list[AcceptedSignal]:
        """The signals that are decided by now, in the order in which they were received."""
        decided: list[AcceptedSignal] = []
        for received, read_at in list(self._waiting):
            number = received.number
            own = self._own.get(number)
            if own is not None and abs(own - received.at) < SAME_SIGNAL_SECONDS:
                # One copy proves one signal.
                del self._own[number]
                decided.append(AcceptedSignal(number, min(own, received.at)))
            elif now >= read_at + WITNESS_SECONDS:
                decided.append(AcceptedSignal(number, None))
            else:
                continue
            self._waiting.remove((received, read_at))
        return decided


class ShutdownRequest:
    """Keeps the reason why this node has to leave, and calls `on_stop`, `on_forward` and `on_lost` with each event.

    `on_stop` gets the signal that ends the launcher, the signal for the workers, and when the workers received that
    signal from its sender, None if they did not. The signal for the workers is SIGKILL for a second Ctrl-C, because a
    user who presses it again does not want to wait for the grace period, and SIGTERM for a signal that is not one of
    `--signals-to-handle`, which the workers may not handle. A preemption notice is passed on to the workers, once, and
    gives them its own time. `on_forward` gets a signal of `--forward-signals`, after
    which training continues. `on_lost` is called when the watchdog, or another parent process, has ended.
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
        self._received = SignalDeduplicator()
        self._timer: asyncio.TimerHandle | None = None
        self._decided = asyncio.Event()
        self.signal: signal.Signals | None = None
        """The signal that ends this launcher."""
        self.stop_signal = signal.SIGTERM
        """The signal that is sent to its workers because of it."""
        self.delivered_at: float | None = None
        """When the workers received `stop_signal` from the sender of `signal`; None if they did not."""
        self.grace = spec.shutdown_timeout
        """The seconds that its workers have then."""
        self._until = 0.0
        """When they are over, on the clock of the loop."""
        self.orphaned = False
        """Whether the process that this node works for has ended."""
        self.drained = False
        """Whether an operator has asked this node to leave, and no signal."""

    @property
    def requested(self) -> bool:
        """Whether this node has to leave."""
        return self.signal is not None or self.orphaned

    @property
    def left(self) -> float | None:
        """The seconds that are left of `grace`, 0 if this node is ended at once; None if it does not leave."""
        if self.orphaned:
            return 0.0
        return None if self.signal is None else max(0.0, self._until - asyncio.get_running_loop().time())

    def stop_with(self, grace: float) -> tuple[signal.Signals, float, float | None]:
        """The signal that stops a task now, the seconds until it is killed, and when it got the signal from elsewhere
        (see `ManagedProcess.send`). `grace` are the seconds for a task that is stopped for another reason."""
        if self.orphaned:
            return signal.SIGKILL, 0.0, None
        if self.signal is None:
            return signal.SIGTERM, grace, None
        return self.stop_signal, self.grace, self.delivered_at

    async def until_decided(self) -> None:
        """Return when no signal is undecided, after `WITNESS_SECONDS` at most.

        A scheduler that ends a job signals every node. A node that leaves first ends the round, and a worker that is
        stopped because of that while its own node's signal is undecided would get the signal twice.
        """
        now = asyncio.get_running_loop().time()
        if self.requested or (end := self._received.undecided_until(now)) is None:
            return
        self._decided.clear()
        await wait_for_event(self._decided, end - now)

    def drain(self) -> None:
        """Leave because an operator asks for it: as on a notice of the scheduler, or else on SIGTERM. Only the first
        request to leave counts."""
        if not self.requested:
            self.drained = True
            notice = self._spec.preemption
            self._take(signal.SIGTERM if notice is None else notice.signal, None)

    def listen(self, parent_pipes: Sequence[int]) -> None:
        """Receive signals and the ends of parent-death pipes from now on. The signals have been blocked since before
        the watchdog forked the agent."""
        loop = asyncio.get_running_loop()

        def note(number: int) -> None:
            # The time is taken here: the loop may be starting workers, and those that it starts after this signal have
            # not received it.
            with contextlib.suppress(RuntimeError):  # The loop is closed and decides nothing any more.
                loop.call_soon_threadsafe(self._on_own_signal, number, time.monotonic())

        signals.catch(note)
        for fd in parent_pipes:
            os.set_blocking(fd, False)
            loop.add_reader(fd, self._on_pipe, fd)
        signals.release()

    def _on_pipe(self, fd: int) -> None:
        loop = asyncio.get_running_loop()
        received = watchdog.receive(fd)
        if received is None:
            loop.remove_reader(fd)
            self.orphaned = True
            self._on_lost()
            return
        for each in received:
            self._act(self._received.to_launcher(each, loop.time()))

    def _on_own_signal(self, number: int, at: float) -> None:
        self._act(self._received.to_agent(number, at, asyncio.get_running_loop().time()))

    def _act(self, decided: Sequence[AcceptedSignal]) -> None:
        for number, delivered_at in decided:
            self._take(signal.Signals(number), delivered_at)
            self._decided.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due := self._received.due) is not None:
            self._timer = asyncio.get_running_loop().call_at(due, lambda: self._act(self._received.look(due)))

    def _take(self, number: signal.Signals, delivered_at: float | None) -> None:
        if number in self._spec.forward_signals:
            self._on_forward(number, delivered_at)
            return
        notice = self._spec.preemption
        if notice is not None and number is notice.signal:
            if self.signal is not None:
                # The workers know already that they have to end.
                return
            self.grace = notice.grace
        for_workers = number
        if number not in self._spec.handled_signals:
            for_workers, delivered_at = signal.SIGTERM, None
        elif number is signal.SIGINT and self._interrupted:
            for_workers = signal.SIGKILL
        self._interrupted = self._interrupted or number is signal.SIGINT
        if self.signal is None:
            self.stop_signal, self.delivered_at = for_workers, delivered_at
            self._until = asyncio.get_running_loop().time() + self.grace
        self._on_stop(number, for_workers, None if for_workers is signal.SIGKILL else delivered_at)
        self.signal = self.signal or number


def received_text(
    number: signal.Signals, for_workers: signal.Signals, notice: PreemptionNotice | None, drained: bool = False
) -> str:
    """The beginning of the line about a signal that ends the launcher; `for_workers` is what the workers are sent. If
    the node is `drained`, there was no signal."""
    if drained:
        return "an operator drains this node"
    if notice is not None and number is notice.signal:
        return f"{number.name} received, which announces the end of this node in {notice.seconds:g} s"
    if for_workers in (number, signal.SIGKILL):
        return f"{number.name} received"
    return f"{number.name} received, which ends this launcher (--forward-signals={number.name} would pass it on)"
