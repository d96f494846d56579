"""What a person gets: a table on the console and in Markdown, and a JSON with every sample."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from comparison.machine import Machine
from comparison.ratios import Row

COLUMNS = ("rival", "median", "min", "max", "lost", "ratio", "target", "reached", "notes")
MEBIBYTE = 1024.0**2
WIDTH = 190

Unit = Literal["s", "bytes", "%", "requests"]


@dataclass(frozen=True)
class Result:
    """One case as it came out; `absent` says of each rival that could not take part why.

    `baseline` is empty where nothing is compared.
    """

    name: str
    title: str
    unit: Unit
    baseline: str
    rows: Sequence[Row]
    absent: dict[str, str]


def figure(value: float | None, unit: Unit, limit: float | None = None) -> str:
    """A time, a size, a share or a count as a person reads it; "-" where there is none, and a ">" before one that is
    only how long somebody waited: `limit` or more."""
    if value is None:
        return "-"
    more = "> " if limit is not None and value >= limit else ""
    if unit == "bytes":
        return f"{value / MEBIBYTE:.1f} MiB"
    if unit == "requests":
        return f"{value:.2f}"
    return f"{value:.1f} %" if unit == "%" else f"{more}{value:.3f} s"


def ratio_text(ratio: float | None, bound: bool = False) -> str:
    """A ratio with two digits that count; "lost" when it is infinite, "-" where there is none, "<=" at a bound."""
    if ratio is None:
        return "-"
    if math.isinf(ratio):
        return "lost"
    return ("<= " if bound else "") + (f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}")


def table(result: Result) -> list[list[str]]:
    """The cells of one case's table, without the head."""
    return [
        [
            row.title,
            *(figure(value, result.unit, row.limit) for value in (row.median, row.low, row.high)),
            f"{row.lost}/{len(row.samples)}",
            ratio_text(row.ratio, row.bound),
            "" if row.target is None else f"<= {row.target:g}",
            {None: "", True: "yes", False: "no"}[row.reached],
            row.notes,
        ]
        for row in result.rows
    ]


def left_out(result: Result) -> list[str]:
    """One sentence for each rival that could not take part."""
    return [f"{name} did not run: {why}." for name, why in result.absent.items()]


def heading(result: Result) -> str:
    """What a case's table is called."""
    return f"{result.name}: {result.title}" + (f" (ratio to {result.baseline})" if result.baseline else "")


def machine_text(machine: Machine) -> str:
    """The machine and the moment in one line."""
    load = ", ".join(f"{value:.2f}" for value in machine.load_average)
    return (
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB, Linux {machine.kernel}, "
        f"Python {machine.python}, torch {machine.torch}; load at start {load}; {machine.date}; commit {machine.commit}"
    )


def markdown(title: str, results: Sequence[Result], machine: Machine, how: str) -> str:
    """The whole report as Markdown; `how` says how often was measured."""
    lines = [
        f"# {title}",
        "",
        f"{machine_text(machine)}; {how}. `benchmarks/README.md` says what is measured and how.",
    ]
    for result in results:
        lines += ["", *section(result)]
    return "\n".join(lines) + "\n"


def section(result: Result) -> list[str]:
    """The lines of one case in Markdown: its heading, its table, and who did not run."""
    lines = [f"## {heading(result)}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
    lines += [_line(cells) for cells in table(result)]
    return lines + [f"\n{sentence}" for sentence in left_out(result)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def as_record(result: Result) -> dict[str, Any]:
    """One case with every sample and every sum for JSON, which cannot say that a ratio is infinite: it is "lost"."""
    return {
        "name": result.name,
        "title": result.title,
        "unit": result.unit,
        "baseline": result.baseline,
        "rows": [
            dataclasses.asdict(row)
            | {"ratio": "lost" if row.ratio is not None and math.isinf(row.ratio) else row.ratio}
            for row in result.rows
        ],
        "absent": result.absent,
    }


def from_record(record: dict[str, Any]) -> Result:
    """The case that `as_record` wrote; TypeError or KeyError for another record."""
    rows = [
        Row(**row | {"samples": tuple(row["samples"]), "ratio": math.inf if row["ratio"] == "lost" else row["ratio"]})
        for row in record["rows"]
    ]
    return Result(record["name"], record["title"], record["unit"], record["baseline"], rows, dict(record["absent"]))


def as_json(results: Sequence[Result], machine: Machine, options: dict[str, Any]) -> str:
    """Every case of one run of a benchmark."""
    cases = [as_record(result) for result in results]
    document = {"machine": dataclasses.asdict(machine), "options": options, "cases": cases}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def show(results: Sequence[Result]) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    # A table that a terminal would squeeze to one letter a line is worse than one that a pager has to scroll.
    console = Console()
    console.width = max(console.width, WIDTH)
    for result in results:
        shown = Table(title=heading(result), title_justify="left")
        for column in COLUMNS:
            shown.add_column(column, justify="left" if column in ("rival", "notes") else "right", no_wrap=True)
        for cells in table(result):
            shown.add_row(*cells)
        console.print(shown)
        for sentence in left_out(result):
            console.print(sentence, highlight=False, markup=False)
