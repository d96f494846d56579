"""What is measured. `launch_bench` has the rooms, the workers and the steps; the contenders here differ in one flag."""

from __future__ import annotations

from collections.abc import Iterator

from launch_bench.case import NANOSECOND, Case, Limits, Measured, until_last
from launch_bench.rivals import Job, Rival
from launch_bench.room import Room
from launch_bench.two_nodes import pair_start

from check_cost_bench.contenders import ADDED, TASK, WITH, WITHOUT, Task, launcher

MOST_ADDED = 1.5
"""How much --network-check may add on one node, by the time of the task itself."""

SAME = 1.1
"""Up to where two times count as the same: neighbouring runs of one and the same command differ by more than that."""

STEP = "step-of-2"
STEPS = {", computing": ("begins", "computed"), ", linking": ("computed", "linked"), ", ending": ("linked", "ended")}
"""The parts of the task, from which report to which. Forking its processes is part of computing."""

SCRIPTS = {"nothing": "first_line.py", "torch": "torch_line.py"}
SPAWN, FORKSERVER = "--start-method=spawn", "--start-method=forkserver"
METHODS = {
    "spawn": (SPAWN,),
    "forkserver": (FORKSERVER,),
    "preload": (FORKSERVER, "--preload=torch"),
}


def task_time(rival: Rival, room: Room, limits: Limits, job: Job) -> Measured:
    """From a warm template to where the workers may start."""
    rival.start(room, job)
    room.wait_reports("task-ended", 1, limits.start)
    at = {report.event.removeprefix("task-"): report.at_ns for report in room.reports}
    parts = {part: (at[end] - at[begin]) * NANOSECOND for part, (begin, end) in STEPS.items()}
    return Measured({"": (at["ended"] - at["begins"]) * NANOSECOND, **parts})


def start(rival: Rival, room: Room, limits: Limits, job: Job) -> Measured:
    """Start to the first line of the slower worker; for the task itself its own time."""
    if rival.name == TASK:
        return task_time(rival, room, limits, job)
    began = rival.start(room, job)
    return until_last(began, limits.start, lambda limit: room.wait_reports("first_line", job.workers, limit))


def kill(rival: Rival, room: Room, limits: Limits) -> Measured:
    """SIGKILL of rank 1 of two to a step of both ranks after that."""
    room.patient = False
    job = Job("steps.py", workers=2, max_restarts=3)
    rival.start(room, job)
    victim = room.wait_reports(STEP, job.workers, limits.start)[1]
    # A template learns meanwhile what its workers have imported, as in a job that has been at work for a while.
    room.settle(limits.settle)
    killed = room.kill(victim.pid)
    return until_last(
        killed,
        limits.recovery,
        lambda limit: room.wait_reports(STEP, job.workers, limit, first_attempt=victim.attempt + 1),
    )


def _start_case(method: str, imports: str, workers: int) -> Case:
    job = Job(SCRIPTS[imports], workers)

    def measure(rival: Rival, room: Room, limits: Limits) -> Measured:
        return start(rival, room, limits, job)

    options = METHODS[method]
    return Case(
        name=f"start-{method}-{imports}-{workers}",
        title=f"{' '.join(options)}, a script that imports {imports}, {workers} worker{'s' * (workers > 1)}: "
        "start to its first line",
        unit="s",
        rivals=(launcher(False, *options), launcher(True, *options), Task()),
        baseline=TASK,
        measure=measure,
        targets={(ADDED, ""): MOST_ADDED},
    )


def _all_cases() -> Iterator[Case]:
    for method in METHODS:
        for imports in SCRIPTS:
            for workers in (1, 2):
                yield _start_case(method, imports, workers)
    for method in ("spawn", "forkserver"):
        rivals = (launcher(False, *METHODS[method]), launcher(True, *METHODS[method]))
        yield Case(
            name=f"kill-{method}",
            title=f"{' '.join(METHODS[method])}: SIGKILL of one of 2 workers to the next step of both",
            unit="s",
            rivals=rivals,
            baseline=WITHOUT,
            measure=kill,
            targets={(WITH, ""): SAME},
        )
    for method in ("spawn", "forkserver"):
        rivals = (launcher(False, *METHODS[method]), launcher(True, *METHODS[method]))
        yield Case(
            name=f"pair-{method}",
            title=f"{' '.join(METHODS[method])}: start of the second of 2 nodes to the first line on both",
            unit="s",
            rivals=rivals,
            baseline="",
            measure=pair_start,
        )


CASES = tuple(_all_cases())
