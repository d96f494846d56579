"""The text of a node check: a table of the nodes, one of the links, and one line about a single node.

ASCII except for names and reasons from other nodes, whose control characters are removed. A row that needs attention
has a `!` before it, and a color on a terminal.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from dlrover_run.console.text import BOLD, RED, YELLOW, colored, display_width, sanitize, truncate
from dlrover_run.features.node_check.decision.model import HealthStatus, LinkRow, NodeHealth
from dlrover_run.words.text import counted

MAX_NAME = 32
"""Maximum columns of a node's name. Clouds have longer names, which differ at their beginning."""

_NARROW = 60
"""Columns below which the units are only in the heading."""

_INDENT = " " * 6

_STATUS_TEXTS = {
    HealthStatus.PENDING: "...",
    HealthStatus.UNCHECKED: "unchecked",
    HealthStatus.PASSED: "passed",
    HealthStatus.STRAGGLER: "straggler",
    HealthStatus.FAULT: "fault",
}
_URGENT = [
    HealthStatus.FAULT,
    HealthStatus.STRAGGLER,
    HealthStatus.PENDING,
    HealthStatus.UNCHECKED,
    HealthStatus.PASSED,
]


def render_live_table(rows: Sequence[NodeHealth], width: int, lines: int, color: bool = False) -> list[str]:
    """The state of a running check, in at most `lines` lines of at most `width` columns. If not all nodes fit, the most
    urgent ones are shown and the others are counted."""
    labelled = _labelled(rows)
    if len(rows) < lines:
        return _table(labelled, width, color)
    # The heading and the count take a line each.
    room = lines - 2
    if room < 1:
        return [truncate(_tally(rows), width)] if lines > 0 else []
    ordered = sorted(range(len(rows)), key=lambda place: _URGENT.index(rows[place].status))
    left_out = truncate(f"  and {len(rows) - room} more: {_tally(rows[place] for place in ordered[room:])}", width)
    return [*_table([labelled[place] for place in sorted(ordered[:room])], width, color), left_out]


def render_health_table(rows: Sequence[NodeHealth], width: int = 80, color: bool = False) -> str:
    """The result of a check: a heading and a line for each node, with the full reasons."""
    heading = f"dlrover-run: node check of {counted(len(rows), 'node')}: {_tally(rows)}"
    return "\n".join([heading, *_table(_labelled(rows), width, color, in_full=True)])


