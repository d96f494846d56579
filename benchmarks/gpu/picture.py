"""The picture: a bar for each launcher, from the kill to the next step, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpu import kills
from gpu.phases import TITLES
from gpu.plan import KILLS, Record

COLOURS = ("tab:gray", "tab:blue", "tab:orange", "tab:purple", "tab:green")
LABEL_ROOM = 1.25
"""By what the axis is longer than the longest bar, for the label beside it."""


def draw(records: Sequence[Record], path: Path, rehearsal: str) -> None:
    """Draw the kills that came back; nothing without any. Raises ModuleNotFoundError without matplotlib."""
    came_back = [one for one in records if one.key.part == KILLS and one.figures.get("total") is not None]
    if not came_back:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    order = list(kills.RIVALS)
    came_back.sort(key=lambda one: (order.index(one.key.case), one.key.turn))
    drawing, axes = pyplot.subplots(figsize=(11.0, 1.6 + 0.5 * len(came_back)), layout="constrained")
    longest = 0.0
    for position, record in enumerate(came_back):
        left = 0.0
        for title, colour in zip(TITLES, COLOURS, strict=True):
            length = record.figures.get(title) or 0.0
            axes.barh(position, length, left=left, height=0.6, color=colour, label="" if position else title)
            left += length
        axes.annotate(f"{left:.1f} s", (left, position), xytext=(6, 0), textcoords="offset points", va="center")
        longest = max(longest, left)
    axes.set_xlim(0, longest * LABEL_ROOM)
    axes.set_yticks(range(len(came_back)), [kills.RIVALS[one.key.case].launcher.name for one in came_back])
    axes.invert_yaxis()
    axes.set_xlabel("seconds from SIGKILL of one of two ranks to the next step of both", fontsize=9)
    axes.grid(axis="x", alpha=0.4)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, ncols=len(TITLES), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    drawing.suptitle(rehearsal or came_back[-1].device, fontsize=9)
    drawing.savefig(path, dpi=110)
    pyplot.close(drawing)
