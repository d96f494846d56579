"""Hangs with two ranks on one GPU, and jobs that only seem to hang: what the launcher reports of them.

The faults are those of `stalls.py`, in the same worker, so the outcome is read in the same way.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from core.launchers import OURS, Job, Launcher
from core.ratios import Late
from core.run import NANOSECOND
from stall_matrix.kinds import BY_NAME, DEVICE
from stall_matrix.kinds import Key as Kind
from stall_matrix.trial import Trial, trial_of
from stalls import EVERY_RANK, PRINTED, stalls_in, wait_for_event

from gpu import fixtures
from gpu.jobs import open_job
from gpu.plan import INNOCENTS, Key, Record
from gpu.setting import Clock, Setting

RANKS, GUILTY = 2, 1

TRAINING = 4.0
"""Seconds of training before a fault."""

ALL_WAIT = 95.0
"""The limit where all ranks wait for the device: the launcher reports that after 75 s, as they may compute."""

WAIT = 600.0
"""Seconds of other waits, which the limit of the run cuts short."""

AFTERWARDS = 4.0
"""Seconds of training after an innocent pause, in which a late report would come."""

OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Case:
    """A fault of `stalls.py` under another name, and the flags of the job. `pause` is the seconds of an innocent one on
    a GPU, and in a rehearsal, and `limit` the seconds after which a hang that was not reported counts as one that never
    will be."""

    fault: str
    title: str
    options: tuple[str, ...] = ()
    pause: tuple[float, float] = (0.0, 0.0)
    limit: float = 30.0


CASES = {
    "sleep": Case("sleep", "sleeps in its data"),
    "stop": Case("stopped", "stopped by SIGSTOP"),
    "kernel": Case("endless-kernel", "a kernel that never ends", limit=ALL_WAIT),
    OPTIMIZER: Case("sleep", "sleeps, with --progress=optimizer", ("--progress=optimizer",)),
    "left": Case("left", "has left the loop, waits in a barrier", limit=ALL_WAIT),
    "long-kernel": Case("kernel", "a kernel of 40 s in all ranks", pause=(40.0, 8.0)),
    "compile": Case("compilation", "torch.compile in one rank", pause=(15.0, 8.0)),
    "checkpoint": Case("checkpoint-barrier", "one rank writes a checkpoint, the other waits", pause=(15.0, 8.0)),
}

LONG = ("left", "kernel", "long-kernel", "compile", "checkpoint")
"""The cases whose report comes after 75 s or not at all. A rank that waits keeps the GPU busy, and the driver shares
the time of the GPU among the processes, so the others are not done beside them."""


def pause_of(case: Case, setting: Setting) -> float:
    """The seconds of an innocent pause."""
    return setting.scaled(*case.pause)


def run_case(key: Key, setting: Setting, clock: Clock, recorded: Path) -> Record:
    """Run one job with a fault; raw outputs of a hang go to the folder `recorded`. Raises Lost."""
    case = CASES[key.case]
    fault = BY_NAME[case.fault]
    pause = pause_of(case, setting)
    faulty = EVERY_RANK if fault.together else GUILTY
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(open_job(key, recorded))
        journal, logs = run.directory / "journal", run.directory / "logs"
        view = setting.enter_device(run.directory, stack)
        environment = {
            **view.environment,
            "BENCHMARK_FAULT": f"{case.fault} {faulty} {TRAINING} {pause} -",
            "BENCHMARK_GUILTY": str(GUILTY),
            **({"BENCHMARK_OPTIMIZER": "1"} if case.options else {}),
        }
        method = ("--start-method=forkserver", "--preload=torch", "--stall-action=dump")
        where = (f"--journal={journal}", f"--log-dir={logs}")
        flags = (*method, *where, *case.options)
        Launcher("", OURS, flags, environment).start(run, Job("stalling.py", RANKS))
        trains = run.wait("step", RANKS, clock.left(WAIT))
        began = run.wait("fault", 1, clock.left(WAIT), only={GUILTY})[0]
        fault_at = began.at_ns * NANOSECOND
        # A report of before is none of this hang.
        printed, awaited, took = len(run.output), "", 0.0
        if fault.innocent:
            over = run.wait("over", RANKS if fault.together else 1, clock.left(WAIT))
            took = (max(one.at_ns for one in over) - began.at_ns) * NANOSECOND
            run.settle(clock.left(AFTERWARDS))
            fault_at = float("inf")
        else:
            limit = clock.left(setting.patience(case.limit))
            found = run.wait_output(PRINTED, limit, after=printed)
            if not found and limit < case.limit:
                raise Late(f"no report in {limit:.0f} s, when the time was up")
            awaited = view.awaited(GUILTY)
            if found:
                wait_for_event(run, journal, fault_at)
            pids = [report.pid for report in sorted(trains, key=lambda one: one.rank)]
            fixtures.record(recorded / key.case, run, pids, logs, view.environment)
        ended = time.monotonic()
        events = stalls_in(journal)
    watched = min(ended, fault_at) - max(report.at_ns for report in trains) * NANOSECOND
    kind = Kind(case.fault, RANKS, key.turn, pause, DEVICE)
    trial = trial_of(kind, GUILTY, fault_at, events, watched, awaited=awaited)
    return record_of(key, setting.device, trial, took)


def record_of(key: Key, device: str, trial: Trial, took: float = 0.0) -> Record:
    """What is kept of a run; an innocent pause `took` so many seconds. Pure."""
    if key.part == INNOCENTS:
        return Record(
            key,
            device,
            {"pause": took, "watched": trial.watched, "false reports": float(trial.wrong_reports)},
            {"reports": "; ".join(line or "no rank named" for line in trial.wrong)},
        )
    named = ", ".join(map(str, trial.named))
    return Record(
        key,
        device,
        {"seconds": trial.seconds, "false reports": float(trial.wrong_reports)},
        {
            "named": named,
            "rank": _right(trial.right_rank),
            "function": trial.function,
            "line": _right(trial.right_line) if BY_NAME[trial.fault].functions else "no stack",
            "operation": trial.operation,
            "awaited": trial.awaited,
            "right operation": _right(trial.right_operation),
            "reported": trial.reported,
        },
    )


def _right(right: bool) -> str:
    return "yes" if right else "no"