def render_link_table(
    rows: Sequence[NodeHealth], links: Sequence[LinkRow], threshold: float, width: int = 80, color: bool = False
) -> str:
    """The bandwidth of each link: failed links first, then the slowest. The ends of a link are indices of `rows`. A
    link is slow if it is more than `threshold` times slower than the median of all."""
    names = [name for name, _ in _labelled(rows)]
    speeds = sorted(link.gigabytes for link in links if link.gigabytes)
    median = (speeds[(len(speeds) - 1) // 2] + speeds[len(speeds) // 2]) / 2 if speeds else 0.0
    heading = f"dlrover-run: bandwidth of {counted(len(links), 'link')}"
    lines = [f"{heading}, median {format_bandwidth(median)}" if speeds else heading]
    room = max(4, (width - 32) // 2)
    named = [(_between(link, names, room), link) for link in sorted(links, key=lambda link: link.gigabytes)]
    widest = max((display_width(between) for between, _ in named), default=0)
    for between, link in named:
        line = _pad(between, widest)
        if not link.gigabytes:
            lines += _entry(
                line, "failed", _plain(link.problem), width, RED if color else "", marked=True, in_full=True
            )
            continue
        slow = link.gigabytes * threshold < median
        line, paint = f"{line}  {format_bandwidth(link.gigabytes):>9}", YELLOW if slow and color else ""
        lines += _entry(line, "slow" if slow else "", "", width, paint, marked=slow)
    return "\n".join(lines)


def render_node_status(rows: Sequence[NodeHealth], place: int) -> str:
    """One line about one node of a check, for a console without a table."""
    name, row = _labelled(rows)[place]
    reason = f": {_plain(row.reason)}" if row.reason else ""
    return f"node check: {name}: {_figures(row)}: {_STATUS_TEXTS[row.status]}{reason}"


def render_own_status(node_health: NodeHealth) -> str:
    """One line of a node about itself; a warning if something is wrong."""
    reason = _plain(node_health.reason)
    if node_health.status is HealthStatus.STRAGGLER:
        return f"warning: this node is a straggler: {reason or 'slower than the others'} ({_figures(node_health)})"
    line = f"node check: {_figures(node_health)}: {_STATUS_TEXTS[node_health.status]}"
    return f"warning: {line}; {reason}" if reason else line


def format_tflops(tflops: float) -> str:
    """A compute speed, such as `0.084 TFLOP/s`; `-` if not measured."""
    return f"{_number(tflops)} TFLOP/s" if tflops else "-"


def format_bandwidth(gigabytes: float) -> str:
    """A bandwidth, such as `1.25 GB/s` or `240 MB/s`; `-` if not measured."""
    if not gigabytes:
        return "-"
    return f"{_number(gigabytes)} GB/s" if gigabytes >= 1 else f"{_number(gigabytes * 1000)} MB/s"


def _number(value: float) -> str:
    """Three significant digits: more would be measurement noise."""
    if value < 0.001:
        return "<0.001"
    return f"{value:.0f}" if 100 <= value < 1e6 else f"{value:.3g}"


def _figures(row: NodeHealth) -> str:
    known = [text for text in (format_tflops(row.tflops), format_bandwidth(row.gigabytes)) if text != "-"]
    return ", ".join(known) or "nothing was measured"


def _tally(rows: Iterable[NodeHealth]) -> str:
    count = Counter(row.status for row in rows)
    names = {**_STATUS_TEXTS, HealthStatus.PENDING: "open"}
    return ", ".join(f"{count[status]} {names[status]}" for status in reversed(_URGENT) if count[status])


def _labelled(rows: Sequence[NodeHealth]) -> list[tuple[str, NodeHealth]]:
    """Each node's name, and its id if several nodes have the same name. Not its index: that is its place in the check,
    which differs from its rank once other nodes leave, and the list may not have all nodes."""
    names = [_plain(row.host) for row in rows]
    several = {name for name, count in Counter(names).items() if count > 1}
    return [
        (f"{name} ({row.node_id})" if name in several else name, row) for name, row in zip(names, rows, strict=True)
    ]


def _table(labelled: Sequence[tuple[str, NodeHealth]], width: int, color: bool, in_full: bool = False) -> list[str]:
    narrow = width < _NARROW
    table = [("node", "TFLOP/s", "GB/s") if narrow else ("node", "compute", "communication")]
    table += [(name, *_speeds(row, narrow)) for name, row in labelled]
    names, compute, communication = (max(display_width(line[column]) for line in table) for column in range(3))
    # The room beside the other columns, the longest status, and two columns before each of the four.
    names = max(4, min(names, MAX_NAME, width - compute - communication - len("straggler") - 8))
    lines = [f"{_pad(line[0], names)}  {line[1]:>{compute}}  {line[2]:>{communication}}" for line in table]
    drawn = _entry(lines[0], "status", "", width, BOLD if color else "")
    for line, (_, row) in zip(lines[1:], labelled, strict=True):
        word, reason, paint = _STATUS_TEXTS[row.status], _plain(row.reason), _paint(row, color)
        drawn += _entry(line, word, reason, width, paint, marked=_needs_attention(row), in_full=in_full)
    return drawn


def _speeds(row: NodeHealth, narrow: bool) -> tuple[str, str]:
    compute, communication = format_tflops(row.tflops), format_bandwidth(row.gigabytes)
    if narrow:
        compute = compute.partition(" ")[0]
        communication = _number(row.gigabytes) if row.gigabytes else communication
    if row.status is not HealthStatus.PENDING:
        return compute, communication
    # A speed that is not measured yet may still follow.
    return compute.replace("-", "..."), communication.replace("-", "...")


def _entry(
    line: str, word: str, reason: str, width: int, paint: str = "", *, marked: bool = False, in_full: bool = False
) -> list[str]:
    """One row. A reason that does not fit is wrapped below it with `in_full`, else truncated."""
    row = f"{'!' if marked else ' '} {line}  {word}".rstrip()
    beside = f"{row}: {reason}" if reason else row
    if display_width(beside) <= width or not in_full:
        return [colored(truncate(beside, width), paint)]
    wrapped = textwrap.wrap(reason, max(width, 2 * len(_INDENT)), initial_indent=_INDENT, subsequent_indent=_INDENT)
    return [colored(text, paint) for text in [truncate(row, width), *wrapped]]


def _needs_attention(row: NodeHealth) -> bool:
    """Whether the row needs attention. A node that passed with a reason had a problem with a link."""
    return row.status in (HealthStatus.FAULT, HealthStatus.STRAGGLER) or bool(row.reason)


def _paint(row: NodeHealth, color: bool) -> str:
    if not color or not _needs_attention(row):
        return ""
    return RED if row.status is HealthStatus.FAULT else YELLOW


def _between(link: LinkRow, names: Sequence[str], room: int) -> str:
    one, other = (truncate(names[place], room) for place in (link.one, link.other))
    return f"within {one}" if link.one == link.other else f"{one} - {other}"


def _pad(text: str, columns: int) -> str:
    kept = truncate(text, columns)
    return kept + " " * (columns - display_width(kept))


def _plain(text: str) -> str:
    """Text from another node as one line without control characters."""
    return " ".join(sanitize(text).split())
