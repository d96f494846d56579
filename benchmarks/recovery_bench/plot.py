"""The picture of a comparison of recoveries: a panel for each fault, with time on a logarithmic axis."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison.ratios import Row
from comparison.report import Result, ratio_text
from launch_bench.rivals import TORCHRUN_UNSHARED

from recovery_bench.cut import KEEP_ALIVE
from recovery_bench.deaths import WORKER_AFTER
from recovery_bench.recovery import NEW_WORLD, OLD_ENDED
from recovery_bench.rivals import EVERYONE, OURS

COLUMNS = 2
TITLE_WIDTH = 72
LEFT, RIGHT = 0.01, 100_000.0
"""Seconds at the ends of the axis; the words beside a bar take what is right of the cut-off."""

TICKS = {0.01: "10 ms", 0.1: "0.1 s", 1.0: "1 s", 10.0: "10 s", 100.0: "100 s"}
HEADINGS = {
    "worker-death": "A worker is killed (2 nodes)",
    "node-death": "A node dies: launcher and worker killed at once (--nnodes=1:2)",
    "growth": "A node joins a running one (--nnodes=1:2)",
    "master-death": "The master (torchrun: node 0) is killed: longest pause between steps",
    "network-cut": "The network of a node is cut without a word (time-out 9 s, --nnodes=1:2)",
}
SHADES = {"": 0.35, NEW_WORLD: 0.45, OLD_ENDED: 0.9}
EXPLAINED = (
    f"{TORCHRUN_UNSHARED.name}: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, what torchrun needs to come back every time; "
    "ratios are to it"
)
MISSED = "tab:red"
OUR_NAMES = frozenset(rival.name for rival in OURS)


@dataclass(frozen=True)
class Bar:
    """One rival at one fault. `middle` is the median of the runs that came back, None when none did; `parts` are the
    medians of the moments on the way. `limit` is when the others were given up, None when none was."""

    rival: str
    middle: float | None
    parts: dict[str, float]
    came_back: tuple[float, ...]
    runs: int
    limit: float | None


def returned(row: Row) -> tuple[float, ...]:
    """The figures of the runs that came back."""
    return tuple(value for value in row.samples if value is not None and (row.limit is None or value < row.limit))


def bar_of(rival: str, result: Result) -> Bar | None:
    """The bar of a rival; None when it has no part in this fault."""
    rows = {row.title: row for row in result.rows}
    row = rows.get(rival)
    if row is None:
        # A rival that lost every run has a row for each part that had a target, and for no other.
        lost = [each for title, each in rows.items() if title.startswith(f"{rival},") and each.median is None]
        return Bar(rival, None, {}, (), len(lost[0].samples), None) if lost else None
    parts = {}
    for part in (NEW_WORLD, OLD_ENDED):
        reached = returned(rows[rival + part]) if rival + part in rows else ()
        if reached:
            parts[part] = statistics.median(reached)
    back = returned(row)
    return Bar(rival, statistics.median(back) if back else None, parts, back, len(row.samples), row.limit)


def words(bar: Bar, result: Result) -> str:
    """What stands beside a bar: its length, how it compares, and how many runs came back."""
    rows = {row.title: row for row in result.rows}
    after = rows.get(bar.rival + WORKER_AFTER)
    count = f"{len(bar.came_back)}/{bar.runs} came back"
    if bar.middle is None:
        return f"> {bar.limit:g} s, {count}" if bar.limit is not None else f"job lost, {count}"
    row = rows[bar.rival]
    if after is not None and after.median is not None:
        return f"{time_text(bar.middle)}; a worker killed then: {time_text(after.median)}"
    # Where some runs did not come back the ratio is of those too, and the bar is not.
    ratio = row.ratio if len(bar.came_back) == bar.runs and bar.rival in OUR_NAMES else None
    unit = " time-outs" if result.baseline == KEEP_ALIVE else "x torchrun"
    against = "" if ratio is None or math.isinf(ratio) else f" ({ratio_text(ratio, row.bound)}{unit})"
    return f"{time_text(bar.middle)}{against}, {count}"


def time_text(seconds: float) -> str:
    """A time as one reads it off a picture."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def plot(results: Sequence[Result], under: str, path: Path) -> None:
    """A panel for each fault: a bar to the median of the runs that came back, darker up to the moments on the way, a
    dot a run, the target in red. `under` is what machine it was."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = math.ceil(len(results) / COLUMNS)
    most = max(len(rivals_in(result)) for result in results)
    drawing, all_axes = pyplot.subplots(
        rows, COLUMNS, figsize=(15, 0.9 + rows * (1.0 + 0.42 * most)), squeeze=False, layout="constrained"
    )
    for axes, result in zip(all_axes.flat, results, strict=False):
        if result.unit == "%":
            draw_shares(axes, result)
        else:
            draw_times(axes, result)
    for axes in all_axes.flat[len(results) :]:
        axes.set_axis_off()
    drawing.suptitle("How a training job comes back from a fault: shorter is better, a grid line is ten times the last")
    key = [
        Patch(color="dimgray", alpha=SHADES[OLD_ENDED], label="fault until the old workers have ended"),
        Patch(color="dimgray", alpha=0.65, label="until the new world is there"),
        Patch(color="dimgray", alpha=SHADES[""], label="until its first step (median)"),
        Line2D([], [], color="black", marker=".", linestyle="", label="one run"),
        Line2D([], [], color=MISSED, marker=">", linestyle="", label="given up: not back by then"),
        Line2D([], [], color=MISSED, marker="|", markersize=12, linestyle="", label="target for dlrover-run"),
    ]
    drawing.legend(
        handles=key,
        loc="outside lower center",
        ncols=len(key),
        fontsize=8,
        frameon=False,
        title=f"{under}\n{EXPLAINED}",
    )
    drawing.savefig(path, dpi=110)
    pyplot.close(drawing)


def rivals_in(result: Result) -> list[str]:
    """The rivals that have a bar in this panel."""
    return [rival.name for rival in EVERYONE if bar_of(rival.name, result) is not None]


def _colour(rival: str) -> str:
    return "tab:blue" if rival in OUR_NAMES else "tab:gray"


def _label(axes: Any, at: float, position: int, text: str, failed: bool) -> None:
    axes.annotate(
        text,
        (at, position),
        xytext=(7, 0),
        textcoords="offset points",
        verticalalignment="center",
        fontsize=9,
        color=MISSED if failed else "black",
    )


def draw_times(axes: Any, result: Result) -> None:
    """The panel of one fault."""
    names = rivals_in(result)
    baseline = next((row.median for row in result.rows if row.title == result.baseline), None)
    rows = {row.title: row for row in result.rows}
    for position, name in enumerate(names):
        bar = bar_of(name, result)
        assert bar is not None
        colour = _colour(name)
        end = LEFT
        if bar.middle is not None:
            ends = {"": bar.middle} | bar.parts
            for part, shade in SHADES.items():
                if part in ends:
                    axes.barh(
                        position, ends[part] - LEFT, left=LEFT, height=0.62, color=colour, alpha=shade, linewidth=0
                    )
            axes.plot(bar.came_back, [position] * len(bar.came_back), "k.", markersize=4)
            end = max(bar.came_back)
        if bar.limit is not None:
            if bar.middle is None:
                axes.barh(
                    position, bar.limit - LEFT, left=LEFT, height=0.62, color="none", edgecolor=MISSED, hatch="////"
                )
            axes.plot([bar.limit], [position], ">", color=MISSED, markersize=8)
            end = bar.limit
        target = rows[name].target if name in rows else None
        if target is not None and baseline is not None:
            axes.plot([target * baseline] * 2, [position - 0.4, position + 0.4], color=MISSED, linewidth=2)
            end = max(end, target * baseline)
        _label(axes, end, position, words(bar, result), failed=len(bar.came_back) < bar.runs)
    axes.set_xscale("log")
    axes.set_xlim(LEFT, RIGHT)
    axes.set_xticks(list(TICKS), list(TICKS.values()), fontsize=8)
    axes.minorticks_off()
    axes.grid(axis="x", alpha=0.4)
    _frame(axes, names, HEADINGS.get(result.name, result.title))


def draw_shares(axes: Any, result: Result) -> None:
    """The panel of the effective training time."""
    names = rivals_in(result)
    rows = {row.title: row for row in result.rows}
    for position, name in enumerate(names):
        row = rows[name]
        share = row.median or 0.0
        axes.barh(position, share, height=0.62, color=_colour(name), alpha=0.65)
        axes.plot([value for value in row.samples if value is not None], [position] * len(returned(row)), "k.")
        cut = next((note for note in row.notes.split("; ") if note.startswith(("cut off", "job lost"))), "")
        text = f"{share:.0f} %" if row.median is not None else "never began"
        _label(axes, share, position, f"{text}, {cut}" if cut else text, failed=bool(cut) or row.median is None)
    axes.set_xlim(0, 135)
    axes.set_xticks([0, 25, 50, 75, 100], ["0", "25 %", "50 %", "75 %", "100 %"], fontsize=8)
    axes.grid(axis="x", alpha=0.4)
    _frame(axes, names, f"Longer is better: {result.title}")


def _frame(axes: Any, names: Sequence[str], heading: str) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_axisbelow(True)
    axes.set_title(textwrap.fill(heading, TITLE_WIDTH), fontsize=10, loc="left", fontweight="bold")
