"""The picture: from the kill to the next step, phase by phase, and the pause of a save beside the copy alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu import kills
from gpu.phases import TITLES
from gpu.plan import KILLS, PAUSES, Record

COLOURS = ("tab:gray", "tab:blue", "tab:orange", "tab:purple", "tab:green")
LABEL_ROOM = 1.25
"""By what the axis is longer than the longest bar, for the label beside it."""

PAUSE_BARS = (("copy alone", "copy", "tab:gray"), ("2nd and 3rd save", "save", "tab:green"))
"""The bars of a state: the name, the figure, the colour."""


def draw(records: Sequence[Record], path: Path, rehearsal: str) -> None:
    """Draw what has a result; nothing without any. Raises ModuleNotFoundError without matplotlib."""
    came_back = [one for one in records if one.key.part == KILLS and one.figures.get("total") is not None]
    paused = [one for one in records if one.key.part == PAUSES and not one.why_empty]
    panels = [panel for panel in ((_kills, came_back), (_pauses, paused)) if panel[1]]
    if not panels:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    order = list(kills.RIVALS)
    came_back.sort(key=lambda one: (order.index(one.key.case), one.key.turn))
    heights = [1.2 + 0.5 * len(drawn) for _, drawn in panels]
    drawing, grid = pyplot.subplots(
        len(panels), figsize=(11.0, 0.6 + sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axes, (panel, drawn) in zip(grid.flat, panels, strict=True):
        panel(axes, drawn)
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.4)
        axes.set_axisbelow(True)
        axes.legend(fontsize=8, ncols=len(TITLES), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    drawing.suptitle(rehearsal or panels[0][1][-1].device, fontsize=9)
    drawing.savefig(path, dpi=110)
    pyplot.close(drawing)


def _kills(axes: Any, came_back: Sequence[Record]) -> None:
    longest = 0.0
    for position, record in enumerate(came_back):
        left = 0.0
        for title, colour in zip(TITLES, COLOURS, strict=True):
            length = record.figures.get(title) or 0.0
            axes.barh(position, length, left=left, height=0.6, color=colour, label="" if position else title)
            left += length
        _label(axes, left, position)
        longest = max(longest, left)
    axes.set_xlim(0, longest * LABEL_ROOM)
    axes.set_yticks(range(len(came_back)), [kills.RIVALS[one.key.case].launcher.name for one in came_back])
    axes.set_xlabel("seconds from SIGKILL of one of two ranks to the next step of both", fontsize=9)


def _pauses(axes: Any, paused: Sequence[Record]) -> None:
    longest = 0.0
    for position, record in enumerate(paused):
        for number, (name, figure, colour) in enumerate(PAUSE_BARS):
            length, at = record.figures[figure] or 0.0, position + (number - 0.5) * 0.35
            axes.barh(at, length, height=0.3, color=colour, label="" if position else name)
            _label(axes, length, at)
            longest = max(longest, length)
        target = record.figures["target"] or 0.0
        axes.plot([target] * 2, [position, position + 0.35], color="tab:red", label="" if position else "target")
        longest = max(longest, target)
    axes.set_xlim(0, longest * LABEL_ROOM or 1.0)
    axes.set_yticks(range(len(paused)), [f"{one.figures['GiB']:g} GiB" for one in paused])
    axes.set_xlabel("seconds for which save(memory=True) stops a loop whose state is on the device", fontsize=9)


def _label(axes: Any, length: float, position: float) -> None:
    axes.annotate(f"{length:.2f} s", (length, position), xytext=(6, 0), textcoords="offset points", va="center")
