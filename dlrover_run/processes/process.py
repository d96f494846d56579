"""Supervised processes, alone or in a group: their start, the signals that they get, and their ends, which the kernel
reports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from dlrover_run.processes import event_loop, signals, tree

KILL_TIMEOUT = 60.0
"""Seconds that the kernel gets to end a process after SIGKILL: it may have hundreds of gigabytes to free, on a busy
machine. A process that runs longer is stuck in the kernel (a dead disk or driver) for good."""

COLLECTED_ELSEWHERE = 255
"""The exit code of a process whose exit status another part of this program has collected."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is needed to start one process, spawned or forked from the template.

    `name` stands for the process in messages. `argv` is the whole command line, `args` the part of it that belongs to
    the program. `stdio` are the descriptors that become 0, 1 and 2; the caller closes them (`close_stdio`). `cpus` None
    keeps the affinity. `before_exec` is called in a spawned process before its program begins; a process that is forked
    from the template has no such moment. With `signal_group`, signals are sent to its whole process group: a shell, for
    example, does not forward them to the program that it runs. With `record_imports`, the template imports what this
    process has imported. `fds` are further descriptors that it inherits. Unless `dies_with_parent`, it outlives a kill
    of this process. With `signals_blocked`, it starts with all signals blocked, until it unblocks them.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    args: tuple[str, ...] = ()
    stdio: tuple[int, int, int] = (0, 1, 2)
    cpus: frozenset[int] | None = None
    before_exec: Callable[[], None] | None = None
    signal_group: bool = False
    record_imports: bool = False
    fds: tuple[int, ...] = ()
    directory: str | None = None
    dies_with_parent: bool = True
    signals_blocked: bool = False

    def close_stdio(self) -> None:
        """Close this process's copies of `stdio`, after the process has been started or will not be."""
        for fd in set(self.stdio):
            if fd > 2:
                os.close(fd)


Spec = TypeVar("Spec", bound=ProcessSpec)


def spawn(spec: ProcessSpec) -> int:
    """Start a fresh process in a session of its own and return its pid. Raises OSError when it cannot be started."""
    parent = os.getpid()

    def before_exec() -> None:
        if spec.dies_with_parent:
            tree.die_with_parent(parent)
        if spec.cpus is not None:
            os.sched_setaffinity(0, spec.cpus)
        if spec.before_exec is not None:
            spec.before_exec()

    prepares = spec.dies_with_parent or spec.cpus is not None or spec.before_exec is not None
    stdin, stdout, stderr = spec.stdio
    with signals.held_back() if spec.signals_blocked else contextlib.nullcontext():
        process = subprocess.Popen(
            spec.argv,
            env=dict(spec.environment),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=spec.fds,
            cwd=spec.directory,
            start_new_session=True,
            preexec_fn=before_exec if prepares else None,
        )
    # The exit status is collected through the pidfd, in the same way as that of a forked process. With a return code
    # set, Popen neither waits for the process nor warns that it is still running.
    process.returncode = 0
    return process.pid


