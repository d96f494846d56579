"""Which processes belong to a launcher, which to its workers, and how much memory each side takes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Role = Literal["launcher", "template", "worker"]


@dataclass(frozen=True)
class Process:
    """One process of a run: its parent's id tells a worker's children from the launcher's."""

    pid: int
    parent: int
    command: str


@dataclass(frozen=True)
class Memory:
    """PSS in bytes, summed by role."""

    launcher: int
    template: int
    workers: int


def classify(processes: Iterable[Process], workers: Iterable[int]) -> dict[int, Role]:
    """The role of each process, given the process ids that the workers themselves reported.

    What descends from a worker is the worker's. Everything else is the launcher's, wherever it hangs in the tree; a
    process that says "template" in its command line is the one that workers are forked from.
    """
    by_pid = {process.pid: process for process in processes}
    reported = set(workers)
    return {pid: _role(process, by_pid, reported) for pid, process in by_pid.items()}


def _role(process: Process, by_pid: Mapping[int, Process], workers: set[int]) -> Role:
    seen: set[int] = set()
    ancestor: Process | None = process
    while ancestor is not None and ancestor.pid not in seen:
        if ancestor.pid in workers:
            return "worker"
        seen.add(ancestor.pid)
        ancestor = by_pid.get(ancestor.parent)
    return "template" if "template" in process.command else "launcher"


def add_up(roles: Mapping[int, Role], pss: Mapping[int, int]) -> Memory:
    """Memory by role; a process without a figure has ended meanwhile and counts nothing."""
    total = {"launcher": 0, "template": 0, "worker": 0}
    for pid, role in roles.items():
        total[role] += pss.get(pid, 0)
    return Memory(launcher=total["launcher"], template=total["template"], workers=total["worker"])


def tree(root: int) -> list[int]:
    """A process and all that descends from it, parents first; empty when it has ended."""
    import psutil

    try:
        return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    except psutil.Error:
        return []


def of_run(roots: Iterable[int], mark: str, proc: Path = Path("/proc")) -> list[Process]:
    """The processes of one run: those under `roots`, and those that carry `mark` in their environment.

    The mark finds what has left the tree, as an orphan does whose launcher was killed. The caller is never among them,
    nor is a process that has ended and only waits to be reaped.
    """
    import psutil

    found = {pid for pid in psutil.pids() if _carries(proc / str(pid) / "environ", mark.encode())}
    found.update(*(tree(root) for root in roots))
    found.discard(os.getpid())
    processes = []
    for pid in sorted(found):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                processes.append(Process(pid, process.ppid(), " ".join(process.cmdline())))
    return processes


def _carries(environ: Path, mark: bytes) -> bool:
    try:
        return mark in environ.read_bytes()
    except OSError:
        return False
