"""What /proc shows of a worker and its children.

Not psutil, which takes as long and has neither wait channels, page faults, waits for a processor nor debuggers.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from dlrover_run.processes.tree import children_of, read_stat

MAX_CHILDREN = 64
"""Children of one worker that are looked at; a data loader has fewer."""

MAX_DEPTH = 3
"""Generations below a worker: its data loaders, and what these start."""

_NANOSECONDS = 1e9
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessFigures(NamedTuple):
    """One process. `state` is the letter in /proc/PID/stat, `cpu` seconds of all its threads, `faults` page faults
    without a read from a disk, `read` and `written` bytes of its system calls, sockets and pipes included. `queued` are
    the seconds in which its main thread could have run and had no processor, `main` those in which it had one, and
    `turns` how often it got one; all are 0 where the kernel does not count them."""

    pid: int
    name: str
    state: str
    parent: int
    cpu: float
    faults: int
    read: int
    written: int
    queued: float = 0.0
    main: float = 0.0
    turns: int = 0

    @property
    def ready(self) -> float:
        """The seconds in which it used a processor, or waited for one: on a machine with too few of them a process that
        computes all the time shows little else."""
        return self.cpu + self.queued

    @property
    def runs(self) -> bool:
        """Whether its main thread uses a processor, or waits for one. The kernel counts such a wait only at its end."""
        return self.state == "R"

    @property
    def stopped(self) -> bool:
        return self.state == "T"


class WorkerFigures(NamedTuple):
    """A worker and the processes below it. `wchan` is the kernel function in which its main thread sleeps, empty if
    unknown; `traced` whether a debugger is attached. `voluntary_switches` is how often its main thread has begun to
    wait for something other than a processor, None if unknown. `main_faults` are the page faults of the main thread
    alone, None if unknown or while it sleeps."""

    own: ProcessFigures
    children: tuple[ProcessFigures, ...] = ()
    wchan: str = ""
    traced: bool = False
    voluntary_switches: int | None = None
    main_faults: int | None = None

    def never_waited(self, since: WorkerFigures) -> bool:
        """Whether its main thread has only run or waited for a processor since those figures. The processor time says
        the same on a machine that has processors for all; where a thread waits long for one, the kernel counts that
        wait only at its end."""
        known = self.voluntary_switches is not None and self.voluntary_switches == since.voluntary_switches
        return known and self.own.runs and since.own.runs


def read_process(pid: int, proc: Path = Path("/proc")) -> ProcessFigures | None:
    """The figures of a process; None if it has ended."""
    try:
        name, fields = read_stat(pid, proc)
    except OSError:
        return None
    read = written = 0
    # Only of a process of this user, and not of one that has ended.
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = _read(f"{proc}/{pid}/io").split()
        read, written = int(lines[1]), int(lines[3])
    queued, main, turns = 0.0, 0.0, 0
    with contextlib.suppress(OSError, ValueError):
        # Of the thread whose id is that of the process.
        ran, waited, turns = map(int, _read(f"{proc}/{pid}/schedstat").split())
        main, queued = ran / _NANOSECONDS, waited / _NANOSECONDS
    return ProcessFigures(
        pid=pid,
        name=name.decode(errors="replace"),
        state=fields[0].decode(),
        parent=int(fields[1]),
        cpu=(int(fields[11]) + int(fields[12])) / _TICKS,
        faults=int(fields[7]),
        read=read,
        written=written,
        queued=queued,
        main=main,
        turns=turns,
    )


def read_worker(pid: int, proc: Path = Path("/proc")) -> WorkerFigures | None:
    """The figures of a worker and of the processes below it; None if it has ended."""
    own = read_process(pid, proc)
    if own is None or own.state in "ZX":
        return None
    wchan = ""
    traced = False
    voluntary = None
    main_faults = None
    with contextlib.suppress(OSError):
        name = _read(f"{proc}/{pid}/wchan").decode(errors="replace").strip()
        wchan = "" if name == "0" else name
    with contextlib.suppress(OSError):
        status = _read(f"{proc}/{pid}/status")
        traced = b"\nTracerPid:\t0\n" not in status
        _, found, rest = status.partition(b"\nvoluntary_ctxt_switches:")
        voluntary = int(rest.split(b"\n", 1)[0]) if found else None
    if own.runs:
        with contextlib.suppress(OSError):
            _, fields = read_stat(pid, proc / str(pid) / "task")
            main_faults = int(fields[7])
    children: list[ProcessFigures] = []
    _add_children(pid, proc, children, MAX_DEPTH)
    return WorkerFigures(own, tuple(children), wchan, traced, voluntary, main_faults)


def socket_inodes(pid: int, proc: Path = Path("/proc")) -> set[int]:
    """The inodes of the sockets that a process holds."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"{proc}/{pid}/fd"):
            with contextlib.suppress(OSError):
                link = os.readlink(entry.path)
                if link.startswith("socket:["):
                    found.add(int(link[8:-1]))
    return found


def _add_children(pid: int, proc: Path, found: list[ProcessFigures], depth: int) -> None:
    for child in children_of(pid, proc):
        if len(found) >= MAX_CHILDREN:
            return
        figures = read_process(child, proc)
        if figures is not None:
            found.append(figures)
            if depth > 1:
                _add_children(child, proc, found, depth - 1)


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 16384)
    finally:
        os.close(fd)
