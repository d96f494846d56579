"""What was measured, each fault with the machine and the time it was measured on: a long comparison is run in parts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison import report
from comparison.machine import Machine


@dataclass(frozen=True)
class Measurement:
    """One fault as it came out, on which machine and when, and how often was asked for."""

    result: report.Result
    machine: Machine
    repetitions: int
    quick: bool


def as_json(measurements: Sequence[Measurement]) -> str:
    """Every fault with its samples and its sums."""
    cases = [
        report.as_record(one.result)
        | {"machine": dataclasses.asdict(one.machine), "repetitions": one.repetitions, "quick": one.quick}
        for one in measurements
    ]
    return json.dumps({"cases": cases}, indent=2, allow_nan=False) + "\n"


def read(path: Path) -> list[Measurement]:
    """What an earlier run wrote, nothing where there is no such file. ValueError for a file of another kind."""
    try:
        cases = json.loads(path.read_text())["cases"]
        return [_measurement(case) for case in cases]
    except FileNotFoundError:
        return []
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no result of this benchmark ({error!r}): name another --output") from error


def _measurement(case: dict[str, Any]) -> Measurement:
    load = tuple(case["machine"]["load_average"])
    machine = Machine(**case["machine"] | {"load_average": load})
    return Measurement(report.from_record(case), machine, case["repetitions"], case["quick"])


def merge(old: Sequence[Measurement], new: Mapping[str, Measurement], order: Sequence[str]) -> list[Measurement]:
    """The new ones, and of the old ones those that were not measured again; faults that there are no longer go."""
    found = {one.result.name: one for one in old} | dict(new)
    return [found[name] for name in order if name in found]


def markdown(title: str, measurements: Sequence[Measurement]) -> str:
    """The whole report as Markdown."""
    lines = [f"# {title}", "", "`benchmarks/README.md` says what is measured and how."]
    for one in measurements:
        heading, *table = report.section(one.result)
        often = f"{one.repetitions} repetitions in turn or as many as a table counts" + (", quick" if one.quick else "")
        lines += ["", heading, "", f"{report.machine_text(one.machine)}; {often}.", *table]
    return "\n".join(lines) + "\n"


def caption(measurements: Sequence[Measurement]) -> str:
    """One line under a picture: on what it was measured, and when."""
    machines = {(one.machine.cpu, one.machine.cores, one.machine.torch): None for one in measurements}
    days = sorted({one.machine.date[:10] for one in measurements})
    on = " and ".join(f"{cpu}, {cores} cores, torch {torch}" for cpu, cores, torch in machines)
    return f"2 nodes on one machine with a worker each, gloo, one allreduce every 20 ms; {on}; {' to '.join(days)}"
