"""What a person reads of a node check: a table of the nodes, one of the links, and one line of a node about itself.

Pure text building, in plain ASCII except for what other nodes said, which is made harmless. What asks for a look has a
`!` before it, and a colour on a terminal.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from dlrover_run.console.text import BOLD, RED, YELLOW, colored, display_width, sanitize, truncate
from dlrover_run.coordination.check_records import Checkup, LinkRow, Verdict
from dlrover_run.coordination.words import counted

MAX_NAME = 32
"""Columns of a node's name: many a cloud has longer ones, which differ at their beginning."""

_NARROW = 60
"""Below so many columns the units stand in the heading alone."""

_INDENT = " " * 6

_VERDICTS = {
    Verdict.PENDING: "...",
    Verdict.UNCHECKED: "unchecked",
    Verdict.PASSED: "passed",
    Verdict.STRAGGLER: "straggler",
    Verdict.FAULT: "fault",
}
_URGENT = [Verdict.FAULT, Verdict.STRAGGLER, Verdict.PENDING, Verdict.UNCHECKED, Verdict.PASSED]


def render_live_table(rows: Sequence[Checkup], width: int, lines: int, color: bool = False) -> list[str]:
    """How a check stands that goes on: at most `lines` lines of at most `width` columns. Where there is no room for all
    nodes, those are shown of whom there is most to say, and the others counted."""
    labelled = _labelled(rows)
    if len(rows) < lines:
        return _table(labelled, width, color)
    # The heading and the count take a line each.
    room = lines - 2
    if room < 1:
        return [truncate(_tally(rows), width)] if lines > 0 else []
    ordered = sorted(range(len(rows)), key=lambda place: _URGENT.index(rows[place].verdict))
    left_out = truncate(f"  and {len(rows) - room} more: {_tally(rows[place] for place in ordered[room:])}", width)
    return [*_table([labelled[place] for place in sorted(ordered[:room])], width, color), left_out]


def render_health_table(rows: Sequence[Checkup], width: int = 80, color: bool = False) -> str:
    """What a check has come to: a heading and a line for each node, with the reasons in full."""
    heading = f"dlrover-run: node check of {counted(len(rows), 'node')}: {_tally(rows)}"
    return "\n".join([heading, *_table(_labelled(rows), width, color, in_full=True)])


