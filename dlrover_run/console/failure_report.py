"""The failure report: which worker failed first and how, where its output is, what the other workers did.

The text is ASCII unless the worker's own message is not; colors are for terminals only. Two parts are torchrun's,
because scripts search for them: the heading `Root Cause (first observed failure):` and the fields `rank`, `exitcode`
and `error_file` with their spacing.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from datetime import datetime, tzinfo

import msgspec

from dlrover_run.console.text import BOLD, RED, colored, format_duration, sanitize
from dlrover_run.coordination.records.round import Failure
from dlrover_run.failures.causes import MAX_SUMMARY, describe_exit, lost_peer, summarize_error, trace_lines
from dlrover_run.failures.tracebacks import exception_lines, last_link, plain_lines
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.words.text import format_ranks

MAX_TRACE_LINES = 30
"""Maximum lines of the root cause's own output."""

MAX_GROUPS = 8
"""Maximum groups of other exits."""

_MIN_WIDTH = 40
_MAX_WIDTH = 100


class FailureReport(msgspec.Struct, frozen=True):
    """The facts of a failed job on this node.

    `job` is the workers' program as the user named it. `ends` are the exits of this node's workers of the last round,
    in the order in which they were observed. `root` is the worker that failed first: one of these, or the failure that
    another node reported. `restarts` of `max_restarts` were used; `why_over` is the reason why there is no further
    restart if it is not that number, or if `max_restarts` is None. `exit_code` is the launcher's. `hint` is a
    sentence on what the launcher knows of the cause, empty if nothing.
    """

    job: str
    host: str
    root: WorkerExit | Failure
    ends: tuple[WorkerExit, ...]
    restarts: int
    max_restarts: int | None
    exit_code: int
    why_over: str = ""
    hint: str = ""


def render_failure(report: FailureReport, width: int = 80, color: bool = False, zone: tzinfo | None = None) -> str:
    """The report in lines of at most `width` columns; lines of a traceback and paths are never broken.

    `zone` is the time zone of the time in the report, None for this machine's.
    """
    width = max(_MIN_WIDTH, min(width, _MAX_WIDTH))
    root = report.root
    bold, red = (BOLD, RED) if color else ("", "")
    rule, thin = "=" * width, "-" * width
    lines = [rule, colored(f"{report.job} FAILED", bold), thin]
    lines.append("Root Cause (first observed failure):")
    if isinstance(root, Failure):
        host, node = sanitize(root.host), sanitize(root.node)
        lines += [colored(line, red) for line in _wrapped(sanitize(str(root)), width, "  ")]
        lines += [f"  host      : {host}", f"  rank      : {root.rank}"]
        lines += _traceback(plain_lines(root.trace)) if root.trace else []
        there = f"on {node}: on that launcher's console" if root.node != report.host else "above, on this console"
        lines += _wrapped(f"Its output is {there}, or in its log files.", width, "  ")
    else:
        exit_text = f"{root.name or f'rank {root.rank}'} {describe_exit(root)}"
        lines += [colored(line, red) for line in _wrapped(exit_text, width, "  ")]
        lines += _fields(root, report.host, width, zone)
        lines += _own_output(root)
        lines += _wrapped(sanitize(report.hint), width, "  ") if report.hint else []
        lines += _where_to_look(root, width)
    others = [end for end in report.ends if end.rank != root.rank]
    if others:
        lines.append(f"The workers of this node ({report.host}):" if isinstance(root, Failure) else "Others:")
        for text in _others(others, None if isinstance(root, Failure) else root):
            lines += _wrapped(text, width, "  ")
    lines += [thin, *_closing(report, width), rule]
    return "\n".join(lines)


def render_remote_failure(reason: str, failure: Failure, exit_code: int) -> str:
    """One line for a node on which the root cause is not: the coordinator's `reason`, which names the failure, and
    which node has the full report."""
    where = f"the full report is on the console of {failure.node}"
    return f"the job failed: {reason}; {where}; this launcher exits with code {exit_code}"


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """One paragraph; an entry of a list (with `indent`) has a hanging indent."""
    further = indent + ("  " if indent else "")
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
    )


def _fields(root: WorkerExit, host: str, width: int, zone: tzinfo | None) -> list[str]:
    """torchrun's fields with its spelling and spacing, two to a line if they fit."""
    when = datetime.fromtimestamp(root.unix_time, zone).isoformat(sep="_", timespec="seconds")[:19]
    name = re.search(r"SIG\w+|signal \d+", describe_exit(root)) if root.code < 0 else None
    pairs = [
        (f"time      : {when}", f"host      : {host}"),
        (
            f"rank      : {root.rank} (local_rank: {root.local_rank})",
            f"exitcode  : {root.code} (pid: {root.pid})" + (f" ({name.group()})" if name else ""),
        ),
    ]
    lines: list[str] = []
    for first, second in pairs:
        joined = f"  {first:<32}  {second}"
        lines += [joined] if len(joined) <= width else [f"  {first}", f"  {second}"]
    return [*lines, f"  error_file: {root.error_file or '<N/A>'}"]


