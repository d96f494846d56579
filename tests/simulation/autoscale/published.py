"""The rule of KubeDL's published document on elastic jobs, with its mistakes, as `shared/facts` describes its source.

It reads one line of a worker's log at each look, and lives in the memory of a controller of all jobs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

INTERVAL = 30.0
"""Seconds between two looks at a job."""

OBSERVATIONS = 5
"""Observations of a size that are collected. Only the last of them decides."""

SLOWEST = 1.0
"""Seconds of a step above which an observation is dropped as inaccurate."""


class Parsed(NamedTuple):
    """What is read from one line of the log."""

    epoch: int
    batch: int
    seconds: float
    accuracy: float


def parse(line: str) -> Parsed | None:
    """Read a line of the log; None for one that is not about an epoch. Raises an error of Python for a line about an
    epoch that has another shape, where the controller ends with a panic."""
    fields = line.split("\t")
    if "Epoch" not in fields[0]:
        return None
    epoch = re.findall(r"[0-9]{1,2}", fields[0])[0]
    batch = re.findall(r"[0-9]{2,4}", fields[0])[0]
    seconds = re.findall(r"[0-9]{1,2}.[0-9]{3}", fields[1])[0]
    accuracy = re.findall(r"[0-9]{1,2}.[0-9]{1,2}", fields[5])[0]
    return Parsed(int(epoch), int(batch), float(seconds), float(accuracy))


def log_line(epoch: int, batch: int, seconds: float) -> str:
    """A line of the script that the document trains with."""
    time = f"Epoch: [{epoch}][{batch:4d}/1563]\tTime {seconds:6.3f} ({seconds:6.3f})"
    return f"{time}\tData  0.155 ( 0.170)\tLoss 2.5e+00 (2.6e+00)\tAcc@1  42.19 ( 39.71)\tAcc@5  75.00 ( 75.00)"


@dataclass
class Scaling:
    """The status of one job."""

    current: int
    last: int = 0
    goes_on: bool = True
    condition: str = "Start"
    forgotten: bool = False
    """Whether the controller looks at the job no more."""


@dataclass
class Controller:
    """The controller of all jobs: what it knows is lost with it."""

    jobs: dict[str, Scaling] = field(default_factory=dict)
    observed: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    """The seconds of steps, by the name of a job and its number of replicas."""

    def look(self, job: str, replicas: int, fewest: int, most: int, pending: bool, failed: bool, line: str) -> int:
        """How many replicas the job should have, from one look at it."""
        if job not in self.jobs:
            self.jobs[job] = Scaling(replicas)
            return replicas
        status = self.jobs[job]
        if status.forgotten:
            return replicas
        if failed or (pending and status.current <= fewest):
            status.forgotten = True
            return replicas
        if pending:
            status.last, status.current = status.current, status.last
            status.goes_on, status.condition = False, "Stop"
            return status.current
        if not status.goes_on:
            if status.condition == "ReachMaxMetric":
                status.condition = "Stop"
            return status.current
        parsed = parse(line)
        if parsed is None or parsed.seconds > SLOWEST:
            return status.current
        times = self.observed.setdefault(job, {})
        times.setdefault(status.current, []).append(parsed.seconds)
        if len(times[status.current]) >= OBSERVATIONS:
            self._compare(status, times, fewest, most)
        return status.current

    def _compare(self, status: Scaling, times: dict[int, list[float]], fewest: int, most: int) -> None:
        current, last = status.current, status.last
        if current == fewest < most:
            status.last, status.current, status.condition = current, 2 * current, "Continue"
        elif fewest < current <= most:
            before, now = (times[size][OBSERVATIONS - 1] / size for size in (last, current))
            if before <= now:
                status.last, status.current = current, last
                status.goes_on, status.condition = False, "ReachMaxMetric"
            elif current == most:
                status.goes_on, status.condition = False, "ReachMaxReplicas"
            else:
                status.last, status.current, status.condition = current, 2 * current, "Continue"
