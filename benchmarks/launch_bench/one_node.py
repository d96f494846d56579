"""The cases on one node."""

from __future__ import annotations

from comparison.memory import read_pss

from launch_bench.case import NANOSECOND, Case, Limits, Measured, until_last
from launch_bench.processes import add_up, classify, of_run
from launch_bench.rivals import FLOOR, OURS_FORKSERVER, OURS_SPAWN, TORCHRUN, TORCHRUN_UNSHARED, Job, Rival
from launch_bench.room import Room

WITHOUT_TEMPLATE = ", without its template"
WITH_WORKERS = ", with the workers"


def help_time(rival: Rival, room: Room, limits: Limits) -> Measured:
    """Start to end of `--help`."""
    began = rival.start_help(room)
    return Measured({"": (room.wait_end(limits.start) - began) * NANOSECOND})


def _start_time(rival: Rival, room: Room, limits: Limits, job: Job) -> Measured:
    began = rival.start(room, job)
    return until_last(began, limits.start, lambda limit: room.wait_reports("first_line", job.workers, limit))


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
    return until_last(
        killed,
        limits.recovery,
        lambda limit: room.wait_reports("initialised", job.workers, limit, first_attempt=victim.attempt + 1),
        lambda reports: f"restarts: {reports[0].attempt - victim.attempt}",
    )


ONE_NODE = (
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