def _own_output(root: WorkerExit) -> list[str]:
    """The end of the root cause's traceback, else of its output."""
    trace = trace_lines(root)
    if trace:
        return _traceback(trace)
    tail = [line for line in plain_lines(root.stderr_tail) if line]
    if not tail:
        return []
    return ["", "  The end of its output:", *_indented(tail[-MAX_TRACE_LINES:]), ""]


def _traceback(trace: list[str]) -> list[str]:
    """At most `MAX_TRACE_LINES`: the heading, the number of omitted lines, and the end, which has the cause."""
    if len(trace) > MAX_TRACE_LINES:
        trace = last_link(trace)
    if len(trace) > MAX_TRACE_LINES:
        kept = MAX_TRACE_LINES - 2
        trace = [trace[0], f"  ... {len(trace) - kept - 1} lines left out ...", *trace[-kept:]]
    return ["", *_indented(trace), ""]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


def _where_to_look(root: WorkerExit, width: int) -> list[str]:
    if root.stderr_path is None and root.stdout_path is None:
        return _wrapped("Its output is above, on this console; --log-dir DIR -r 3 keeps it in files.", width, "  ")
    if root.stderr_path is None:
        return ["  Its standard error is above, on this console.", f"  Its output: {root.stdout_path}"]
    output = [] if root.stdout_path in (None, root.stderr_path) else [f"  Its output: {root.stdout_path}"]
    return [f"  Full log:   {root.stderr_path}", *output]


def _others(others: Sequence[WorkerExit], root: WorkerExit | None) -> list[str]:
    """What the other workers did: one entry for equal exits, failures first. `root` is None if it is on another node,
    whose clock cannot be compared."""
    groups: dict[tuple[int, str], list[WorkerExit]] = {}
    for end in others:
        kind = 0 if end.failed else 1 if end.stopped_with is not None else 2
        # Addresses, ports and ranks differ between workers in an otherwise equal message.
        alike = re.sub(r"\d+", "#", describe_exit(end)) if kind == 0 else describe_exit(end)
        groups.setdefault((kind, alike), []).append(end)
    texts = []
    for (kind, _), ends in sorted(groups.items(), key=lambda item: item[0][0]):
        ranks = format_ranks(end.rank for end in ends)
        if kind == 0:
            lost = " (lost a peer)" if all(map(lost_peer, ends)) else ""
            texts.append(f"{ranks} {_delay(ends, root) if root else 'failed'}{lost}: {_how(ends)}")
        elif kind == 1:
            texts.append(_stopped(ends, ranks))
        else:
            texts.append(f"{ranks} finished with code 0")
    left_out = len(texts) - MAX_GROUPS
    return texts if left_out <= 0 else [*texts[:MAX_GROUPS], f"and {left_out} more groups of exits"]


def _delay(ends: Sequence[WorkerExit], root: WorkerExit) -> str:
    # The exit of a peer may be observed a moment before that of the root cause.
    times = sorted(max(0.0, end.unix_time - root.unix_time) for end in ends)
    first, last = format_duration(times[0]), format_duration(times[-1])
    if last == format_duration(0.0):
        return "failed at once after it"
    if first == last:
        return f"failed {first} later"
    return f"failed up to {last} later" if first == format_duration(0.0) else f"failed {first} to {last} later"


def _how(ends: Sequence[WorkerExit]) -> str:
    # The source location inside a library does not help its user and fills half a line.
    text = re.sub(r"\[\S+\.(?:cc|cpp|cu|h|hpp):\d+\] ", "", describe_exit(ends[0]))
    distinct = {describe_exit(end) for end in ends}
    return text if len(distinct) == 1 else f"{text} (rank {ends[0].rank}; the others alike)"


def _stopped(ends: Sequence[WorkerExit], ranks: str) -> str:
    verb = "was" if len(ends) == 1 else "were"
    sent = ends[0].stopped_with
    text = f"{ranks} {verb} stopped by the launcher ({sent.name if sent else '?'})"
    # A worker may report an error of its own, before it was stopped or because of that; it may be of interest.
    for end in ends:
        lines = exception_lines(end.stderr_tail)
        last = summarize_error(end) or (lines[0][:MAX_SUMMARY] if lines else None)
        if last and not lost_peer(end):
            return f"{text}; the last error of rank {end.rank} was {last}"
    return text


def _closing(report: FailureReport, width: int) -> list[str]:
    lines = []
    if report.max_restarts == 0:
        lines.append("No restarts were allowed; --max-restarts N allows N.")
    elif report.max_restarts is not None and report.restarts <= report.max_restarts:
        allowed = "1 restart was" if report.max_restarts == 1 else f"{report.max_restarts} restarts were"
        lines.append(f"{report.restarts} of {allowed} used.")
    if report.why_over and report.restarts != report.max_restarts:
        lines += _wrapped(sanitize(f"{report.why_over[0].upper()}{report.why_over[1:]}."), width)
    return [*lines, f"The launcher exits with code {report.exit_code}."]
