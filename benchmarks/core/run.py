"""One run of one rival: its directory, its environment, the reports of its workers, and its processes.

Nothing is polled, so that the benchmark takes no processor time from the rivals. It sleeps in one selector, which wakes
for a report, for the end of a process (pidfd), or when the time is up.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple

from core.processes import Process, of_run, tree, wait_for_end
from core.ratios import Late, Lost, Measured

NANOSECOND = 1e-9

END_TIMEOUT = 20.0
"""Seconds in which a job may end by itself after its run; then its processes are killed."""

KILL_TIMEOUT = 10.0
"""Seconds in which killed processes must end; after that the benchmark fails, because the kernel holds one."""

KILL_SWEEPS = 5
"""How often to look for processes that a dying launcher has started meanwhile."""

READ_SIZE = 65536
TAIL_LINES = 5

OUTPUT = "output.log"

_IN_MODIFY = 0x2
_libc = ctypes.CDLL(None, use_errno=True)

FOREIGN = (
    *("PET_", "TORCHELASTIC_", "TORCH_", "DLROVER_", "OMP_"),
    *("MASTER_", "GROUP_", "ROLE_", "LOCAL_", "NODE_", "WORKER_", "RANK", "WORLD_SIZE"),
    "PYTHONDONTWRITEBYTECODE",
    *("TF_", "STOP_FILE", "MODEL_DIR", "DATA_SHARDS", "PYTHON_EXEC", "ETCD_"),
)
"""Variables of the caller's shell that would change the behaviour of a rival."""


class Report(NamedTuple):
    """One line from a worker. `at_ns` is CLOCK_MONOTONIC, the clock of `time.monotonic_ns` in every process."""

    event: str
    rank: int
    attempt: int
    pid: int
    at_ns: int

    @staticmethod
    def parse(line: str) -> Report:
        """The report in a line of `workers/reporting.py`."""
        event, *numbers = line.split()
        return Report(event, *map(int, numbers))


def all_ranks(
    reports: Iterable[Report],
    event: str,
    ranks: int,
    after_ns: int = 0,
    first_attempt: int | None = None,
    only: Set[int] | None = None,
) -> list[Report] | None:
    """The first report of `event` by each rank (of `only`) after `after_ns`; None if fewer than `ranks` have one.

    With `first_attempt` they are of one attempt, the first complete one from that on. With several nodes this is no
    help, because each launcher of torch counts its own restarts.
    """
    found: dict[int | None, dict[int, Report]] = {}
    for report in reports:
        if report.event == event and report.at_ns > after_ns and (only is None or report.rank in only):
            if first_attempt is None:
                found.setdefault(None, {}).setdefault(report.rank, report)
            elif report.attempt >= first_attempt:
                found.setdefault(report.attempt, {}).setdefault(report.rank, report)
    complete = (found[attempt] for attempt in sorted(found, key=lambda key: key or 0) if len(found[attempt]) == ranks)
    return next(([by_rank[rank] for rank in sorted(by_rank)] for by_rank in complete), None)


def until_last(
    began_ns: int,
    limit: float,
    wait: Callable[[float], Sequence[Report]],
    note: Callable[[Sequence[Report]], str] = lambda reports: "",
) -> Measured:
    """The time from `began_ns` to the last of the reports that `wait` waits for, at most `limit` seconds."""
    try:
        reports = wait(limit)
    except Late:
        return Measured({"": limit}, f"did not end in {limit:g} s", frozenset({""}))
    return Measured({"": (max(report.at_ns for report in reports) - began_ns) * NANOSECOND}, note(reports))


