"""The tables of the benchmark, from what is kept of its runs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from core.report import Summary, Table
from core.series import Kept, measured

from gpu import hangs, kills, memory, pauses
from gpu.phases import TITLES
from gpu.plan import HANGS, INNOCENTS, KILLS, MEMORY, PAUSES, Planned, Record, newest

TITLE = "A GPU: hangs with NCCL, kills, checkpoints and its memory"


def seconds(value: float | None) -> str:
    """A time; "-" if it was not reached."""
    return "-" if value is None else f"{value:.2f} s"


def hang_row(record: Record) -> list[str]:
    """A row of the hangs: what was reported, and whether it is right."""
    title = hangs.CASES[record.key.case].title
    if record.why_empty:
        return [title, *["-"] * 6, record.why_empty]
    words = record.words
    if record.figures["seconds"] is None:
        return [title, "never", *["-"] * 5, f"others wait in: {words['awaited'] or '?'}"]
    notes = [words["reported"]]
    if words["awaited"] and words["right operation"] != "yes":
        notes.append(f"the others wait in {words['awaited']}")
    if record.figures["false reports"]:
        notes.append("a report before the fault")
    return [
        title,
        seconds(record.figures["seconds"]),
        words["named"] or "none",
        words["rank"],
        words["line"] if words["line"] != "yes" else f"yes, {words['function']}",
        words["operation"] or "-",
        words["right operation"] if words["awaited"] else "-",
        "; ".join(notes),
    ]


def kill_rows(records: Sequence[Record]) -> list[list[str]]:
    """The rows of the kills: the median of each time, and the ratio to torchrun."""
    by_case: dict[str, list[Record]] = {}
    for record in records:
        by_case.setdefault(record.key.case, []).append(record)
    base = _median(by_case.get("torchrun", []), "total")
    rows = []
    for case, group in by_case.items():
        name = kills.RIVALS[case].launcher.name
        total = _median(group, "total")
        notes = list(dict.fromkeys(one.why_empty for one in group if one.why_empty))
        ready = _median(group, "ready")
        if ready is not None:
            notes.append(f"warm workers were ready after {ready:.1f} s")
        elif case == "warm" and total is not None:
            notes.append("no warm worker was ready before the kill")
        ratio = f"{total / base:.2f}" if total is not None and base and case != "torchrun" else ""
        phases = [seconds(_median(group, title)) for title in TITLES]
        rows.append([name, seconds(total), ratio, *phases, "; ".join(notes)])
    return rows


def _median(records: Sequence[Record], figure: str) -> float | None:
    values = [value for one in records if (value := one.figures.get(figure)) is not None]
    return median(values) if values else None


def innocent_row(record: Record) -> list[str]:
    """A row of the innocent jobs."""
    title = hangs.CASES[record.key.case].title
    if record.why_empty:
        return [title, "-", "-", "-", record.why_empty]
    wrong = int(record.figures["false reports"] or 0)
    return [
        title,
        f"{record.figures['pause']:.0f} s",
        f"{record.figures['watched']:.0f} s",
        "yes" if not wrong else f"no: {wrong}",
        record.words["reports"],
    ]


Rows = Callable[[Sequence[Record]], list[list[str]]]


def _each(row: Callable[[Record], list[str]]) -> Rows:
    return lambda records: [row(record) for record in records]


KILL_HEAD = ("launcher", "kill to step", "ratio", *TITLES, "notes")
HANG_HEAD = ("one of 2 ranks", "reported", "named", "right rank", "right line", "operation", "right operation", "notes")

SECTIONS: Mapping[str, tuple[str, str, Sequence[str], Rows, Sequence[int]]] = {
    KILLS: (
        "SIGKILL of one of two ranks on the GPU, to the next step of both",
        "The ratio is to torchrun. A phase ends when the last rank has ended it: the first line of the script, torch "
        "imported, a product on the device, an operation of both ranks, the first step.",
        KILL_HEAD,
        kill_rows,
        (0, len(KILL_HEAD) - 1),
    ),
    HANGS: (
        "Hangs of two ranks on the GPU",
        f"Rank {hangs.GUILTY} is at fault; the line is right if it lies in the function in which that rank hangs.",
        HANG_HEAD,
        _each(hang_row),
        (0, 2, 3, 4, 5, 6, 7),
    ),
    PAUSES: (
        "Pause of save(memory=True) of a state on the device",
        "Beside it are the copy of the same state to pinned memory alone, a copy to pageable memory, and the time to "
        "load the state and have it on the device again. The target is twice the copy and 20 ms for each GiB.",
        pauses.HEAD,
        _each(pauses.row),
        (0, len(pauses.HEAD) - 1),
    ),
    MEMORY: (
        "The memory of the device after SIGKILL of a worker, whose data loaders hold it for 3 s more",
        "Times are from the kill: to the first line of the new worker, to the end of the last process that held the "
        "device, to the memory being free (NVML), and until the new worker has taken it again.",
        memory.HEAD,
        _each(memory.row),
        (0, 5, 6),
    ),
    INNOCENTS: (
        "Jobs that only seem to hang",
        "",
        ("what happens", "for", "watched", "silent", "notes"),
        _each(innocent_row),
        (0, 4),
    ),
}


def how(kept: Sequence[Kept[Record]]) -> str:
    """Where the runs of a table were done."""
    devices = "; ".join(dict.fromkeys(one.run.device for one in kept))
    return measured(kept, devices)


def tables(kept: Sequence[Kept[Record]], plan: Sequence[Planned]) -> list[Table]:
    """A table for each part, with a row for what was planned and did not fit."""
    every = newest(kept, plan)
    found = []
    for part, (heading, about, head, rows, text) in SECTIONS.items():
        records = [one for one in every if one.key.part == part]
        if records and kept:
            where = [one for one in kept if one.run.key.part == part] or kept[-1:]
            found.append(Table(part, how(where), head, rows(records), heading, about, text))
    return found


def summary(kept: Sequence[Kept[Record]], plan: Sequence[Planned], rehearsal: str) -> Summary:
    """What is published. Of a rehearsal the title says that it is one."""
    return Summary(f"{TITLE}: {rehearsal}" if rehearsal else TITLE, tables=tables(kept, plan))
