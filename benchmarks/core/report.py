"""What is written: tables on the console and in Markdown, JSON with every sample, and the machine of each result."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from core.ratios import Ratio, Row

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
COLUMNS = ("rival", "median", "min", "max", "lost", "ratio", "spread", "target", "reached", "notes")
MEBIBYTE = 1024.0**2

Unit = Literal["s", "bytes", "%", "requests"]


@dataclass(frozen=True)
class Machine:
    """Where and when a result was measured. `load_average` is that of the last 1, 5 and 15 minutes at the start."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    torch: str
    load_average: tuple[float, float, float]
    date: str
    commit: str

    def __str__(self) -> str:
        load = ", ".join(f"{value:.2f}" for value in self.load_average)
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_gib:g} GiB, Linux {self.kernel}, Python {self.python}, "
            f"torch {self.torch}; load at start {load}; {self.date}; commit {self.commit}"
        )


def this_machine() -> Machine:
    """The machine that this process runs on, now."""
    cpuinfo = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    names = (value.strip() for name, _, value in cpuinfo if name.strip() in ("model name", "Model", "cpu model"))
    return Machine(
        cpu=next(names, "unknown"),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3, 1),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=version_of("torch"),
        load_average=os.getloadavg(),
        date=now(),
        commit=commit_of(REPOSITORY),
    )


def now() -> str:
    """The time of day, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def version_of(package: str) -> str:
    """From the metadata: importing a package would load the benchmark with what the rivals are measured for."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def commit_of(repository: Path) -> str:
    """The commit of a checkout, and whether it has changes."""
    command = ["git", "-C", str(repository), "describe", "--always", "--abbrev=12", "--exclude=*"]
    command += ["--dirty= with changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@dataclass(frozen=True)
class Result:
    """The table of one case, and the machine it was measured on. `how` says how often and with what.

    `absent` maps each rival that could not take part to the reason. An empty `baseline` means that nothing is compared,
    but for `pairs`: each of these rivals with one of its own.
    """

    name: str
    title: str
    unit: Unit
    baseline: str
    rows: Sequence[Row]
    absent: Mapping[str, str]
    machine: Machine
    how: str
    pairs: Mapping[str, str] = field(default_factory=dict)

    @property
    def heading(self) -> str:
        """The title of the table."""
        return f"{self.name}: {self.title}" + (f" (ratio to {self.baseline})" if self.baseline else "")


def figure(value: float | None, unit: Unit, limit: float | None = None) -> str:
    """A value with its unit; "-" if there is none, and ">" before a time of `limit` or more, which is a lower bound."""
    if value is None:
        return "-"
    if unit == "bytes":
        return f"{value / MEBIBYTE:.1f} MiB"
    if unit == "requests":
        return f"{value:.2f}"
    more = "> " if limit is not None and value >= limit else ""
    return f"{value:.1f} %" if unit == "%" else f"{more}{value:.3f} s"


def ratio_text(ratio: Ratio | None, bound: bool = False) -> str:
    """A ratio with two significant digits; "-" if there is none, and "<=" before an upper bound."""
    if ratio is None or ratio == "lost":
        return ratio or "-"
    return ("<= " if bound else "") + (f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}")


def cells(result: Result) -> list[list[str]]:
    """The cells of a table, without its head."""
    return [
        [
            row.title,
            *(figure(value, result.unit, row.limit) for value in (row.median, row.low, row.high)),
            f"{row.lost}/{len(row.samples)}",
            ratio_text(row.ratio, row.bound),
            "" if row.spread is None or row.spread[0] == row.spread[1] else " to ".join(map(ratio_text, row.spread)),
            "" if row.target is None else f"<= {row.target:g}",
            {None: "", True: "yes", False: "no"}[row.reached],
            row.notes,
        ]
        for row in result.rows
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Collection[int]) -> list[str]:
    """The lines of a Markdown table; the other columns are numbers."""
    rules = ["---" if at in text_columns else "---:" for at in range(len(head))]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, rules, *rows)]


def section(result: Result) -> list[str]:
    """A table with its heading, and the rivals that are absent."""
    lines = [f"## {result.heading}", ""]
    if result.rows:
        lines += [*table(COLUMNS, cells(result), text_columns=(0, len(COLUMNS) - 1)), ""]
    return [*lines, *(line for name, why in result.absent.items() for line in (f"{name} did not run: {why}.", ""))]


def markdown(title: str, results: Sequence[Result]) -> str:
    """All tables; a line on the machine precedes each table that was measured otherwise than the one before."""
    lines = [f"# {title}", "", "`benchmarks/README.md` says what is measured and how.", ""]
    before = ""
    for result in results:
        heading, empty, *rest = section(result)
        measured = f"{result.machine}; {result.how}."
        lines += [heading, empty, *([measured, empty] if measured != before else []), *rest]
        before = measured
    return "\n".join(lines)


def write_json(path: Path, document: Any) -> None:
    """Write a document; its folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def read(path: Path) -> list[Result]:
    """The results of earlier runs, none if there is no such file. Raises ValueError for a file of another kind."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[Literal["cases"], list[Result]])["cases"]
    except FileNotFoundError:
        return []
    except (KeyError, msgspec.DecodeError) as error:
        raise ValueError(f"{path} is no result of this benchmark ({error}): name another --output") from error


def merge(old: Sequence[Result], new: Sequence[Result], order: Sequence[str]) -> list[Result]:
    """The newest result of each case in `order`; results of other cases go."""
    found = {result.name: result for result in (*old, *new)}
    return [found[name] for name in order if name in found]


def write(path: Path, title: str, results: Sequence[Result], draw: Callable[[Sequence[Result], Path], None]) -> None:
    """Write the results as JSON, as tables and as a picture; `path` is that of the JSON."""
    write_json(path, {"cases": results})
    path.with_suffix(".md").write_text(markdown(title, results))
    draw([result for result in results if result.rows], path.with_suffix(".png"))


def save_table(
    path: Path, title: str, about: str, head: Sequence[str], rows: Iterable[Sequence[str]], record: Sequence[Any]
) -> None:
    """Write a table that is not of rivals: `record` as JSON to `path`, and the rows as Markdown beside it."""
    machine = this_machine()
    write_json(path, {"machine": machine, "about": about, "rows": record})
    lines = [f"# {title}", "", f"{about}; {machine}.", "", *table(head, rows, text_columns=(1,)), ""]
    path.with_suffix(".md").write_text("\n".join(lines))
    print(f"Results are in {path.parent}.", file=sys.stderr)
