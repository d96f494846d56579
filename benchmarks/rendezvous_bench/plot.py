"""The picture of a comparison of rendezvous: time over nodes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from comparison.report import Result

from rendezvous_bench.outcome import label
from rendezvous_bench.trial import C10D, ETCD, OURS

TITLE_WIDTH = 80
"""Letters that have room above one picture."""

COLOURS = {OURS.name: "tab:blue", ETCD.name: "tab:orange", C10D.name: "tab:gray"}


def plot(results: Sequence[Result], sizes: Sequence[int], path: Path) -> None:
    """One picture for each figure that is a time of the job: a line through the medians, a dot a run; a triangle
    points up from a run that did not end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = [result for result in results if result.unit == "s"]
    drawing, all_axes = pyplot.subplots(1, len(times), figsize=(5 * len(times), 4), squeeze=False, layout="constrained")
    for axes, result in zip(all_axes[0], times, strict=True):
        for rival, colour in COLOURS.items():
            rows = {nodes: row for nodes in sizes for row in result.rows if row.title == label(rival, nodes)}
            if not rows:
                continue
            ended = {nodes: row for nodes, row in rows.items() if row.median and row.limit is None}
            axes.plot(list(ended), [row.median for row in ended.values()], "-", color=colour, label=rival)
            for nodes, row in rows.items():
                kept = [value for value in row.samples if value]
                axes.plot([nodes] * len(kept), kept, "." if row.limit is None else "^", color=colour, markersize=5)
        axes.set_xscale("log")
        if result.baseline and any(value for row in result.rows for value in row.samples):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xticks(list(sizes), [str(nodes) for nodes in sizes], fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel("nodes", fontsize=8)
        axes.set_ylabel("seconds", fontsize=8)
        axes.set_title(textwrap.fill(f"{result.name}: {result.title}", TITLE_WIDTH), fontsize=7, loc="left")
        axes.legend(fontsize=8)
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)
