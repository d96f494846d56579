"""Launching: dlrover-run, torchrun and no launcher at all, on one node and on two. See `benchmarks/README.md`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from core.cases import Benchmark, Case, Limits
from core.launchers import FLOOR, FORKSERVER, OWN_STORE, SPAWN, TORCHRUN, Job, Launcher, Rival, free_port
from core.processes import classify, pss
from core.ratios import Measured
from core.run import NANOSECOND, Run, until_last

WITHOUT_TEMPLATE = ", without its template"
WITH_WORKERS = ", with the workers"


def help_time(rival: Rival, run: Run, limits: Limits) -> Measured:
    """Start to end of `--help`."""
    began = rival.start_help(run)
    return Measured({"": (run.wait_end(limits.start) - began) * NANOSECOND})


def start_time(job: Job) -> Callable[[Rival, Run, Limits], Measured]:
    """Start to the first line of the slowest worker."""

    def measure(rival: Rival, run: Run, limits: Limits) -> Measured:
        began = rival.start(run, job)
        return until_last(began, limits.start, lambda limit: run.wait("first_line", job.workers, limit))

    return measure


def memory(script: str, with_workers: bool) -> Callable[[Rival, Run, Limits], Measured]:
    """PSS of the launcher of two workers."""

    def measure(rival: Rival, run: Run, limits: Limits) -> Measured:
        job = Job(script, workers=2, with_parent=True)
        rival.start(run, job)
        reports = run.wait("ready", job.workers, limits.start)
        run.settle(limits.settle)
        total = {"launcher": 0, "template": 0, "worker": 0}
        for pid, role in classify(run.processes(), [report.pid for report in reports]).items():
            total[role] += pss(pid)
        launcher = float(total["launcher"] + total["template"])
        values = {"": launcher}
        forks = isinstance(rival, Launcher) and set(FORKSERVER.options) <= {*rival.options}
        if forks:
            values[WITHOUT_TEMPLATE] = float(total["launcher"])
        if with_workers:
            values[WITH_WORKERS] = launcher + total["worker"]
        return Measured(values, "no template found" if forks and not total["template"] else "")

    return measure


def restart_time(script: str, event: str) -> Callable[[Rival, Run, Limits], Measured]:
    """SIGKILL of rank 1 of two until both ranks have reported an event in a later attempt."""

    def measure(rival: Rival, run: Run, limits: Limits) -> Measured:
        run.ends_by_itself = script == "gloo.py"
        job = Job(script, workers=2, max_restarts=3)
        rival.start(run, job)
        run.wait(event, job.workers, limits.start)
        # The template learns meanwhile what its workers have imported, as in a job that has run for a while.
        run.settle(limits.settle)
        # If the rival restarted by itself meanwhile, the newest rank 1 is the one that is alive.
        victim = [report for report in run.reports if report.event == event and report.rank == 1][-1]
        killed = run.kill(victim.pid)
        rival.after_kill(run, job, victim)
        return until_last(
            killed,
            limits.recovery,
            lambda limit: run.wait(event, job.workers, limit, first_attempt=victim.attempt + 1),
            lambda reports: f"restarts: {reports[0].attempt - victim.attempt}",
        )

    return measure


def pair_start(rival: Rival, run: Run, limits: Limits) -> Measured:
    """Start of the second of two nodes, while the first one waits, to the first line on both."""
    job = Job("first_line.py", workers=1, nodes=2, nnodes="2", port=free_port())
    rival.start(run, job)
    run.settle(limits.settle)
    began = rival.start(run, job)
    return until_last(began, limits.start, lambda limit: run.wait("first_line", job.nodes, limit))


OUR_LAUNCHER = {(SPAWN.name, ""): 0.25, (FORKSERVER.name, WITHOUT_TEMPLATE): 0.25}
case = partial(Case, unit="s", rivals=(SPAWN, FORKSERVER, TORCHRUN, FLOOR), baseline=TORCHRUN.name)
CASES = (
    case("help", "--help", rivals=(SPAWN, TORCHRUN, FLOOR), measure=help_time),
    case(
        "first-line",
        "start to the first line of a script that imports nothing, 2 workers",
        measure=start_time(Job("first_line.py", workers=2)),
        targets={(SPAWN.name, ""): 0.35},
    ),
    case(
        "memory",
        "memory of the launcher (PSS), 2 workers that import nothing",
        unit="bytes",
        measure=memory("wait.py", with_workers=False),
        targets=OUR_LAUNCHER | {(FORKSERVER.name, ""): 0.25},
    ),
    case(
        "torch-memory",
        "memory of the launcher (PSS), 2 workers that have imported torch",
        unit="bytes",
        measure=memory("torch_wait.py", with_workers=True),
        targets=OUR_LAUNCHER,
    ),
    case(
        "kill",
        "SIGKILL of one of 2 gloo workers to all ranks through init_process_group again",
        rivals=(SPAWN, FORKSERVER, TORCHRUN, OWN_STORE, FLOOR),
        baseline=OWN_STORE.name,
        measure=restart_time("gloo.py", "initialised"),
        targets={(SPAWN.name, ""): 1.0, (FORKSERVER.name, ""): 0.2},
    ),
    case(
        "torch-start",
        "start to the first line after `import torch` of all 8 workers",
        measure=start_time(Job("torch_line.py", workers=8)),
        targets={(FORKSERVER.name, ""): 0.4},
    ),
    case(
        "pair-start",
        "start of the second of 2 nodes to the first line on both",
        rivals=(SPAWN, FORKSERVER, TORCHRUN),
        measure=pair_start,
        targets={(SPAWN.name, ""): 0.5},
    ),
)

BENCHMARK = Benchmark(
    "Launching: dlrover-run, torchrun and no launcher at all",
    "launch",
    lambda options: CASES,
    repetitions=7,
    quick_repetitions=2,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
