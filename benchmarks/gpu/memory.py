"""Whether the memory of the device is free when a new worker starts, after a kill of one whose data loaders hold it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from core.launchers import Job
from core.ratios import Late, Lost
from core.run import NANOSECOND, Report

from gpu.jobs import open_job
from gpu.kills import RIVALS
from gpu.plan import Key, Record
from gpu.setting import Clock, Setting

CASES = ("forkserver", "torchrun")
LOADERS = 2
SETTLE = 1.0
LINGER = 4.0
"""Seconds after which a loader has ended by itself (`workers/gpu_holding.py`)."""

RECOVERY_LIMIT = 30.0

INTERVAL = 0.01
"""Seconds between two looks at the used memory."""

FREE_SHARE = 0.5
"""The memory is free once less than this share of what was used at the kill is in use: another process may use some,
and the new worker has not taken its own yet."""


class Sample(NamedTuple):
    """The bytes of the device that are in use at a time of the monotonic clock."""

    at_ns: int
    used: int


@contextlib.contextmanager
def sampled(wanted: bool) -> Iterator[list[Sample]]:
    """The used memory of the first device, as a list that grows until the block ends; empty if it is not wanted."""
    samples: list[Sample] = []
    if not wanted:
        yield samples
        return
    import pynvml

    nvml: Any = pynvml
    nvml.nvmlInit()
    handle, over = nvml.nvmlDeviceGetHandleByIndex(0), threading.Event()

    def look() -> None:
        while not over.wait(INTERVAL):
            samples.append(Sample(time.monotonic_ns(), nvml.nvmlDeviceGetMemoryInfo(handle).used))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
        nvml.nvmlShutdown()


def freed_ns(samples: Sequence[Sample], killed_ns: int) -> int | None:
    """When the memory was free after a kill; None if it was not, or nothing was sampled. Pure."""
    before = [sample.used for sample in samples if sample.at_ns <= killed_ns]
    if not before:
        return None
    limit = before[-1] * FREE_SHARE
    return next((one.at_ns for one in samples if one.at_ns > killed_ns and one.used < limit), None)


def record_of(
    key: Key,
    device: str,
    reports: Sequence[Report],
    ended_ns: int | None,
    samples: Sequence[Sample],
    killed_ns: int,
) -> Record:
    """What is kept of a run whose worker was killed at that time. `ended_ns` is when the last process had ended that
    held the device before, None if one outlived the measurement. Pure."""

    def first(event: str) -> int | None:
        return min((one.at_ns for one in reports if one.event == event and one.at_ns > killed_ns), default=None)

    def after(at_ns: int | None) -> float | None:
        return None if at_ns is None else (at_ns - killed_ns) * NANOSECOND

    figures = {
        "started": after(first("started")),
        "holders ended": after(ended_ns),
        "free": after(freed_ns(samples, killed_ns)),
        "held again": after(first("held")),
        "without memory": float(sum(one.event == "no-memory" and one.at_ns > killed_ns for one in reports)),
    }
    # Of a rehearsal nothing is sampled; then the end of the processes is what there is.
    free = figures["free"] if samples else figures["holders ended"]
    early = figures["started"] is not None and (free is None or figures["started"] < free)
    return Record(key, device, figures, {"started before it was free": "yes" if early else "no"})


def run_case(key: Key, setting: Setting, clock: Clock, recorded: Path) -> Record:
    """Kill the only worker of a job. Raises Lost if the job ends before."""
    launcher = RIVALS[key.case].launcher
    launcher = replace(launcher, environment={**launcher.environment, **setting.environment})
    with open_job(key, recorded) as run, sampled(not setting.rehearsal) as samples:
        launcher.start(run, Job("gpu_holding.py", 1, max_restarts=3))
        worker = run.wait("held", 1, clock.left(600.0))[0]
        run.wait("loader", 1, clock.left(600.0))
        run.settle(SETTLE)
        holders = [worker.pid, *(one.pid for one in run.reports if one.event == "loader")]
        run.watch(holders)
        killed = run.kill(worker.pid)
        # A job that finds no memory may end; what was seen until then counts.
        with contextlib.suppress(Late, Lost):
            run.wait("held", 1, clock.left(setting.patience(RECOVERY_LIMIT)), killed)
            # A loader that was not ended goes by itself; its end is seen only while the run waits.
            run.settle(clock.left(LINGER))
        ends = [run.ends.get(pid) for pid in holders]
        ended = max(end for end in ends if end is not None) if all(ends) else None
        return record_of(key, setting.device, run.reports, ended, samples, killed)


HEAD = ("launcher", "new worker", "holders ended", "memory free", "holds it again", "before it was free", "notes")


def row(record: Record) -> list[str]:
    """A row of the table."""
    name = RIVALS[record.key.case].launcher.name
    if record.why_empty:
        return [name, *["-"] * 5, record.why_empty]
    times = (record.figures[one] for one in ("started", "holders ended", "free", "held again"))
    failed = int(record.figures["without memory"] or 0)
    note = f"{failed} of its starts failed for want of memory" if failed else ""
    cells = ("-" if value is None else f"{value:.2f} s" for value in times)
    return [name, *cells, record.words["started before it was free"], note]