class ManagedProcess(Generic[Spec]):
    """A running child of this process, watched through a pidfd.

    `on_end` is called once when it has ended, `on_stuck` once if SIGKILL has not ended it within KILL_TIMEOUT seconds,
    or at once if this user may not kill it. Raises OSError when it cannot be watched; it is killed then.
    """

    def __init__(
        self,
        pid: int,
        spec: Spec,
        on_end: Callable[[ManagedProcess[Spec]], None],
        on_stuck: Callable[[ManagedProcess[Spec]], None] | None = None,
    ) -> None:
        self.pid = pid
        self.spec = spec
        self.code: int | None = None
        self.ended_at = 0.0
        self.peak_memory = 0
        """The most resident bytes that it had at a time, known when it has ended."""
        self.stopped_with: signal.Signals | None = None
        self.stopped_at: float | None = None
        self.forwarded: set[signal.Signals] = set()
        """Signals that were passed on and do not end it."""
        self.stuck = False
        self.refused = False
        """Whether this user may not kill it: `sudo` or a set-uid program has given it to another one."""
        self._started = time.monotonic()
        self._on_end = on_end
        self._on_stuck = on_stuck
        self._kill_timer: asyncio.TimerHandle | None = None
        self._stuck_timer: asyncio.TimerHandle | None = None
        try:
            event_loop.watch_child(pid, self._collect)
        except OSError:
            # Without a descriptor for it nothing would report its end: it does not run unwatched.
            tree.send_signal(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            raise

    @property
    def live(self) -> bool:
        """Whether the end of the process has not been reported yet."""
        return self.code is None

    def hand_over(
        self,
        spec: Spec,
        on_end: Callable[[ManagedProcess[Spec]], None],
        on_stuck: Callable[[ManagedProcess[Spec]], None],
    ) -> None:
        """Report the end of this process to another owner, by whose `spec` it is known from now on."""
        self.spec, self._on_end, self._on_stuck = spec, on_end, on_stuck

    def stop(self, number: signal.Signals, grace: float, delivered_at: float | None = None) -> None:
        """Send a signal that ends the process, and kill the process `grace` seconds after the first `stop`.

        `delivered_at` is as in `send`.
        """
        if not self.live:
            return
        self.send(number, delivered_at)
        if self._kill_timer is None:
            self._kill_timer = asyncio.get_running_loop().call_later(grace, self.send, signal.SIGKILL)

    def send(self, number: signal.Signals, delivered_at: float | None = None) -> None:
        """Send a signal that ends the process: to it alone, or to its process group if its spec asks for it.

        Its children do not get the signal: a data loader that is ended takes the worker down before that has saved its
        state. They get SIGTERM when the process has ended, or is killed. `delivered_at` (seconds of `time.monotonic`)
        says that every process that ran then has got this signal from its sender, so it is not sent again.

        SIGKILL goes to the process alone in any case: Python's resource tracker, which is in its group, has to outlive
        it to remove its segments from /dev/shm. The OrphanKiller ends the others a moment later.
        """
        if not self._signalable:
            return
        self.stopped_with = number
        self.stopped_at = self.stopped_at or time.time()
        if number is signal.SIGKILL:
            self.refused = not tree.send_signal(self.pid, number)
            self._end_group()
            if self._stuck_timer is None:
                wait = 0.0 if self.refused else KILL_TIMEOUT
                self._stuck_timer = asyncio.get_running_loop().call_later(wait, self._note_stuck)
            return
        if delivered_at is None or self._started > delivered_at:
            self._kill(number)
        # A stopped process would act on the signal only after it is continued, which may be too late.
        self._kill(signal.SIGCONT)

    def forward(self, number: signal.Signals, delivered_at: float | None = None) -> None:
        """Pass on a signal that does not end the process; `delivered_at` is as in `send`."""
        if not self._signalable:
            return
        self.forwarded.add(number)
        if delivered_at is None or self._started > delivered_at:
            self._kill(number)

    @property
    def _signalable(self) -> bool:
        # A process that has ended by itself, and is not collected yet, accepts a signal without an error.
        if not self.live:
            return False
        try:
            return not os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False

    def _kill(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.spec.signal_group:
                os.killpg(self.pid, number)
                return
        # Also for a process that has just been forked and does not lead its group yet.
        tree.send_signal(self.pid, number)

    def _end_group(self) -> None:
        """Ask what is left of the process group to end, while the number of the group is still its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGTERM)
            os.killpg(self.pid, signal.SIGCONT)

    def _note_stuck(self) -> None:
        self.stuck = True
        if self._on_stuck is not None:
            self._on_stuck(self)

    def _collect(self) -> None:
        for timer in (self._kill_timer, self._stuck_timer):
            if timer is not None:
                timer.cancel()
        if self.stopped_with is not None:
            self._end_group()
        try:
            _, status, used = os.wait4(self.pid, 0)
            self.peak_memory = used.ru_maxrss * 1024
            self.code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            self.code = COLLECTED_ELSEWHERE
        self.stuck = False
        self.ended_at = time.time()
        self._on_end(self)


class StuckProcess(Exception):
    """A process that SIGKILL did not end. Another one started beside it would meet the same wedged device, or port."""

    def __init__(self, *processes: ManagedProcess[Spec]) -> None:
        stuck = ", ".join(f"{process.spec.name} (pid {process.pid})" for process in processes)
        if any(process.refused for process in processes):
            super().__init__(f"{stuck} runs on: it belongs to another user (sudo?), and this user may not end it")
            return
        super().__init__(
            f"SIGKILL did not end {stuck} in {KILL_TIMEOUT:g} s: the kernel holds it; look at its device or disk"
        )


class ProcessGroup(Generic[Spec]):
    """Starts, watches and stops processes. `on_end` is called with each process when it has ended, in that order."""

    def __init__(self, specs: Sequence[Spec], on_end: Callable[[ManagedProcess[Spec]], None]) -> None:
        self._specs = specs
        self._on_end = on_end
        self._changed = asyncio.Event()
        self._processes: list[ManagedProcess[Spec]] = []
        self.ended: list[ManagedProcess[Spec]] = []

    def take_over(self, process: ManagedProcess[Spec], spec: Spec) -> None:
        """Take a process that runs from another group, as the one of that spec of this group."""
        process.hand_over(spec, self._note_end, self._note_stuck)
        self._processes.append(process)

    async def start(self, start_one: Callable[[Spec], Awaitable[int]]) -> None:
        """Start every process that this group has not taken over, with `start_one`, which returns the pid. Raises what
        that raises; the caller then stops those already started."""
        here = {id(process.spec) for process in self._processes}
        for spec in [spec for spec in self._specs if id(spec) not in here]:
            pid = await start_one(spec)
            self._processes.append(ManagedProcess(pid, spec, self._note_end, self._note_stuck))

    @property
    def live(self) -> bool:
        """Whether a process still runs."""
        return len(self.ended) < len(self._processes)

    @property
    def succeeded(self) -> bool:
        """Whether all processes have ended with exit code 0, and none of them was stopped."""
        finished = [process for process in self.ended if process.code == 0 and process.stopped_with is None]
        return len(finished) == len(self._specs)

    @property
    def pids(self) -> set[int]:
        """The pids of the processes that still run."""
        return {process.pid for process in self.running}

    @property
    def running(self) -> list[ManagedProcess[Spec]]:
        """The processes that still run."""
        return [process for process in self._processes if process.live]

    def send(self, number: signal.Signals, delivered_at: float | None = None) -> None:
        """Send a signal that ends it to every process that runs; `delivered_at` is as in `ManagedProcess.send`."""
        for process in self._processes:
            process.send(number, delivered_at)

    def forward(self, number: signal.Signals, delivered_at: float | None = None) -> None:
        """Pass on a signal that does not end it to every process that runs."""
        for process in self._processes:
            process.forward(number, delivered_at)

    def begin_stop(self, number: signal.Signals, grace: float, delivered_at: float | None = None) -> None:
        """Send all a signal that ends them, and kill each after `grace` seconds."""
        for process in self._processes:
            process.stop(number, grace, delivered_at)

    async def stop(self, number: signal.Signals, grace: float) -> None:
        """`begin_stop`, and return when all have ended. Raises StuckProcess when SIGKILL does not end one."""
        self.begin_stop(number, grace)
        await self.wait()

    async def wait(self) -> None:
        """Return when all have ended. Raises StuckProcess when SIGKILL does not end one."""
        await self.wait_for(lambda process: True)

    async def wait_for(self, chosen: Callable[[ManagedProcess[Spec]], bool]) -> None:
        """Return when no process runs that is `chosen`. Raises StuckProcess when SIGKILL does not end one."""
        while waited_for := [process for process in self.running if chosen(process)]:
            if stuck := [process for process in waited_for if process.stuck]:
                raise StuckProcess(*stuck)
            self._changed.clear()
            await self._changed.wait()

    def _note_stuck(self, process: ManagedProcess[Spec]) -> None:
        self._changed.set()

    def _note_end(self, process: ManagedProcess[Spec]) -> None:
        self.ended.append(process)
        self._changed.set()
        self._on_end(process)
