"""The picture of a comparison of launchers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from comparison.ratios import Row
from comparison.report import MEBIBYTE, Result, heading, ratio_text


def _label(row: Row) -> str:
    """What stands beside a bar: the ratio, and how many runs were lost if any."""
    ratio = "" if row.ratio is None or math.isinf(row.ratio) else f"{ratio_text(row.ratio, row.bound)}x"
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
        scale = MEBIBYTE if result.unit == "bytes" else 1.0
        baseline = next((row.median for row in result.rows if row.title == result.baseline), None)
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
        axes.set_xlabel("MiB" if result.unit == "bytes" else "seconds", fontsize=8)
        axes.set_title(heading(result), fontsize=9, loc="left")
    drawing.suptitle("Bar: median. Dot: one run. Red: target, as a ratio to the baseline's median.", fontsize=8)
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)
