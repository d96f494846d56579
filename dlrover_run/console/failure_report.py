"""The text that a person reads when workers have failed: who was first, how, where to look, what the others did.

Pure text building on the records of the workers' ends. It is plain ASCII unless the worker's own words are not; colour
is for terminals only. Two things in it are torchrun's, because scripts search for them: the heading
`Root Cause (first observed failure):` and the fields `rank`, `exitcode`, `error_file` with their spacing.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo

from dlrover_run.console.text import BOLD, RED, colored, format_duration, format_ranks, sanitize
from dlrover_run.coordination.records import Failure
from dlrover_run.failures import MAX_SUMMARY, describe_exit, lost_peer, summarize_error, trace_lines
from dlrover_run.failures.tracebacks import exception_lines, last_link, plain_lines
from dlrover_run.failures.worker_exit import WorkerExit

MAX_TRACE_LINES = 30
"""Lines of the first failure's own output that the report shows."""

MAX_GROUPS = 8
"""Kinds of other ends that the report lists."""

_MIN_WIDTH = 40
_MAX_WIDTH = 100


@dataclass(frozen=True)
class FailureReport:
    """What is known when a job has failed on this node.

    `job` is what each worker ran, as the person named it. `ends` are this node's workers of the last round, in the
    order in which their ends were observed. `root` is the worker that failed first: one of these, or what its node has
    told of it. `restarts` of `max_restarts` were used, and `why_over` says why there is no other one, where that is not
    the number, or `max_restarts` is None. `exit_code` is the launcher's own.
    """

    job: str
    host: str
    root: WorkerExit | Failure
    ends: tuple[WorkerExit, ...]
    restarts: int
    max_restarts: int | None
    exit_code: int
    why_over: str = ""


def render_failure(report: FailureReport, width: int = 80, color: bool = False, zone: tzinfo | None = None) -> str:
    """The report as lines of at most `width` columns, except lines of a traceback and paths, which are never broken.

    `zone` is the time zone of the time that is shown, None for this machine's own.
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
        lines += [colored(line, red) for line in _wrapped(f"{root.who} {describe_exit(root)}", width, "  ")]
        lines += _fields(root, report.host, width, zone)
        lines += _own_words(root)
        lines += _where_to_look(root, width)
    others = [end for end in report.ends if end.rank != root.rank]
    if others:
        lines.append(f"The workers of this node ({report.host}):" if isinstance(root, Failure) else "Others:")
        for text in _others(others, None if isinstance(root, Failure) else root):
            lines += _wrapped(text, width, "  ")
    lines += [thin, *_closing(report, width), rule]
    return "\n".join(lines)


def render_remote_failure(reason: str, failure: Failure, exit_code: int) -> str:
    """One line for a node whose own workers are not the cause: the coordinator's `reason`, which names the failure, and
    where that is told in full."""
    where = f"the full report is on the console of {failure.node}"
    return f"the job failed: {reason}; {where}; this launcher exits with code {exit_code}"


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """One paragraph; its later lines are indented a little further when it is an entry of a list."""
    further = indent + ("  " if indent else "")
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _fields(root: WorkerExit, host: str, width: int, zone: tzinfo | None) -> list[str]:
    """torchrun's fields, two to a line where they fit, each of them spelled and spaced as torchrun does it."""
    when = datetime.fromtimestamp(root.unix_time, zone).isoformat(sep="_", timespec="seconds")[:19]
    name = re.search(r"SIG\w+|signal \d+", describe_exit(root)) if root.code < 0 else None
    fields = [
        f"time      : {when}",
        f"host      : {host}",
        f"rank      : {root.rank} (local_rank: {root.local_rank})",
        f"exitcode  : {root.code} (pid: {root.pid})" + (f" ({name.group()})" if name else ""),
        f"error_file: {root.error_file or '<N/A>'}",
    ]
    lines: list[str] = []
    alone = False
    for field in fields:
        joined = f"{lines[-1]:<34}  {field}" if alone else ""
        alone = not (joined and len(joined) <= width)
        if alone:
            lines.append(f"  {field}")
        else:
            lines[-1] = joined
    return lines


def _own_words(root: WorkerExit) -> list[str]:
    """The end of the first failure's traceback, else of what it wrote."""
    trace = trace_lines(root)
    if trace:
        return _traceback(trace)
    tail = [line for line in plain_lines(root.stderr_tail) if line]
    if not tail:
        return []
    return ["", "  The end of its output:", *_indented(tail[-MAX_TRACE_LINES:]), ""]


