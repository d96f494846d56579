"""The processes of a run: which belong to the launcher and which to its workers, their memory, and when they end."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import psutil

Role = Literal["launcher", "template", "worker"]


@dataclass(frozen=True)
class Process:
    """One process of a run."""

    pid: int
    parent: int
    command: str


def tree(root: int) -> list[int]:
    """A process and its descendants, parents first; empty if it has ended."""
    try:
        return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    except psutil.Error:
        return []


def of_run(roots: Iterable[int], directory: str) -> list[Process]:
    """The live processes of a run: those below `roots`, and those with its directory in BENCHMARK_RUN.

    The variable finds processes that have left the tree, such as orphans of a killed launcher. The caller is left out.
    """
    below = {pid for root in roots for pid in tree(root)}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            of_this = process.pid in below or process.environ().get("BENCHMARK_RUN") == directory
            if of_this and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(Process(process.pid, process.ppid(), " ".join(process.cmdline())))
    return found


def classify(processes: Iterable[Process], workers: Iterable[int]) -> dict[int, Role]:
    """The role of each process, given the process ids that the workers reported.

    A descendant of a worker counts as worker, any other process as launcher, wherever it is in the tree. The process
    from which workers are forked has "template" in its command line.
    """
    by_pid = {process.pid: process for process in processes}
    reported = set(workers)

    def is_worker(process: Process | None) -> bool:
        return process is not None and (process.pid in reported or is_worker(by_pid.get(process.parent)))

    def role(process: Process) -> Role:
        if is_worker(process):
            return "worker"
        return "template" if "template" in process.command else "launcher"

    return {pid: role(process) for pid, process in by_pid.items()}


def pss(pid: int) -> int:
    """Bytes of PSS of a process: a page that n processes share counts 1/n in each. 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0


def processor_time(pid: int) -> float:
    """Seconds of processor time of a process and all its threads, to the nanosecond; 0 if it has ended."""
    try:
        # The clock of another process: see clock_getcpuclockid(3).
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def wait_for_end(pids: Iterable[int], timeout: float) -> set[int]:
    """Wait until these processes have ended; return those that have not after `timeout` seconds."""
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