def render_link_table(
    rows: Sequence[Checkup], links: Sequence[LinkRow], threshold: float, width: int = 80, color: bool = False
) -> str:
    """The bandwidth of each link, those that failed first and then the slowest. The ends are places in `rows`. Slow is
    a link that is more than `threshold` times slower than the median of all."""
    names = [name for name, _ in _labelled(rows)]
    speeds = sorted(link.gigabytes for link in links if not _failed(link))
    median = (speeds[(len(speeds) - 1) // 2] + speeds[len(speeds) // 2]) / 2 if speeds else 0.0
    heading = f"dlrover-run: bandwidth of {counted(len(links), 'link')}"
    lines = [f"{heading}, median {format_bandwidth(median)}" if speeds else heading]
    room = max(4, (width - 32) // 2)
    named = [(_between(link, names, room), link) for link in sorted(links, key=lambda link: link.gigabytes)]
    widest = max((display_width(between) for between, _ in named), default=0)
    for between, link in named:
        line = _pad(between, widest)
        if _failed(link):
            lines += _entry(line, "failed", _plain(link.problem), width, _red(color), marked=True, in_full=True)
            continue
        slow = link.gigabytes * threshold < median
        line, word, paint = f"{line}  {format_bandwidth(link.gigabytes):>9}", "slow" if slow else "", _yellow(color)
        lines += _entry(line, word, "", width, paint if slow else "", marked=slow, in_full=True)
    return "\n".join(lines)


def render_node_status(rows: Sequence[Checkup], place: int) -> str:
    """One line about one node of a check, where no table is drawn."""
    name, row = _labelled(rows)[place]
    reason = f": {_plain(row.reason)}" if row.reason else ""
    return f"node check: {name}: {_figures(row)}: {_VERDICTS[row.verdict]}{reason}"


def render_own_status(checkup: Checkup) -> str:
    """One line that a node says of itself, a warning where there is something to look after."""
    reason = _plain(checkup.reason)
    if checkup.verdict is Verdict.STRAGGLER:
        return f"warning: this node is a straggler: {reason or 'slower than the others'} ({_figures(checkup)})"
    line = f"node check: {_figures(checkup)}: {_VERDICTS[checkup.verdict]}"
    return f"warning: {line}; {reason}" if reason else line


def format_tflops(tflops: float) -> str:
    """A speed of computing for people, `0.084 TFLOP/s`; `-` when there is none."""
    return f"{_number(tflops)} TFLOP/s" if tflops else "-"


def format_bandwidth(gigabytes: float) -> str:
    """A bandwidth for people, `1.25 GB/s` or `240 MB/s`; `-` when there is none."""
    if not gigabytes:
        return "-"
    return f"{_number(gigabytes)} GB/s" if gigabytes >= 1 else f"{_number(gigabytes * 1000)} MB/s"


def _number(value: float) -> str:
    """Three digits that count: more would be noise of the measurement."""
    if value < 0.001:
        return "<0.001"
    return f"{value:.0f}" if 100 <= value < 1e6 else f"{value:.3g}"


def _figures(row: Checkup) -> str:
    known = [words for words in (format_tflops(row.tflops), format_bandwidth(row.gigabytes)) if words != "-"]
    return ", ".join(known) or "nothing was measured"


def _tally(rows: Iterable[Checkup]) -> str:
    count = Counter(row.verdict for row in rows)
    words = {**_VERDICTS, Verdict.PENDING: "open"}
    return ", ".join(f"{count[verdict]} {words[verdict]}" for verdict in reversed(_URGENT) if count[verdict])


def _labelled(rows: Sequence[Checkup]) -> list[tuple[str, Checkup]]:
    """Each node's name, and its id where several have one name. No number: in the log that is the place in the check,
    which is not the rank that it gets when others leave, and some nodes may have been left out of the list."""
    names = [_plain(row.host) for row in rows]
    several = {name for name, count in Counter(names).items() if count > 1}
    return [
        (f"{name} ({row.node_id})" if name in several else name, row) for name, row in zip(names, rows, strict=True)
    ]


def _table(labelled: Sequence[tuple[str, Checkup]], width: int, color: bool, in_full: bool = False) -> list[str]:
    narrow = width < _NARROW
    table = [("node", "TFLOP/s", "GB/s") if narrow else ("node", "compute", "communication")]
    table += [(name, *_speeds(row, narrow)) for name, row in labelled]
    names, compute, communication = (max(display_width(line[column]) for line in table) for column in range(3))
    # What is left beside the other columns, the longest verdict, and two columns before each of the four.
    names = max(4, min(names, MAX_NAME, width - compute - communication - len("straggler") - 8))
    lines = [f"{_pad(line[0], names)}  {line[1]:>{compute}}  {line[2]:>{communication}}" for line in table]
    drawn = _entry(lines[0], "verdict", "", width, BOLD if color else "")
    for line, (_, row) in zip(lines[1:], labelled, strict=True):
        word, reason, paint = _VERDICTS[row.verdict], _plain(row.reason), _paint(row, color)
        drawn += _entry(line, word, reason, width, paint, marked=_asks(row), in_full=in_full)
    return drawn


def _speeds(row: Checkup, narrow: bool) -> tuple[str, str]:
    compute, communication = format_tflops(row.tflops), format_bandwidth(row.gigabytes)
    if narrow:
        compute = compute.partition(" ")[0]
        communication = _number(row.gigabytes) if row.gigabytes else communication
    if row.verdict is not Verdict.PENDING:
        return compute, communication
    # What was not measured yet may still come.
    return compute.replace("-", "..."), communication.replace("-", "...")


def _entry(
    line: str, word: str, reason: str, width: int, paint: str = "", *, marked: bool = False, in_full: bool = False
) -> list[str]:
    """One row; a reason that does not fit beside it follows `in_full` on lines of its own, or is cut off."""
    row = f"{'!' if marked else ' '} {line}  {word}".rstrip()
    beside = f"{row}: {reason}" if reason else row
    if display_width(beside) <= width or not in_full:
        return [colored(truncate(beside, width), paint)]
    wrapped = textwrap.wrap(reason, max(width, 2 * len(_INDENT)), initial_indent=_INDENT, subsequent_indent=_INDENT)
    return [colored(text, paint) for text in [truncate(row, width), *wrapped]]


def _asks(row: Checkup) -> bool:
    """Whether a person should look at it. A node that passed of which there is something to say had bad luck with a
    link."""
    return row.verdict in (Verdict.FAULT, Verdict.STRAGGLER) or bool(row.reason)


def _paint(row: Checkup, color: bool) -> str:
    if row.verdict is Verdict.FAULT:
        return _red(color)
    return _yellow(color) if _asks(row) else ""


def _red(color: bool) -> str:
    return RED if color else ""


def _yellow(color: bool) -> str:
    return YELLOW if color else ""


def _failed(link: LinkRow) -> bool:
    return not link.gigabytes


def _between(link: LinkRow, names: Sequence[str], room: int) -> str:
    one, other = (truncate(names[place], room) for place in (link.one, link.other))
    return f"within {one}" if link.one == link.other else f"{one} - {other}"


def _pad(text: str, columns: int) -> str:
    kept = truncate(text, columns)
    return kept + " " * (columns - display_width(kept))


def _plain(text: str) -> str:
    """One line of words that another node may have said."""
    return " ".join(sanitize(text).split())