class Run:
    """A run, as a context manager: its end ends all processes that it started.

    `ends` maps the id of each launcher and watched process to the time of its end in nanoseconds. `ends_by_itself`: the
    job ends once the gate is open (see `workers/reporting.py`); set it to False for workers that never end. `tail` has
    the last lines that the job printed, after its end.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="benchmark-"))
        self.reports: list[Report] = []
        self.launchers: list[Popen[bytes]] = []
        self.ends: dict[int, int] = {}
        self.ends_by_itself = True
        self.tail = ""
        for name in ("reports", "gate"):
            os.mkfifo(self.directory / name)
        # Opened for reading and writing: as there is always a writer, there is no end of file when a worker closes.
        self._reports = os.open(self.directory / "reports", os.O_RDWR | os.O_NONBLOCK)
        self._gate = os.open(self.directory / "gate", os.O_RDWR | os.O_NONBLOCK)
        self._unread = ""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._reports, selectors.EVENT_READ)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        # TMPDIR keeps the files of a rival in the run's directory. OMP_NUM_THREADS is what torchrun sets.
        own = {"BENCHMARK_RUN": str(self.directory), "TMPDIR": str(self.directory), "OMP_NUM_THREADS": "1"}
        self.environment = inherited | own

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            # The gate opens: a healthy job has its time to end.
            os.close(self._gate)
            if self.ends_by_itself and kind is None:
                wait_for_end((process.pid for process in self.processes()), END_TIMEOUT)
        finally:
            # A signal that ends the benchmark waits until nothing is left.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
            try:
                self._kill_all()
            finally:
                self.tail = "".join(f"{line}\n" for line in self.output.splitlines()[-TAIL_LINES:])
                for key in self._selector.get_map().values():
                    os.close(key.fd)
                self._selector.close()
                shutil.rmtree(self.directory, ignore_errors=True)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, inherited: Sequence[int] = ()
    ) -> int:
        """Start a process of the rival; return the time just before, in nanoseconds of the monotonic clock. It gets
        these variables besides those of the run, and inherits these descriptors."""
        with open(self.directory / OUTPUT, "ab") as output:
            began = time.monotonic_ns()
            launcher = Popen(
                command,
                env={**self.environment, **(environment or {})},
                cwd=self.directory,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=inherited,
            )
        self.launchers.append(launcher)
        self.watch([launcher.pid])
        return began

    def wait(
        self,
        event: str,
        ranks: int,
        timeout: float,
        after_ns: int = 0,
        first_attempt: int | None = None,
        only: Set[int] | None = None,
    ) -> list[Report]:
        """Wait for the reports that `all_ranks` finds. Raises Lost if the job ends before, Late after `timeout`
        seconds."""

        def find() -> list[Report] | None:
            return all_ranks(self.reports, event, ranks, after_ns, first_attempt, only)

        self._wait(lambda: self._failed() or find() is not None, timeout)
        if self._failed():
            raise Lost("a worker reported that it failed")
        if (found := find()) is not None:
            return found
        if self._all_ended():
            raise Lost(f"the job ended without {event!r} of all ranks")
        self.ends_by_itself = False
        raise Late(f"no {event!r} of all ranks in {timeout:g} s")

    @property
    def output(self) -> str:
        """What the processes of the run have printed so far."""
        try:
            return (self.directory / OUTPUT).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def wait_output(self, text: str, timeout: float, after: int = 0) -> bool:
        """Wait until `text` is printed beyond the first `after` characters, at most `timeout` seconds; whether it was.
        Raises Lost if the job ends before."""

        def printed() -> bool:
            return text in self.output[after:]

        watch = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        _libc.inotify_add_watch(watch, os.fsencode(self.directory / OUTPUT), _IN_MODIFY)
        self._selector.register(watch, selectors.EVENT_READ, OUTPUT)
        try:
            self._wait(printed, timeout)
        finally:
            self._selector.unregister(watch)
            os.close(watch)
        if not (found := printed()) and self._all_ended():
            raise Lost(f"the job ended without printing {text!r}")
        return found

    def watch(self, pids: Iterable[int]) -> None:
        """Record in `ends` when these processes end, as far as the run waits for something then."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)

    def kill(self, pid: int) -> int:
        """Kill a worker with SIGKILL; return the time just before. Raises Lost if it has ended already."""
        now = time.monotonic_ns()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            raise Lost("the worker to be killed had ended by itself") from None
        return now

    def processes(self) -> list[Process]:
        """All live processes of the run."""
        return of_run([launcher.pid for launcher in self.launchers], str(self.directory))

    def of_node(self, node: int) -> list[int]:
        """The process ids of a launcher and its descendants."""
        return tree(self.launchers[node].pid)

    def kill_node(self, node: int) -> int:
        """Kill a launcher and its descendants, as when a machine fails; return the time just before. Raises Lost if the
        launcher has ended already."""
        if self.launchers[node].poll() is not None:
            raise Lost("the node to be killed had ended by itself")
        pids = self.of_node(node)
        now = time.monotonic_ns()
        _kill(pids)
        return now

    def wait_end(self, timeout: float) -> int:
        """Wait until the newest launcher has ended with 0; return when. Raises Lost if it does not."""
        launcher = self.launchers[-1]
        self._wait(lambda: launcher.pid in self.ends, timeout)
        if launcher.pid not in self.ends:
            raise Lost(f"still running after {timeout:g} s")
        if code := launcher.wait():
            raise Lost(f"exit code {code}")
        return self.ends[launcher.pid]

    def settle(self, seconds: float) -> None:
        """Let the job run for a fixed time, the same for all rivals. Raises Lost if it ends meanwhile."""
        self._wait(self._failed, seconds)
        if self._failed() or self._all_ended():
            raise Lost("the job ended while it should have been running")

    def _failed(self) -> bool:
        return any(report.event == "failed" for report in self.reports)

    def _all_ended(self) -> bool:
        return all(launcher.pid in self.ends for launcher in self.launchers)

    def _wait(self, done: Callable[[], bool], timeout: float) -> None:
        """Read reports until `done()`, until all launchers have ended or `timeout` seconds passed."""
        deadline = time.monotonic() + timeout
        left = 0.0
        # What has happened already is read first, even if there is no time to wait.
        while True:
            for key, _ in self._selector.select(left):
                if key.data is None:
                    self._read_reports()
                elif key.data == OUTPUT:
                    os.read(key.fd, READ_SIZE)
                else:
                    self.ends[key.data] = time.monotonic_ns()
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
            left = deadline - time.monotonic()
            if done() or self._all_ended() or left <= 0:
                return

    def _read_reports(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while text := os.read(self._reports, READ_SIZE).decode():
                *lines, self._unread = (self._unread + text).split("\n")
                self.reports.extend(map(Report.parse, lines))

    def _kill_all(self) -> None:
        """Kill by process id what is left."""
        for _ in range(KILL_SWEEPS):
            left = [process.pid for process in self.processes()]
            _kill(left)
            stuck = wait_for_end(left, KILL_TIMEOUT)
            for launcher in self.launchers:
                if launcher.pid not in stuck:
                    launcher.wait(KILL_TIMEOUT)
            if not left:
                return
        raise RuntimeError(f"processes of the benchmark are still there after {KILL_SWEEPS} kills: {left}")


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
