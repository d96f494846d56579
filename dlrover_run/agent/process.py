"""One worker process: started, signalled, and its end told by the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dlrover_run.process_tree import ends, tree


@dataclass(frozen=True)
class WorkerStart:
    """All that is needed to start one worker, whichever way it is started.

    `argv` is the whole command line, `args` the part of it that is the program's own. `stdio` are the descriptors that
    become 0, 1 and 2; the caller closes them afterwards. `cpus` None leaves the affinity. `before_exec` is called in a
    fresh process before its program begins; one that is forked from a template has no such moment. `signal_group` sends
    signals to its whole process group: a shell, for one, passes nothing on to the program that it runs.
    """

    local_rank: int
    rank: int
    argv: tuple[str, ...]
    args: tuple[str, ...]
    environment: Mapping[str, str]
    stdio: tuple[int, int, int]
    cpus: frozenset[int] | None = None
    before_exec: Callable[[], None] | None = None
    signal_group: bool = False


def spawn(start: WorkerStart) -> int:
    """Start a fresh process in a session of its own and return its pid. Raises OSError when it cannot be started."""
    parent = os.getpid()

    def before_exec() -> None:
        tree.die_with_parent(parent)
        if start.cpus is not None:
            os.sched_setaffinity(0, start.cpus)
        if start.before_exec is not None:
            start.before_exec()

    stdin, stdout, stderr = start.stdio
    process = subprocess.Popen(
        start.argv,
        env=dict(start.environment),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=before_exec,
    )
    # The exit status is collected through the pidfd, by the one path that forked workers take too; with a return code
    # set, Popen neither waits for the process nor warns that it is still running.
    process.returncode = 0
    return process.pid


class WorkerProcess:
    """A running worker that is a child of this process, watched through a pidfd."""

    def __init__(self, pid: int, start: WorkerStart, on_end: Callable[[WorkerProcess], None]) -> None:
        self.pid = pid
        self.rank = start.rank
        self.local_rank = start.local_rank
        self.code: int | None = None
        self.unix_time = 0.0
        self.stopped_with: signal.Signals | None = None
        self.stopped_at: float | None = None
        self.forwarded: set[signal.Signals] = set()
        """Signals that `--forward-signals` passed on."""
        self._started = time.monotonic()
        self._signal_group = start.signal_group
        self._on_end = on_end
        self._deadline: asyncio.TimerHandle | None = None
        ends.watch_child(pid, self._collect)

    @property
    def live(self) -> bool:
        """Whether the process has not ended yet, as far as we have been told."""
        return self.code is None

    def stop(self, number: signal.Signals, grace: float, told_at: float | None = None) -> None:
        """Ask the worker to end with a signal, and kill it after `grace` seconds of its own.

        `told_at` is as in `send`.
        """
        if not self.live:
            return
        self.send(number, told_at)
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(grace, self.send, signal.SIGKILL)

    def send(self, number: signal.Signals, told_at: float | None = None) -> None:
        """Send the signal that shall end the worker: to it alone, or to its process group if its start says so.

        Its children are left to it: a data loader that a signal ends takes the worker down before it has saved its
        state. They get SIGTERM when the worker has ended, or is killed. `told_at` (seconds of `time.monotonic`) says
        that every worker that had been started then has got this signal from elsewhere, so that it is not sent again.

        SIGKILL goes to the worker alone in any case: Python's resource tracker, which is in its group, has to outlive
        it to remove what it left in /dev/shm. The OrphanKiller ends the others a moment later.
        """
        if not self._signalable:
            return
        self.stopped_with = number
        self.stopped_at = self.stopped_at or time.time()
        if number is signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            self._end_group()
            return
        if told_at is None or self._started > told_at:
            self._kill(number)
        # A worker that somebody has stopped would hear of it when its time is over.
        self._kill(signal.SIGCONT)

    def forward(self, number: signal.Signals, told_at: float | None = None) -> None:
        """Pass a signal on after which the worker is to go on; `told_at` is as in `send`."""
        if not self._signalable:
            return
        self.forwarded.add(number)
        if told_at is None or self._started > told_at:
            self._kill(number)

    @property
    def _signalable(self) -> bool:
        # A process that has ended of itself, and was not collected yet, takes a signal without a word.
        return self.live and not os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def _kill(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._signal_group:
                os.killpg(self.pid, number)
                return
        # Also for one that has just been forked and does not lead its group yet.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _end_group(self) -> None:
        """Ask what is left of the worker's process group to end, while the number of the group is still its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGTERM)
            os.killpg(self.pid, signal.SIGCONT)

    def _collect(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self.stopped_with is not None:
            self._end_group()
        _, status = os.waitpid(self.pid, 0)
        self.code = os.waitstatus_to_exitcode(status)
        self.unix_time = time.time()
        self._on_end(self)