def _traceback(trace: list[str]) -> list[str]:
    if len(trace) > MAX_TRACE_LINES:
        trace = last_link(trace)
    return ["", *_indented(_shortened(trace)), ""]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


def _shortened(trace: Sequence[str]) -> list[str]:
    """At most `MAX_TRACE_LINES`: the heading, a note of what was left out, and the end, where the cause is."""
    if len(trace) <= MAX_TRACE_LINES:
        return list(trace)
    kept = MAX_TRACE_LINES - 2
    return [trace[0], f"  ... {len(trace) - kept - 1} lines left out ...", *trace[-kept:]]


def _where_to_look(root: WorkerExit, width: int) -> list[str]:
    if root.stderr_path is None and root.stdout_path is None:
        return _wrapped("Its output is above, on this console; --log-dir DIR -r 3 keeps it in files.", width, "  ")
    if root.stderr_path is None:
        return ["  Its standard error is above, on this console.", f"  Its output: {root.stdout_path}"]
    output = [] if root.stdout_path in (None, root.stderr_path) else [f"  Its output: {root.stdout_path}"]
    return [f"  Full log:   {root.stderr_path}", *output]


def _others(others: Sequence[WorkerExit], root: WorkerExit | None) -> list[str]:
    """What the other workers did, those that ended alike in one entry, failures first; `root` is None on another node,
    whose clock is not ours."""
    groups: dict[tuple[int, str], list[WorkerExit]] = {}
    for end in others:
        kind = 0 if end.failed else 1 if end.stopped_with is not None else 2
        # Addresses, ports and ranks in a message differ from worker to worker while the message is the same.
        alike = re.sub(r"\d+", "#", describe_exit(end)) if kind == 0 else describe_exit(end)
        groups.setdefault((kind, alike), []).append(end)
    texts = []
    for (kind, _), ends in sorted(groups.items(), key=lambda item: item[0][0]):
        who = format_ranks(end.rank for end in ends)
        if kind == 0:
            texts.append(f"{who} {_delay(ends, root) if root else 'failed'}{_lost(ends)}{_how(ends)}")
        elif kind == 1:
            texts.append(_stopped(ends, who))
        else:
            texts.append(f"{who} finished with code 0")
    left_out = len(texts) - MAX_GROUPS
    return texts if left_out <= 0 else [*texts[:MAX_GROUPS], f"and {left_out} more kinds of end"]


def _delay(ends: Sequence[WorkerExit], root: WorkerExit) -> str:
    # A peer may be seen to die a moment before the worker that it lost.
    times = sorted(max(0.0, end.unix_time - root.unix_time) for end in ends)
    first, last = format_duration(times[0]), format_duration(times[-1])
    if last == format_duration(0.0):
        return "failed at once after it"
    if first == last:
        return f"failed {first} later"
    return f"failed up to {last} later" if first == format_duration(0.0) else f"failed {first} to {last} later"


def _lost(ends: Sequence[WorkerExit]) -> str:
    return " (lost a peer): " if all(lost_peer(end) for end in ends) else ": "


def _how(ends: Sequence[WorkerExit]) -> str:
    # The source line inside a library says nothing to its user and fills half a line.
    text = re.sub(r"\[\S+\.(?:cc|cpp|cu|h|hpp):\d+\] ", "", describe_exit(ends[0]))
    distinct = {describe_exit(end) for end in ends}
    return text if len(distinct) == 1 else f"{text} (rank {ends[0].rank}; the others alike)"


def _stopped(ends: Sequence[WorkerExit], who: str) -> str:
    verb = "was" if len(ends) == 1 else "were"
    sent = ends[0].stopped_with
    text = f"{who} {verb} stopped by the launcher ({sent.name if sent else '?'})"
    # One that spoke of an error of its own, before it was stopped or because it was, may be worth a look.
    for end in ends:
        said = exception_lines(end.stderr_tail)
        last = summarize_error(end) or (said[0][:MAX_SUMMARY] if said else None)
        if last and not lost_peer(end):
            return f"{text}; the last words of rank {end.rank} were {last}"
    return text


def _closing(report: FailureReport, width: int) -> list[str]:
    lines = []
    if report.max_restarts == 0:
        lines.append("No restarts were allowed; --max-restarts N allows N.")
    elif report.max_restarts is not None and report.restarts <= report.max_restarts:
        lines.append(f"{report.restarts} of {report.max_restarts} restarts were used.")
    if report.why_over and report.restarts != report.max_restarts:
        lines += _wrapped(sanitize(f"{report.why_over[0].upper()}{report.why_over[1:]}."), width)
    return [*lines, f"The launcher exits with code {report.exit_code}."]
