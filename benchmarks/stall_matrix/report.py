"""The tables of the matrix: times, confusion matrices of reasons and of ranks, and the innocent pauses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from core.report import Table
from core.series import Kept, measured, percent, quantile

from stall_matrix.kinds import BY_NAME, CALMS, DEVICE, FAULTS, INNOCENTS, SHAPES
from stall_matrix.trial import NO_RANK, NO_REPORT, Trial

STARVED = 0.5
"""The share of the time from which on the launcher counts as one that had no processor."""

HANGS_HEAD = (
    *("ranks", "the guilty rank", "runs", "reported", "median", "95 %", "greatest"),
    *("right rank", "another rank", "no rank", "right line", "before the fault"),
)
OPERATION = "right operation"
"""A further column of jobs whose processes answer which operations they have launched."""
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


def operation_cells(trials: Sequence[Trial]) -> list[str]:
    """The further cell of a row of hangs: of the reports that name a rank, as only these have reasons in the events."""
    answered = [one for one in trials if one.awaited and one.named]
    return [percent(sum(one.right_operation for one in answered), len(answered))]


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
    """All tables: those of jobs with gloo, then of those with the shape of a device."""
    by_shape = [(shape, [one for one in kept if one.run.shape == shape]) for shape in SHAPES]
    return [table for shape, own in by_shape if own for table in shape_tables(shape, own)]


def shape_tables(shape: str, kept: Sequence[Kept[Trial]]) -> list[Table]:
    """The tables of the runs of one shape."""
    runs = [one.run for one in kept]
    hangs = [one for one in runs if not BY_NAME[one.fault].innocent]
    innocent = [one for one in runs if BY_NAME[one.fault].innocent]
    sizes = sorted({one.ranks for one in runs})
    groups = [
        (fault, size, [one for one in hangs if (one.fault, one.ranks) == (fault.name, size)])
        for fault in FAULTS
        for size in sizes
    ]
    fed = [one for one in hangs if one.starved <= STARVED]
    rows = [(fault.title, str(size), own) for fault, size, own in groups if own]
    rows += [("all", "", hangs)] if hangs else []
    rows += [("all whose launcher had a processor", "", fed)] if len(fed) < len(hangs) else []
    on_device = shape == DEVICE
    cells = [hang_cells(*row) + (operation_cells(row[2]) if on_device else []) for row in rows]
    head = (*HANGS_HEAD, OPERATION) if on_device else HANGS_HEAD
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
    if on_device:
        about += f" Processes were asked for their operations {sum(one.asked for one in runs)} times before the fault."
    named = [f"rank {rank} named" for rank in range(max(sizes))]
    how = measured(kept, "no device, workers that wait as for one" if on_device else "")
    name, title = ("-device", ", with the shape of a device") if on_device else ("", "")
    found_tables = [
        Table(f"hangs{name}", how, head, cells, f"Hangs{title}", about, (1,)),
        Table(
            f"reasons{name}",
            how,
            (*REASONS_HEAD, *codes),
            reason_rows(hangs, codes),
            f"Why the rank was named{title}",
        ),
        Table(
            f"ranks{name}",
            how,
            (*RANKS_HEAD, *named, "several", "none"),
            rank_rows(hangs, sizes),
            f"The ranks that were named{title}",
            text=(),
        ),
        Table(f"innocent{name}", how, INNOCENTS_HEAD, pauses, f"Innocent pauses{title}", text=(1,)),
    ]
    return [one for one in found_tables if one.rows]
