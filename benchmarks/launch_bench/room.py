"""The room that one run of one rival happens in: a directory, a FIFO for the workers' reports, and the clean-up.

The driver never polls. It sleeps in one selector that wakes for a report, for the end of a launcher (pidfd), or when
the time is up.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import TracebackType

from comparison.lost import Late, Lost

from launch_bench.processes import of_run, tree

END_TIMEOUT = 20.0
"""Seconds that a job gets to end of itself once the gate is open; then its processes are killed."""

KILL_TIMEOUT = 10.0
"""Seconds in which killed processes must be gone; longer means that the kernel holds one, and the benchmark says so."""

KILL_SWEEPS = 5
"""How often to look again for what a dying launcher may have started meanwhile."""

READ_SIZE = 65536
TAIL_LINES = 5

FOREIGN = (
    *("PET_", "TORCHELASTIC_", "TORCH_", "DLROVER_", "OMP_"),
    *("MASTER_", "GROUP_", "ROLE_", "LOCAL_", "NODE_", "WORKER_", "RANK", "WORLD_SIZE"),
)
"""Variables of the caller's shell that would change what a rival does."""


@dataclass(frozen=True)
class Report:
    """One line of a worker. `at_ns` is CLOCK_MONOTONIC, the same clock as the driver's `time.monotonic_ns`."""

    event: str
    rank: int
    attempt: int
    pid: int
    at_ns: int


def parse_report(line: str) -> Report:
    """A report from its line, as `workers/reporting.py` writes it."""
    event, rank, attempt, pid, at_ns = line.split()
    return Report(event, int(rank), int(attempt), int(pid), int(at_ns))


def all_ranks(reports: Iterable[Report], event: str, ranks: int, first_attempt: int = 0) -> list[Report] | None:
    """The reports of `event` of the first attempt, from `first_attempt` on, in which every rank has made one."""
    by_attempt: dict[int, dict[int, Report]] = {}
    for report in reports:
        if report.event == event and report.attempt >= first_attempt:
            by_attempt.setdefault(report.attempt, {}).setdefault(report.rank, report)
    for _, found in sorted(by_attempt.items()):
        if len(found) == ranks:
            return [found[rank] for rank in sorted(found)]
    return None


def each_rank(reports: Iterable[Report], event: str, ranks: int, after_ns: int) -> list[Report] | None:
    """The first report of `event` that each rank has made after `after_ns`.

    Of several nodes each launcher of torch counts its own restarts, so attempts do not tell which reports go together.
    """
    found: dict[int, Report] = {}
    for report in reports:
        if report.event == event and report.at_ns > after_ns:
            found.setdefault(report.rank, report)
    return [found[rank] for rank in sorted(found)] if len(found) == ranks else None


def still_alive(pids: Iterable[int], timeout: float) -> set[int]:
    """Wait until these processes have ended; those that have not in `timeout` seconds."""
    waiting: set[int] = set()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as descriptors:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                descriptors.callback(os.close, descriptor)
                selector.register(descriptor, selectors.EVENT_READ, pid)
                waiting.add(pid)
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fd)
                waiting.discard(key.data)
    return waiting


