"""For how long `save(memory=True)` stops a loop whose state is on the device, beside the copy to pinned memory alone,
and how long the state takes to come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from core.launchers import FORKSERVER, Job
from core.ratios import Lost

from gpu.jobs import open_job
from gpu.plan import Key, Record
from gpu.setting import Clock, Setting

MEBIBYTES = {"1 GiB": (1024, 32), "4 GiB": (4096, 64)}
"""The size of the state by the case, on a GPU and in a rehearsal."""

TIMES, PER_GIB = 2.0, 0.02
"""A save may stop the loop for twice the time of the copy, and 20 ms for each GiB."""


def run_case(key: Key, setting: Setting, clock: Clock, recorded: Path) -> Record:
    """Save and restore in one job. Raises Lost."""
    mebibytes = int(setting.scaled(*MEBIBYTES[key.case]))
    with open_job(key, recorded) as run:
        environment = {**setting.environment, "BENCHMARK_MEBIBYTES": str(mebibytes)}
        run.start(FORKSERVER.command(Job("gpu_pause.py", 1)), environment)
        run.wait_end(clock.left(600.0))
        pauses = pauses_of(run.output)
    if "same" not in pauses:
        raise Lost("the job ended before its last line")
    return Record(key, setting.device, figures_of(pauses, mebibytes / 1024))


def pauses_of(printed: str) -> dict[str, list[float]]:
    """The seconds that a worker has printed, by what it did. Pure."""
    found: dict[str, list[float]] = {}
    for line in printed.splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == "pause":
            found.setdefault(words[1], []).append(float(words[2]))
    return found


def figures_of(pauses: Mapping[str, Sequence[float]], gib: float) -> dict[str, float | None]:
    """The figures of a job. Only from the second save on there is memory that was prepared for it, so the first one is
    apart; so is the first copy, which warms up. Pure."""
    copy = median(pauses["copy"][1:])
    return {
        "GiB": gib,
        "first save": pauses["save"][0],
        "save": median(pauses["save"][1:]),
        "copy": copy,
        "pageable": pauses["pageable"][0],
        "restore": pauses["restore"][0],
        "target": TIMES * copy + PER_GIB * gib,
    }


HEAD = ("state", "1st save", "2nd and 3rd", "copy alone", "pageable", "restore", "target", "reached", "notes")


def row(record: Record) -> list[str]:
    """A row of the table."""
    if record.why_empty:
        return [record.key.case, *["-"] * 7, record.why_empty]
    figures = {name: value or 0.0 for name, value in record.figures.items()}
    reached = figures["save"] <= figures["target"]
    times = (f"{figures[name]:.3f} s" for name in ("first save", "save", "copy", "pageable", "restore", "target"))
    return [f"{figures['GiB']:g} GiB", *times, "yes" if reached else "no", ""]
