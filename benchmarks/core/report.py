"""What is written: tables on the console and in Markdown, JSON with every sample, and the machine of each result."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
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
"""What is published: the summary, the page and the picture of each benchmark."""
RUNS = REPOSITORY / "benchmarks" / "runs"
"""The single runs on this machine, which git ignores."""
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


@dataclass(frozen=True)
class Table:
    """A table that is not of rivals, under a heading of its own if it has one. `name` is the one that it keeps when it
    is made again, `measured` says how and where its runs were, and `about` stands before it. The columns `text` are not
    numbers."""

    name: str
    measured: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    heading: str = ""
    about: str = ""
    text: Sequence[int] = (0,)


def section(part: Result | Table) -> list[str]:
    """A table with its heading, what stands before it, and the rivals that are absent."""
    lines = [f"## {part.heading}", ""] if part.heading else []
    if isinstance(part, Table):
        lines += [part.about, ""] if part.about else []
        return [*lines, *table(part.head, part.rows, part.text), ""]
    if part.rows:
        lines += [*table(COLUMNS, cells(part), text_columns=(0, len(COLUMNS) - 1)), ""]
    return [*lines, *(line for name, why in part.absent.items() for line in (f"{name} did not run: {why}.", ""))]


@dataclass(frozen=True)
class Summary:
    """What is published of a benchmark: its tables, of rivals (`cases`) or others."""

    title: str
    cases: Sequence[Result] = ()
    tables: Sequence[Table] = ()

    @property
    def parts(self) -> list[Result | Table]:
        """All tables."""
        return [*self.cases, *self.tables]


def markdown(summary: Summary) -> str:
    """All tables; a line on the machine precedes each table that was measured otherwise than the one before."""
    lines = [f"# {summary.title}", "", "`benchmarks/README.md` says what is measured and how.", ""]
    before = ""
    for part in summary.parts:
        own = part.measured if isinstance(part, Table) else f"{part.machine}; {part.how}"
        above = [f"{own}.", ""] if own != before else []
        heading, rest = section(part)[:2], section(part)[2:]
        lines += [*heading, *above, *rest] if part.heading else [*above, *heading, *rest]
        before = own
    return "\n".join(lines)


def _lines(value: Any, depth: int = 0) -> str:
    """JSON with a line for each field of a table and each of its rows, so that these are the lines of a difference."""
    each_row = isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value)
    if not each_row and not (isinstance(value, dict) and depth in (0, 2)):
        return json.dumps(value, ensure_ascii=False)
    inner = "  " * (depth + 1)
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(name)}: {_lines(one, depth + 1)}" for name, one in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{inner[2:]}}}"
    items = [inner + (_lines(one, depth + 1) if depth < 3 else json.dumps(one, ensure_ascii=False)) for one in value]
    return "[\n" + ",\n".join(items) + f"\n{inner[2:]}]"


def _rounded(value: Any) -> Any:
    """With nine digits, nanoseconds of a second: no table shows more."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return {key: _rounded(each) for key, each in value.items()} if isinstance(value, dict) else value


def write_json(path: Path, summary: Summary) -> None:
    """Write a summary, a line for each row of a table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_lines(_rounded(msgspec.to_builtins(summary))) + "\n")


def read(path: Path) -> Summary:
    """What is published, empty if there is no such file. Raises ValueError for a file of another kind."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except FileNotFoundError:
        return Summary("")
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no result of this benchmark ({error}): name another --output") from error


def merge(old: Summary, new: Sequence[Result | Table], order: Sequence[str] = ()) -> Summary:
    """The newest table of each name. With an `order` those of other names go; otherwise they stay where they are."""
    found = {part.name: part for part in (*old.parts, *new)}
    parts = [found[name] for name in order or found if name in found]
    return Summary(
        old.title,
        [part for part in parts if isinstance(part, Result)],
        [part for part in parts if isinstance(part, Table)],
    )


def write(
    path: Path,
    summary: Summary,
    text: Callable[[Summary], str],
    draw: Callable[[Sequence[Result], Path], None],
) -> None:
    """Write the tables as JSON and as a page, and a picture; `path` is that of the JSON."""
    write_json(path, summary)
    path.with_suffix(".md").write_text(text(summary))
    if drawn := [result for result in summary.cases if result.rows]:
        try:
            draw(drawn, path.with_suffix(".png"))
        except ModuleNotFoundError as error:
            print(f"No picture was drawn: {error}. Install '.[benchmark]', then --redraw.", file=sys.stderr)
