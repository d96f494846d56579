"""What a person gets: a table on the console and in Markdown, a plot, and a JSON with every sample."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch_bench.cases import Case
from launch_bench.machine import Machine
from launch_bench.ratios import Row

COLUMNS = ("rival", "median", "min", "max", "lost", "ratio", "target", "reached", "notes")
MEBIBYTE = 1024.0**2
WIDTH = 160


@dataclass(frozen=True)
class Result:
    """One case as it came out; `absent` says of each rival that could not take part why."""

    case: Case
    rows: Sequence[Row]
    absent: dict[str, str]


def figure(value: float | None, unit: str) -> str:
    """A time or a size as a person reads it; "-" where there is none."""
    if value is None:
        return "-"
    return f"{value / MEBIBYTE:.1f} MiB" if unit == "bytes" else f"{value:.3f} s"


def ratio_text(ratio: float | None) -> str:
    """A ratio with two digits after the point; "lost" when it is infinite, "-" where there is none."""
    if ratio is None:
        return "-"
    return "lost" if math.isinf(ratio) else f"{ratio:.2f}"


def table(result: Result) -> list[list[str]]:
    """The cells of one case's table, without the head."""
    unit = result.case.unit
    return [
        [
            row.title,
            *(figure(value, unit) for value in (row.median, row.low, row.high)),
            f"{row.lost}/{len(row.samples)}",
            ratio_text(row.ratio),
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
    return f"{result.case.name}: {result.case.title} (ratio to {result.case.baseline})"


def markdown(results: Sequence[Result], machine: Machine, repetitions: int) -> str:
    """The whole report as Markdown."""
    load = ", ".join(f"{value:.2f}" for value in machine.load_average)
    lines = [
        "# Launching: dlrover-run, torchrun and no launcher at all",
        "",
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB, Linux {machine.kernel}, "
        f"Python {machine.python}, torch {machine.torch}; load at start {load}; {machine.date}; "
        f"commit {machine.commit}; {repetitions} repetitions in turn after one warm-up. "
        "`benchmarks/README.md` says what is measured and how.",
    ]
    for result in results:
        lines += ["", f"## {heading(result)}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [_line(cells) for cells in table(result)]
        lines += [f"\n{sentence}" for sentence in left_out(result)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def as_json(results: Sequence[Result], machine: Machine, options: dict[str, Any]) -> str:
    """Every sample and every sum; an infinite ratio, which JSON cannot say, is the string "lost"."""
    cases = [
        {
            "name": result.case.name,
            "title": result.case.title,
            "unit": result.case.unit,
            "baseline": result.case.baseline,
            "rows": [
                dataclasses.asdict(row)
                | {"ratio": "lost" if row.ratio is not None and math.isinf(row.ratio) else row.ratio}
                for row in result.rows
            ],
            "absent": result.absent,
        }
        for result in results
    ]
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


def _label(row: Row) -> str:
    """What stands beside a bar: the ratio, and how many runs were lost if any."""
    ratio = "" if row.ratio is None or math.isinf(row.ratio) else f"{row.ratio:.2f}x"
    lost = f"{row.lost} of {len(row.samples)} lost" if row.lost else ""
    return ", ".join(text for text in (ratio, lost) if text)


def plot(results: Sequence[Result], path: Path) -> None:
    """One picture a case: a bar to the median, a dot a sample, the ratio beside it, a line where the target is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [1.2 + 0.45 * max(1, len(result.rows)) for result in results]
    drawing, all_axes = pyplot.subplots(
        len(results), 1, figsize=(10, sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axes, result in zip(all_axes[:, 0], results, strict=True):
        scale = MEBIBYTE if result.case.unit == "bytes" else 1.0
        baseline = next((row.median for row in result.rows if row.title == result.case.baseline), None)
        for position, row in enumerate(result.rows):
            kept = [value / scale for value in row.samples if value is not None]
            ours = row.title.startswith("dlrover-run")
            middle = (row.median or 0.0) / scale
            axes.barh(position, middle, height=0.6, color="tab:blue" if ours else "tab:gray", alpha=0.6)
            axes.plot(kept, [position] * len(kept), "k.", markersize=4)
            if row.target is not None and baseline is not None:
                where = row.target * baseline / scale
                axes.plot([where, where], [position - 0.4, position + 0.4], color="tab:red", linewidth=2)
            axes.annotate(
                _label(row),
                (max([middle, *kept]), position),
                xytext=(6, 0),
                textcoords="offset points",
                verticalalignment="center",
                fontsize=8,
            )
        axes.set_yticks(range(len(result.rows)), [row.title for row in result.rows], fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlim(left=0)
        axes.set_xlabel("MiB" if result.case.unit == "bytes" else "seconds", fontsize=8)
        axes.set_title(heading(result), fontsize=9, loc="left")
    drawing.suptitle("Bar: median. Dot: one run. Red: target, as a ratio to the baseline's median.", fontsize=8)
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)
