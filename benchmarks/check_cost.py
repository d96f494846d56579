"""What --network-check costs: the launcher with and without it, and the check itself. See `benchmarks/README.md`."""

from __future__ import annotations

import sys

from core.cases import Benchmark, Case, Limits, Measure
from core.launchers import OURS, WORKERS, Floor, Job, Launcher
from core.ratios import Measured, Sample
from core.run import NANOSECOND, Run
from core.series import draw_nothing
from launch import pair_start, restart_time, start_time

WITHOUT, WITH, ADDED = "without the check", "with the check", "added by the check"
TASK = "the task itself"

MAX_ADDED = 1.5
"""How much --network-check may add on one node, as a ratio to the time of the task itself."""

SAME = 1.1
"""Up to this ratio, two times count as equal: neighbouring runs of one command differ by more."""

PARTS = {", computing": ("begins", "computed"), ", linking": ("computed", "linked"), ", ending": ("linked", "ended")}
"""The parts of the task, from which report to which. Computing includes forking the check processes."""

SCRIPTS = {"nothing": "first_line.py", "torch": "torch_line.py"}
METHODS = {
    "spawn": ("--start-method=spawn",),
    "forkserver": ("--start-method=forkserver",),
    "preload": ("--start-method=forkserver", "--preload=torch"),
}


class Task(Floor):
    """The check itself: no launcher, no job, and a template that has imported torch before the clock starts."""


def task_time(run: Run, limits: Limits, workers: int) -> Measured:
    """From a warm template until the workers may start."""
    command = [sys.executable, str(WORKERS / "check_task.py"), str(workers)]
    run.start(command, {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"})
    run.wait("task-ended", 1, limits.start)
    at = {report.event.removeprefix("task-"): report.at_ns for report in run.reports}
    parts = {part: (at[end] - at[begin]) * NANOSECOND for part, (begin, end) in PARTS.items()}
    return Measured({"": (at["ended"] - at["begins"]) * NANOSECOND, **parts})


def add_difference(samples: list[Sample]) -> list[Sample]:
    """The samples, and for each turn what the run with the check took longer than the one without.

    A turn in which either was lost or did not end has no difference: it counts as lost.
    """
    without = {sample.turn: sample.measured for sample in samples if sample.rival == WITHOUT}
    added = []
    for rival, turn, measured in samples:
        if rival == WITH and (other := without.get(turn)):
            values = None
            if measured.values and other.values and not measured.unended | other.unended:
                values = {"": measured.values[""] - other.values[""]}
            added.append(Sample(ADDED, turn, Measured(values)))
    return [*samples, *added]


def _start_case(method: str, imports: str, workers: int) -> Case:
    job = Job(SCRIPTS[imports], workers)

    def measure(rival: Launcher | Task, run: Run, limits: Limits) -> Measured:
        return task_time(run, limits, workers) if isinstance(rival, Task) else start_time(job)(rival, run, limits)

    return Case(
        f"start-{method}-{imports}-{workers}",
        f"{' '.join(METHODS[method])}, a script that imports {imports}, {workers} worker{'s' * (workers > 1)}: "
        "start to its first line",
        "s",
        (*_with_and_without(method), Task(TASK)),
        TASK,
        measure,
        {(ADDED, ""): MAX_ADDED},
        derive=add_difference,
    )


def _with_and_without(method: str) -> tuple[Launcher, Launcher]:
    options = METHODS[method]
    return Launcher(WITHOUT, OURS, options), Launcher(WITH, OURS, (*options, "--network-check"))


def _job_case(method: str, name: str, title: str, baseline: str, measure: Measure) -> Case:
    title, targets = f"{' '.join(METHODS[method])}: {title}", {(WITH, ""): SAME} if baseline else {}
    return Case(f"{name}-{method}", title, "s", _with_and_without(method), baseline, measure, targets)


KILL = ("kill", "SIGKILL of one of 2 workers to the next step of both", WITHOUT, restart_time("steps.py", "step-of-2"))
PAIR = ("pair", "start of the second of 2 nodes to the first line on both", "", pair_start)
CASES = (
    *(_start_case(method, imports, workers) for method in METHODS for imports in SCRIPTS for workers in (1, 2)),
    *(_job_case(method, *rest) for rest in (KILL, PAIR) for method in ("spawn", "forkserver")),
)

BENCHMARK = Benchmark(
    "What --network-check costs",
    "node-check/cost",
    lambda options: CASES,
    repetitions=7,
    # 16 tables of the same rivals are read as tables.
    draw=draw_nothing,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