class Room:
    """One run's directory, environment, reports and processes. Leaving it ends all that was started in it.

    `ends` says when each process that is watched has ended, in nanoseconds, by its id. `patient` says whether the job
    may end of itself first; it is not for workers that never do.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="launch-bench-"))
        self.reports: list[Report] = []
        self.launchers: list[Popen[bytes]] = []
        self.ends: dict[int, int] = {}
        self._watched: dict[int, int] = {}
        for name in ("reports", "gate"):
            os.mkfifo(self.directory / name)
        # Opened for reading and writing: with a writer always there, no end of file comes when a worker closes.
        self._reports = os.open(self.directory / "reports", os.O_RDWR | os.O_NONBLOCK)
        self._gate = os.open(self.directory / "gate", os.O_RDWR | os.O_NONBLOCK)
        self._unread = ""
        self.patient = True
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        # TMPDIR keeps a rival's litter in the room; one thread a worker is what torchrun sets, so everyone gets it.
        self.environment = inherited | {
            "LAUNCH_BENCH_ROOM": str(self.directory),
            "TMPDIR": str(self.directory),
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> Room:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(self.patient and kind is None)
        os.close(self._reports)
        for descriptor in self._watched:
            os.close(descriptor)
        shutil.rmtree(self.directory, ignore_errors=True)

    def start(self, command: Sequence[str], environment: dict[str, str]) -> int:
        """Start a process of the rival; when, in nanoseconds of the monotonic clock, read just before."""
        with open(self.directory / "output.log", "ab") as output:
            began = time.monotonic_ns()
            self.launchers.append(
                Popen(
                    command,
                    env=self.environment | environment,
                    cwd=self.directory,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
        return began

    def wait_reports(self, event: str, ranks: int, timeout: float, first_attempt: int = 0) -> list[Report]:
        """Wait until every rank of one attempt has reported `event`; Lost when the job ends before, Late after
        `timeout` seconds."""
        return self._wait_found(lambda: all_ranks(self.reports, event, ranks, first_attempt), event, timeout)

    def wait_each_rank(self, event: str, ranks: int, timeout: float, after_ns: int) -> list[Report]:
        """Wait until every rank has reported `event` after `after_ns`, in whatever attempt; Lost and Late as above."""
        return self._wait_found(lambda: each_rank(self.reports, event, ranks, after_ns), event, timeout)

    def watch(self, pids: Iterable[int]) -> None:
        """Note in `ends` when these processes end, as far as the driver waits for anything then."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._watched[os.pidfd_open(pid)] = pid

    def kill(self, pid: int) -> int:
        """Kill one worker with SIGKILL; when, in nanoseconds, read just before. Lost when it had ended of itself."""
        now = time.monotonic_ns()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            raise Lost("the worker to be killed had ended of itself") from None
        return now

    def of_node(self, node: int) -> list[int]:
        """The process ids of a launcher and of all that descends from it."""
        return tree(self.launchers[node].pid)

    def kill_node(self, node: int) -> int:
        """Kill a launcher and all that descends from it, as when a machine dies; when, in nanoseconds, read just
        before. Lost when it had ended of itself."""
        launcher = self.launchers[node]
        if launcher.poll() is not None:
            raise Lost("the node to be killed had ended of itself")
        pids = self.of_node(node)
        now = time.monotonic_ns()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return now

    def wait_end(self, timeout: float) -> int:
        """Wait until the newest launcher has ended with 0; when, in nanoseconds. Lost when it does not."""
        launcher = self.launchers[-1]
        if still_alive([launcher.pid], timeout):
            raise Lost(f"still running after {timeout:g} s")
        ended = time.monotonic_ns()
        if code := launcher.wait():
            raise Lost(f"exit code {code}")
        return ended

    def settle(self, seconds: float) -> None:
        """Let the job be for a fixed time, the same for every rival; Lost when it ends meanwhile."""
        self._wait(lambda: False, seconds)
        if all(launcher.poll() is not None for launcher in self.launchers):
            raise Lost("job ended while it should have been at work")

    def output_tail(self) -> str:
        """The last lines that the job printed, for the person who wonders why a run was lost."""
        try:
            lines = (self.directory / "output.log").read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-TAIL_LINES:])

    def _wait_found(self, find: Callable[[], list[Report] | None], event: str, timeout: float) -> list[Report]:
        if not self._wait(lambda: find() is not None, timeout):
            if all(launcher.poll() is not None for launcher in self.launchers):
                raise Lost(f"job ended without {event!r} of all ranks")
            self.patient = False
            raise Late(f"no {event!r} of all ranks in {timeout:g} s")
        return find() or []

    def _wait(self, done: Callable[[], bool], timeout: float) -> bool:
        """Take in reports until `done()`, until all launchers have ended or `timeout` seconds passed; whether done."""
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as descriptors:
            for descriptor in (self._reports, *self._watched):
                selector.register(descriptor, selectors.EVENT_READ)
            running: set[int] = set()
            for launcher in self.launchers:
                if launcher.poll() is None:
                    descriptor = os.pidfd_open(launcher.pid)
                    descriptors.callback(os.close, descriptor)
                    selector.register(descriptor, selectors.EVENT_READ)
                    running.add(descriptor)
            deadline = time.monotonic() + timeout
            left = 0.0
            # What has happened already is taken in first, whether or not there is time to wait.
            while True:
                for key, _ in selector.select(left):
                    if key.fd in self._watched:
                        self.ends[self._watched.pop(key.fd)] = time.monotonic_ns()
                        selector.unregister(key.fd)
                        os.close(key.fd)
                    elif key.fd != self._reports:
                        selector.unregister(key.fd)
                        running.discard(key.fd)
                self._take()
                left = deadline - time.monotonic()
                if done() or not running or left <= 0:
                    break
        return done()

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while text := os.read(self._reports, READ_SIZE).decode():
                *lines, self._unread = (self._unread + text).split("\n")
                self.reports.extend(parse_report(line) for line in lines)

    def _end(self, patient: bool) -> None:
        """Open the gate, give a healthy job its time to end, and kill by id what is left of it or of a lost one."""
        os.close(self._gate)
        roots = [launcher.pid for launcher in self.launchers]
        if patient:
            still_alive((process.pid for process in of_run(roots, str(self.directory))), END_TIMEOUT)
        for _ in range(KILL_SWEEPS):
            left = [process.pid for process in of_run(roots, str(self.directory))]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            stuck = still_alive(left, KILL_TIMEOUT)
            for launcher in self.launchers:
                if launcher.pid not in stuck:
                    launcher.wait(KILL_TIMEOUT)
            if not left:
                return
        raise RuntimeError(f"processes of the benchmark are still there after {KILL_SWEEPS} kills: {left}")
