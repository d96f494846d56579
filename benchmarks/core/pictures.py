"""The picture of a benchmark: a panel for each table, a bar for each of its rows."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from core.ratios import Row
from core.report import MEBIBYTE, Result, figure, ratio_text

OURS = ("dlrover-run", "forkserver", "survivors", "tf-ps-run", "with the check", "added by the check")
LEFT, RIGHT = 0.01, 20_000.0
"""Seconds at the ends of a logarithmic axis, the same in all panels; the labels need what is right of the bars."""

TICKS = {0.01: "10 ms", 0.1: "0.1 s", 1.0: "1 s", 10.0: "10 s", 100.0: "100 s"}
LABEL_ROOM = 1.35
"""By what a linear axis is longer than the longest bar, so that the labels beside the bars have room."""

SHADES = (0.9, 0.6, 0.35)
MISSED = "tab:red"
TITLE_WIDTH, NOTE_WIDTH = 85, 130
"""Letters in a line of a heading, and of the text at the bottom."""


def label(row: Row, result: Result, success: str) -> str:
    """The text beside a bar: the median of the runs that ended, its ratio, and how many runs ended if not all did."""
    ended = f"{len(row.ended)} of {len(row.samples)} {success}"
    if not row.ended:
        return f"{'lost' if row.limit is None else f'> {row.limit:g} s'}, {ended}"
    text = figure(statistics.median(row.ended), result.unit)
    if row.lost:
        # The ratio is that of the other runs too, and the bar is not.
        return f"{text}, {ended}"
    if row.ratio is not None and result.baseline and row.title != result.baseline:
        text += f" ({ratio_text(row.ratio, row.bound)}x)"
    cut = [note for note in row.notes.split("; ") if note.startswith(("cut off", "job lost"))]
    return ", ".join([text, *cut])


def bars(
    results: Sequence[Result],
    path: Path,
    *,
    stages: Sequence[str] = (),
    hidden: Collection[str] = (),
    success: str = "ended",
    caption: str = "",
) -> None:
    """Draw a bar to the median of the runs that ended, a dot for each run, and the target in red.

    Parts in `stages` are drawn inside the bar of their rival, as shades that become lighter, on a logarithmic axis;
    `hidden` parts are not drawn. `success` is what a run that ended did.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    panels = [[row for row in result.rows if not row.title.endswith((*stages, *hidden))] for result in results]
    heights = [0.9 + 0.4 * len(rows) for rows in panels]
    drawing, grid = pyplot.subplots(
        len(panels), figsize=(11.0, 1.0 + sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axes, result, rows in zip(grid.flat, results, panels, strict=True):
        _panel(axes, result, rows, stages, success)
        axes.set_title(textwrap.fill(result.heading, TITLE_WIDTH), fontsize=10, loc="left", fontweight="bold")
    shades = zip((*stages, ""), SHADES, strict=False) if stages else ()
    key: list[Any] = [
        Patch(color="dimgray", alpha=shade, label=stage.strip(", ") or "to the first step") for stage, shade in shades
    ]
    key += [
        Line2D([], [], color="black", marker=".", linestyle="", label="one run"),
        Line2D([], [], color=MISSED, marker="|", markersize=12, linestyle="", label="target, as a ratio"),
        Line2D([], [], color=MISSED, marker=">", linestyle="", label="not ended by then"),
    ]
    where = dict.fromkeys(f"{one.machine.cpu}, {one.machine.cores} cores, {one.machine.date[:10]}" for one in results)
    note = textwrap.fill(f"Bar: median. In brackets: ratio to the baseline. {'; '.join(where)}. {caption}", NOTE_WIDTH)
    drawing.legend(handles=key, loc="outside lower center", ncols=len(key), fontsize=8, frameon=False, title=note)
    drawing.savefig(path, dpi=110)
    pyplot.close(drawing)


def _panel(axes: Any, result: Result, rows: Sequence[Row], stages: Sequence[str], success: str) -> None:
    log = bool(stages) and result.unit == "s"
    scale = MEBIBYTE if result.unit == "bytes" else 1.0
    left = LEFT if log else 0.0
    by_title = {row.title: row for row in result.rows}
    baseline = next((row.median for row in result.rows if row.title == result.baseline), None)
    longest = left
    for position, row in enumerate(rows):
        colour = "tab:blue" if row.title.startswith(OURS) else "tab:gray"
        ended = [value / scale for value in row.ended]
        marks = [*ended, left]
        staged = any(row.title + stage in by_title for stage in stages)
        for part, shade in reversed(list(zip((*stages, ""), SHADES, strict=False))) if staged else [("", SHADES[1])]:
            reached = by_title[row.title + part].ended if row.title + part in by_title else ()
            if ended and reached:
                length = statistics.median(reached) / scale - left
                axes.barh(position, length, left=left, height=0.62, color=colour, alpha=shade, linewidth=0)
        axes.plot(ended, [position] * len(ended), "k.", markersize=4)
        if row.limit is not None:
            axes.plot([row.limit], [position], ">", color=MISSED, markersize=8)
            marks.append(row.limit)
        if row.target is not None and baseline is not None:
            target = row.target * baseline / scale
            axes.plot([target] * 2, [position - 0.4, position + 0.4], color=MISSED, linewidth=2)
            marks.append(target)
        axes.annotate(
            label(row, result, success),
            (max(marks), position),
            xytext=(7, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=9,
            color=MISSED if row.lost else "black",
        )
        longest = max(longest, *marks)
    if log:
        axes.set_xscale("log")
        axes.set_xlim(LEFT, RIGHT)
        axes.set_xticks(list(TICKS), list(TICKS.values()), fontsize=8)
        axes.minorticks_off()
    else:
        axes.set_xlim(0, longest * LABEL_ROOM or 1.0)
        axes.set_xlabel({"bytes": "MiB", "s": "seconds"}.get(result.unit, result.unit), fontsize=8)
    axes.grid(axis="x", alpha=0.4)
    axes.set_axisbelow(True)
    axes.set_yticks(range(len(rows)), [row.title for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
