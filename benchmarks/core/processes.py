"""The processes of a run: which belong to the launcher and which to its workers, their memory, and when they end."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
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


def of_run(roots: Iterable[int], mark: str, proc: Path = Path("/proc")) -> list[Process]:
    """The live processes of a run: those below `roots`, and those that have `mark` in their environment.

    The mark finds processes that have left the tree, such as orphans of a killed launcher. The caller is left out.
    """
    found = {pid for pid in psutil.pids() if _has_mark(proc / str(pid) / "environ", mark.encode())}
    found.update(*(tree(root) for root in roots))
    found.discard(os.getpid())
    processes = []
    for pid in sorted(found):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                processes.append(Process(pid, process.ppid(), " ".join(process.cmdline())))
    return processes


def _has_mark(environ: Path, mark: bytes) -> bool:
    try:
        return mark in environ.read_bytes()
    except OSError:
        return False


def classify(processes: Iterable[Process], workers: Iterable[int]) -> dict[int, Role]:
    """The role of each process, given the process ids that the workers reported.

    A descendant of a worker counts as worker, any other process as launcher, wherever it is in the tree. The process
    from which workers are forked has "template" in its command line.
    """
    by_pid = {process.pid: process for process in processes}
    reported = set(workers)

    def role(process: Process) -> Role:
        seen: set[int] = set()
        ancestor: Process | None = process
        while ancestor is not None and ancestor.pid not in seen:
            if ancestor.pid in reported:
                return "worker"
            seen.add(ancestor.pid)
            ancestor = by_pid.get(ancestor.parent)
        return "template" if "template" in process.command else "launcher"

    return {pid: role(process) for pid, process in by_pid.items()}


def pss(pid: int) -> int:
    """Bytes of PSS of a process: a page that n processes share counts 1/n in each. 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0


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
