"""The tables of the matrix: times, confusion matrices of reasons and of ranks, and the innocent pauses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from core.report import Table
from core.series import Kept, measured, percent, quantile

from stall_matrix.kinds import BY_NAME, CALMS, FAULTS, INNOCENTS
from stall_matrix.trial import NO_RANK, NO_REPORT, Trial

STARVED = 0.5
"""The share of the time from which on the launcher counts as one that had no processor."""

HANGS_HEAD = (
    *("ranks", "the guilty rank", "runs", "reported", "median", "95 %", "greatest"),
    *("right rank", "another rank", "no rank", "right line", "before the fault"),
)
INNOCENTS_HEAD = ("ranks", "what happens", "for", "runs", "runs with a report")
REASONS_HEAD = ("the guilty rank", "runs")
RANKS_HEAD = ("ranks", "guilty", "runs")


def hang_cells(title: str, ranks: str, trials: Sequence[Trial]) -> list[str]:
    """One row of the table of hangs."""
    reported = [one for one in trials if one.seconds is not None]
    times = [one.seconds for one in reported if one.seconds is not None]
    figures = [median(times), quantile(times, 0.95), max(times)] if times else []
    with_line = [one for one in trials if BY_NAME[one.fault].functions]
    return [
        ranks,
        title,
        str(len(trials)),
        percent(len(reported), len(trials)),
        *([f"{figure:.1f} s" for figure in figures] or ["-"] * 3),
        percent(sum(one.right_rank for one in trials), len(trials)),
        percent(sum(bool(one.named) and not one.right_rank for one in trials), len(trials)),
        percent(sum(not one.named for one in trials), len(trials)),
        percent(sum(one.right_line for one in with_line), len(with_line)),
        str(sum(one.wrong_reports for one in trials)),
    ]


def reason_rows(hangs: Sequence[Trial], codes: Sequence[str]) -> list[list[str]]:
    """The confusion matrix: of each kind of hang, how often each reason was reported."""
    return [
        [fault.title, str(len(own)), *(str(sum(one.reported == code for one in own) or "") for code in codes)]
        for fault in FAULTS
        if (own := [one for one in hangs if one.fault == fault.name])
    ]


def rank_rows(hangs: Sequence[Trial], sizes: Sequence[int]) -> list[list[str]]:
    """The confusion matrix of ranks: of each guilty rank, how often each rank was named, several, or none."""
    rows = []
    for size in sizes:
        for guilty in range(size):
            own = [one for one in hangs if (one.ranks, one.guilty) == (size, guilty)]
            named = Counter(one.named for one in own)
            several = sum(number for ranks, number in named.items() if len(ranks) > 1)
            counts = [*(named[rank,] for rank in range(max(sizes))), several, named[()]]
            if own:
                rows.append([str(size), str(guilty), str(len(own)), *(str(count or "") for count in counts)])
    return rows


def tables(kept: Sequence[Kept[Trial]]) -> list[Table]:
    """All tables."""
    runs = [one.run for one in kept]
    hangs = [one for one in runs if not BY_NAME[one.fault].innocent]
    innocent = [one for one in runs if BY_NAME[one.fault].innocent]
    sizes = sorted({one.ranks for one in runs})
    groups = [
        (fault, size, [one for one in hangs if (one.fault, one.ranks) == (fault.name, size)])
        for fault in FAULTS
        for size in sizes
    ]
    rows = [hang_cells(fault.title, str(size), own) for fault, size, own in groups if own]
    rows += [hang_cells("all", "", hangs)] if hangs else []
    fed = [one for one in hangs if one.starved <= STARVED]
    rows += [hang_cells("all whose launcher had a processor", "", fed)] if len(fed) < len(hangs) else []
    found = {one.reported for one in hangs}
    codes = [*sorted(found - {NO_RANK, NO_REPORT}), NO_RANK, NO_REPORT]
    pauses = [
        [str(size), fault.title, f"{pause:g} s", str(len(own)), str(sum(one.wrong_reports > 0 for one in own))]
        for fault in (*INNOCENTS, *CALMS)
        for size in sizes
        for pause in sorted({one.pause for one in innocent if one.fault == fault.name})
        if (own := [one for one in innocent if (one.fault, one.ranks, one.pause) == (fault.name, size, pause)])
    ]
    watched, wrong = sum(one.watched for one in runs), sum(one.wrong_reports for one in runs)
    about = (
        f"Jobs without a fault, or before it, were watched for {watched:.0f} s ({watched / 3600:.2f} hours): "
        f"{wrong} false reports."
    )
    named = [f"rank {rank} named" for rank in range(max(sizes))]
    how = measured(kept)
    found_tables = [
        Table("hangs", how, HANGS_HEAD, rows, "Hangs", about, (1,)),
        Table("reasons", how, (*REASONS_HEAD, *codes), reason_rows(hangs, codes), "Why the rank was named"),
        Table(
            "ranks",
            how,
            (*RANKS_HEAD, *named, "several", "none"),
            rank_rows(hangs, sizes),
            "The ranks that were named",
            text=(),
        ),
        Table("innocent", how, INNOCENTS_HEAD, pauses, "Innocent pauses", text=(1,)),
    ]
    return [one for one in found_tables if one.rows]
