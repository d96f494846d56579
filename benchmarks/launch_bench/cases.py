"""What is measured, and what a good result would be.

A case is one entry of `CASES`: who takes part, against whom the ratio is taken, the targets, and a function that runs
one rival once. A new case, on two nodes say, is one more function and one more entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from launch_bench.processes import add_up, classify, of_run, read_pss
from launch_bench.rivals import (
    FLOOR,
    OURS_FORKSERVER,
    OURS_SPAWN,
    TORCHRUN,
    TORCHRUN_UNSHARED,
    Job,
    Rival,
)
from launch_bench.room import Room

NANOSECOND = 1e-9

WITHOUT_TEMPLATE = ", without its template"
WITH_WORKERS = ", with the workers"


@dataclass(frozen=True)
class Limits:
    """Seconds. `settle` is the same for every rival; it is when a template may learn what the workers import."""

    start: float = 120.0
    recovery: float = 120.0
    settle: float = 3.0


@dataclass(frozen=True)
class Measured:
    """The figures of one run, in seconds or bytes; the part "" is the rival itself."""

    values: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One comparison. `targets` say, for a rival and a part of it, how large the ratio to `baseline` may be."""

    name: str
    title: str
    unit: Literal["s", "bytes"]
    rivals: tuple[Rival, ...]
    baseline: str
    measure: Callable[[Rival, Room, Limits], Measured]
    targets: Mapping[tuple[str, str], float] = field(default_factory=dict)


def help_time(rival: Rival, room: Room, limits: Limits) -> Measured:
    """Start to end of `--help`."""
    began = rival.start_help(room)
    return Measured({"": (room.wait_end(limits.start) - began) * NANOSECOND})


def _start_time(rival: Rival, room: Room, limits: Limits, job: Job) -> Measured:
    began = rival.start(room, job)
    reports = room.wait_reports("first_line", job.workers, limits.start)
    return Measured({"": (max(report.at_ns for report in reports) - began) * NANOSECOND})


def first_line(rival: Rival, room: Room, limits: Limits) -> Measured:
    """Start to the first line of the slower of two workers that import nothing."""
    return _start_time(rival, room, limits, Job("first_line.py", workers=2))


def torch_line(rival: Rival, room: Room, limits: Limits) -> Measured:
    """Start to the first line after `import torch` of the slowest of eight workers."""
    return _start_time(rival, room, limits, Job("torch_line.py", workers=8))


def _memory(rival: Rival, room: Room, limits: Limits, job: Job, with_workers: bool = False) -> Measured:
    rival.start_parent(room, job)
    reports = room.wait_reports("ready", job.workers, limits.start)
    room.settle(limits.settle)
    processes = of_run([launcher.pid for launcher in room.launchers], str(room.directory))
    roles = classify(processes, [report.pid for report in reports])
    memory = add_up(roles, read_pss(roles))
    values = {"": float(memory.launcher + memory.template)}
    forks = rival.name == OURS_FORKSERVER.name
    if forks:
        values[WITHOUT_TEMPLATE] = float(memory.launcher)
    if with_workers:
        values[WITH_WORKERS] = float(memory.launcher + memory.template + memory.workers)
    return Measured(values, note="no template found" if forks and not memory.template else "")


def memory(rival: Rival, room: Room, limits: Limits) -> Measured:
    """PSS of the launcher of two workers that import nothing."""
    return _memory(rival, room, limits, Job("wait.py", workers=2))


def torch_memory(rival: Rival, room: Room, limits: Limits) -> Measured:
    """PSS of the launcher of two workers that have imported torch."""
    return _memory(rival, room, limits, Job("torch_wait.py", workers=2), with_workers=True)


def recovery(rival: Rival, room: Room, limits: Limits) -> Measured:
    """SIGKILL of rank 1 of two until both ranks have gone through `init_process_group` in a later attempt."""
    job = Job("gloo.py", workers=2, max_restarts=3)
    rival.start(room, job)
    victim = room.wait_reports("initialised", job.workers, limits.start)[1]
    room.settle(limits.settle)
    # A rival may have restarted of itself while it settled; the newest rank 1 is the one that is alive.
    victim = [report for report in room.reports if report.event == "initialised" and report.rank == 1][-1]
    killed = room.kill(victim.pid)
    rival.after_kill(room, job, victim)
    reports = room.wait_reports("initialised", job.workers, limits.recovery, first_attempt=victim.attempt + 1)
    took = (max(report.at_ns for report in reports) - killed) * NANOSECOND
    return Measured({"": took}, note=f"restarts: {reports[0].attempt - victim.attempt}")


CASES = (
    Case(
        name="help",
        title="--help",
        unit="s",
        rivals=(OURS_SPAWN, TORCHRUN, FLOOR),
        baseline=TORCHRUN.name,
        measure=help_time,
    ),
    Case(
        name="first-line",
        title="start to the first line of a script that imports nothing, 2 workers",
        unit="s",
        rivals=(OURS_SPAWN, OURS_FORKSERVER, TORCHRUN, FLOOR),
        baseline=TORCHRUN.name,
        measure=first_line,
        targets={(OURS_SPAWN.name, ""): 0.35},
    ),
    Case(
        name="memory",
        title="memory of the launcher (PSS), 2 workers that import nothing",
        unit="bytes",
        rivals=(OURS_SPAWN, OURS_FORKSERVER, TORCHRUN, FLOOR),
        baseline=TORCHRUN.name,
        measure=memory,
        targets={
            (OURS_SPAWN.name, ""): 0.25,
            (OURS_FORKSERVER.name, ""): 0.25,
            (OURS_FORKSERVER.name, WITHOUT_TEMPLATE): 0.25,
        },
    ),
    Case(
        name="torch-memory",
        title="memory of the launcher (PSS), 2 workers that have imported torch",
        unit="bytes",
        rivals=(OURS_SPAWN, OURS_FORKSERVER, TORCHRUN, FLOOR),
        baseline=TORCHRUN.name,
        measure=torch_memory,
        targets={(OURS_SPAWN.name, ""): 0.25, (OURS_FORKSERVER.name, WITHOUT_TEMPLATE): 0.25},
    ),
    Case(
        name="kill",
        title="SIGKILL of one of 2 gloo workers to all ranks through init_process_group again",
        unit="s",
        rivals=(OURS_SPAWN, OURS_FORKSERVER, TORCHRUN, TORCHRUN_UNSHARED, FLOOR),
        baseline=TORCHRUN_UNSHARED.name,
        measure=recovery,
        targets={(OURS_SPAWN.name, ""): 1.0, (OURS_FORKSERVER.name, ""): 0.2},
    ),
    Case(
        name="torch-start",
        title="start to the first line after `import torch` of all 8 workers",
        unit="s",
        rivals=(OURS_SPAWN, OURS_FORKSERVER, TORCHRUN, FLOOR),
        baseline=TORCHRUN.name,
        measure=torch_line,
        targets={(OURS_FORKSERVER.name, ""): 0.4},
    ),
)
