"""The status of a job as plain lines for a person. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

from dlrover_run.console.text import format_duration, sanitize
from dlrover_run.coordination.records.size_choice import DesiredServers, SizeChoice
from dlrover_run.features import FEATURES
from dlrover_run.features.operate.display.ids import short_id
from dlrover_run.features.operate.protocol import TaskProgress
from dlrover_run.job_status.progress import NodeProgress
from dlrover_run.job_status.shown import Columns
from dlrover_run.job_status.stacks import JobStacks, SilentNode, StackProblem
from dlrover_run.job_status.status import (
    JobState,
    JobStatus,
    NodeCondition,
    NodeStatus,
)
from dlrover_run.words.text import counted, format_ranks

COLUMNS: tuple[Columns, ...] = tuple(import_module(row.module("columns")).COLUMNS for row in FEATURES if row.columns)
"""What features add to the tables."""

GAP = "  "
"""What stands between two columns."""

PART_GAP = "   "
"""What stands between two figures of a job."""


@dataclass(frozen=True)
class Effectiveness:
    """The effective training time ratio by the event logs of `nodes` nodes, those that this machine can read. It is an
    upper bound where no steps are counted (`ledger.knows_steps`)."""

    ratio: float
    nodes: int
    is_bound: bool = False


NodeTasks = Mapping[str, Sequence[TaskProgress]]
"""What the tasks of nodes on this machine have done, by the node id."""


class Line(NamedTuple):
    """A line of a status. `bad`: it shows what is wrong, and is red where there are colours."""

    text: str
    bad: bool = False


class StatusLines(NamedTuple):
    """The lines of `status`: those above the table of the nodes, its head, a line for each node, and what follows."""

    top: list[Line]
    head: list[Line]
    nodes: list[Line]
    end: list[Line]

    @property
    def all(self) -> list[Line]:
        return [*self.top, *self.head, *self.nodes, *self.end]


def render_status(status: JobStatus, effective: Effectiveness | None = None, here: NodeTasks | None = None) -> str:
    """The text of `status`, as `status_lines`."""
    return "\n".join(line.text for line in status_lines(status, effective, here).all)


def status_lines(
    status: JobStatus, effective: Effectiveness | None = None, here: NodeTasks | None = None, width: int | None = None
) -> StatusLines:
    """The lines of `status`: what hangs, the job, its restarts, what it waits for, and one line for each node, those
    with trouble first. `here` is what the agents of this machine have read just now. The line of the job is folded to a
    `width`."""
    lines = [*_headline(status, effective, width), _restarts(status)]
    if status.waiting and status.state is JobState.WAITING:
        left = "" if status.waiting_seconds is None else f" (at most {format_duration(status.waiting_seconds)} more)"
        lines.append(f"waits: {status.waiting}{left}")
    if _lacks_steps(status, here or {}):
        stacks = f"{status.program} stacks {short_id(status.job)}"
        lines.append(f"steps: not counted, so a hang may not show: try `{stacks}` (--progress=optimizer counts them)")
    lines.append(_scale(status))
    choice = status.size_choice
    if choice is not None:
        lines.append(_choice(choice))
    lines = [line for line in lines if line]
    if choice is not None and choice.sizes:
        lines += ["", *_size_table(choice)]
    nodes = sorted(status.nodes, key=_trouble)
    head, *rows = _node_table(status, nodes, here or {}) if nodes else [""]
    more = [f"… {counted(status.nodes_omitted, 'more node')}"] if status.nodes_omitted else []
    for columns in COLUMNS:
        if found := columns.table(status):
            more += ["", *table(*found)]
    return StatusLines(
        [*([Line(sanitize(status.hang), bad=True)] if status.hang else []), *_plain(lines)],
        _plain(["", head]) if nodes else [],
        [Line(sanitize(text), _trouble(node) < _CALM) for text, node in zip(rows, nodes, strict=True)],
        _plain(more),
    )


def _lacks_steps(status: JobStatus, here: NodeTasks) -> bool:
    """Whether nothing shows that the workers of a job make progress. Tasks of `tf-ps-run` count the steps of their
    session."""
    if status.state is not JobState.TRAINING or status.max_restarts is None or status.hang:
        return False
    return not any(here.values()) and all(node.progress is None for node in status.nodes)


def _plain(lines: Sequence[str]) -> list[Line]:
    # A choice of size is several lines.
    return [Line(sanitize(part)) for line in lines for part in line.split("\n")]


_BROKEN = frozenset({NodeCondition.FAILED, NodeCondition.DISCONNECTED, NodeCondition.EXCLUDED})
_CALM = 2


def _trouble(node: NodeStatus) -> int:
    """The place of a node in the table: those that hang, those that are broken, stragglers, then all others."""
    if node.progress is not None and node.progress.hangs:
        return 0
    if node.state in _BROKEN:
        return 1
    return _CALM if node.stragglers else _CALM + 1


def folded(parts: Sequence[str], width: int | None) -> list[str]:
    """Parts beside each other, in as many lines as a width needs; None: in one."""
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}{PART_GAP if lines[-1] else ''}{part}"
        if width is not None and lines[-1] and len(joined) > width:
            lines.append(part)
        else:
            lines[-1] = joined
    return lines


def _headline(status: JobStatus, effective: Effectiveness | None, width: int | None) -> list[str]:
    state = status.state.value
    if status.seconds is not None:
        state += f" for {format_duration(status.seconds)}"
    parts = [f"job {short_id(status.job)}", state]
    if status.round:
        parts.append(f"{'version' if status.max_restarts is None else 'round'} {status.round}")
    parts.append(_size(status))
    if status.workers:
        parts.append(counted(status.workers, "worker"))
    if status.age is not None:
        parts.append(f"up {format_duration(status.age)}")
    if effective is not None:
        which = "" if effective.nodes >= len(status.nodes) else f" ({counted(effective.nodes, 'log')} read)"
        bound = "at most " if effective.is_bound else ""
        parts.append(f"ETTR {bound}{100 * effective.ratio:.1f} %{which}")
    return folded(parts, width)


def _size(status: JobStatus) -> str:
    wanted = str(status.max_nodes)
    if status.min_nodes != status.max_nodes:
        wanted = f"{status.min_nodes}:{status.max_nodes}"
    here = status.round_nodes if status.round_nodes else sum(status.node_counts.values())
    if status.max_restarts is None:
        return counted(here, "node")
    spares = status.node_counts.get("spare", 0)
    size = "1 node" if here == 1 and wanted == "1" else f"{here} of {wanted} nodes"
    return size + (f" (+{counted(spares, 'spare')})" if spares else "")


def _restarts(status: JobStatus) -> str:
    """The restarts, and why there is this round."""
    parts = []
    if status.max_restarts is not None:
        of = f" of {status.max_restarts}" if not status.restart_window else ""
        parts.append(f"restarts {status.restarts}{of}")
        if status.restart_window:
            window = format_duration(status.restart_window)
            parts.append(f"{status.restarts_left} of {status.max_restarts} left in {window}")
    if status.reason and (status.round > 1 or status.state in (JobState.SUCCEEDED, JobState.FAILED)):
        parts.append(f"last: {status.reason}")
    return "   ".join(parts)


def _scale(status: JobStatus) -> str:
    """The size that an operator has asked for, and the planned change that waits."""
    parts = []
    if status.desired_nodes:
        noun = "node" if status.desired_nodes == "1" else "nodes"
        parts.append(f"scale: {status.desired_nodes} {noun}, asked for by {status.desired_by or 'an operator'}")
    if status.change_waits:
        left = "" if status.change_seconds is None else f" (at most {format_duration(status.change_seconds)} more)"
        parts.append(f"a planned change waits for the next checkpoint{left}")
    return "; ".join(parts)


def _choice(choice: SizeChoice) -> str:
    """The size that a feature wants, and why."""
    return "\n".join(
        ["autoscale: " + _size_choice(choice), *([] if choice.servers is None else [_servers(choice.servers)])]
    )


def _size_choice(choice: SizeChoice) -> str:
    if choice.paused:
        return f"paused by the size that was asked for ({GIVEN_BACK[choice.noun]} gives it back)"
    wanted = f"{counted(choice.wanted_nodes, choice.noun)} wanted, " if choice.is_wanted else ""
    measuring = f" ({counted(choice.measuring, 'block')} so far)" if choice.measuring and choice.is_measuring else ""
    failed = "; --scale-command has failed" if choice.command_failed else ""
    return f"{wanted}{choice.condition}: {choice.reason}{measuring}{failed}"


GIVEN_BACK = {"node": "dlrover-run scale --nodes=auto", "worker": "tf-ps-run scale --workers=auto"}
"""The command that gives the size back to the feature, by what the size counts."""


def _servers(servers: DesiredServers) -> str:
    """The parameter servers that a feature wants, and what those here use."""
    if servers.paused:
        return "servers: paused by the number that was asked for (tf-ps-run scale --ps=auto gives it back)"
    wanted = f"{counted(servers.wanted, 'parameter server')} wanted: " if servers.wanted else ""
    figures = [("processor", servers.processor), ("memory", servers.memory)]
    used = ", ".join(f"{name} {share} %" for name, share in figures if share is not None)
    return f"servers: {wanted}{servers.reason}{f' ({used})' if used else ''}"


def _size_table(choice: SizeChoice) -> list[str]:
    """What was measured of each size."""
    rows = [
        (
            f"{size.nodes}{'  <' if size.nodes == choice.chosen_nodes else ''}",
            "-" if size.throughput is None else f"{size.throughput:.4g}",
            "-" if size.error is None else f"{100 * size.error:.1f} %",
            "-" if size.efficiency is None else f"{size.efficiency:.2f}",
            str(size.blocks) if size.blocks else "-",
            f"failed {counted(size.failures, 'time')}" if size.failures and not size.blocks else "",
        )
        for size in choice.sizes
    ]
    return table(
        ("SIZE" if choice.noun == "node" else f"{choice.noun.upper()}S", "WORK/S", "ERROR", "EFFICIENCY", "BLOCKS", ""),
        rows,
    )


def _node_table(status: JobStatus, nodes: Sequence[NodeStatus], here: NodeTasks) -> list[str]:
    has_tasks = any(node.tasks for node in nodes)
    known = {node.node_id: _progress(node, here.get(node.node_id, ())) for node in nodes}
    # A column without a figure is left out.
    waits = any(done is not None and done.data_wait is not None for done in known.values())
    steps = ("STEP", "STEP/S", "LAST STEP") if any(known.values()) else ()
    added = [columns for columns in COLUMNS if any(columns.cells(node) is not None for node in nodes)]
    figured = (*steps, *(["WAITS"] * waits), *(name for columns in added for name in columns.head))
    head = ("NODE", "HOST", "STATE", "SINCE", "TASKS" if has_tasks else "RANKS", *figured, "REASON")
    rows = []
    for node in nodes:
        done = known[node.node_id]
        figures = (
            *(_steps(done) if steps else ()),
            *([_data_wait(done)] if waits else ()),
            *(cell for columns in added for cell in columns.cells(node) or ("-",) * len(columns.head)),
        )
        rows.append(_row(node, figures))
    return table(head, rows)


def _row(node: NodeStatus, figures: Sequence[str]) -> tuple[str, ...]:
    return (
        "-" if node.node is None else str(node.node),
        node.host or "?",
        node.state.value,
        "-" if node.seconds is None else format_duration(node.seconds),
        ", ".join(node.tasks) if node.tasks else _ranks(node),
        *figures,
        node.reason.replace("\n", " "),
    )


def _progress(node: NodeStatus, here: Sequence[TaskProgress]) -> NodeProgress | None:
    """The progress of a node: what its agent on this machine reads now, else what the node has reported. The agent does
    not know which share of the time is waiting."""
    reported = node.progress
    if not here:
        return reported
    slowest = min(here, key=lambda task: task.steps)
    stalled = () if reported is None else reported.stalled
    return NodeProgress(
        steps=slowest.steps,
        step_seconds=None if slowest.name in stalled else slowest.period,
        data_wait=None if reported is None else reported.data_wait,
        idle=min(task.idle for task in here),
        stalled=stalled,
        hangs=() if reported is None else reported.hangs,
        awaited="" if reported is None else reported.awaited,
    )


def _steps(done: NodeProgress | None) -> tuple[str, str, str]:
    """The steps of a node, its pace, and the time since its last step."""
    if done is None:
        return "-", "-", "-"
    pace = f"{1 / done.step_seconds:.3g}" if done.step_seconds else "-"
    return str(done.steps), pace, "-" if done.idle is None else f"{format_duration(done.idle)} ago"


def _data_wait(done: NodeProgress | None) -> str:
    return "-" if done is None or done.data_wait is None else f"{100 * done.data_wait:.0f} %"


def _ranks(node: NodeStatus) -> str:
    if node.first_rank is None:
        return "-"
    last = node.first_rank + node.workers - 1
    return str(last) if last == node.first_rank else f"{node.first_rank}-{last}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows below a head, in columns; a line has no spaces at its end."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        GAP.join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]


def render_stacks(stacks: JobStacks) -> str:
    """The lines of `stacks`: each stack once, those of the fewest workers first; then the workers and the nodes without
    one."""
    shown = sum(len(each.workers) for each in stacks.stacks)
    total = shown + sum(len(each.workers) for each in stacks.missing)
    parts = [f"job {stacks.job}"]
    if stacks.round:
        parts.append(f"round {stacks.round}")
    parts.append(f"stacks of {shown} of {counted(total, 'worker')}")
    parts.append(counted(stacks.nodes, "node"))
    lines = ["   ".join(parts)]
    for each in stacks.stacks:
        lines += ["", f"{_workers(each.workers)}:"]
        lines += [f"  {frame.file}:{frame.line or '?'} in {frame.function}" for frame in each.frames]
        if not each.frames:
            lines.append("  (no Python code)")
    if stacks.missing or stacks.silent:
        lines.append("")
    lines += [f"{_workers(each.workers)}: {PROBLEMS[each.problem]}" for each in stacks.missing]
    lines += [f"{_silent(node)}: {PROBLEMS[node.problem]}" for node in stacks.silent]
    return sanitize("\n".join(lines))


PROBLEMS = {
    StackProblem.STOPPED: "stopped by a signal, or by a debugger",
    StackProblem.BLOCKED: "no stack: blocked in the kernel (state D), for example by a disk or a network file system",
    StackProblem.NO_PYTHON: "no stack: it runs no CPython of a version from 3.9 to 3.14, or has only just begun",
    StackProblem.NOT_PERMITTED: "no stack: the launcher may not read its memory (kernel.yama.ptrace_scope above 1, or "
    "another user)",
    StackProblem.NO_ANSWER: "no stack: the kernel did not let it be read in time",
    StackProblem.ENDED: "no stack: it has ended",
    StackProblem.NO_ROOM: "its stack is left out, because there are too many different ones: use --rank or --node",
    StackProblem.NODE_DISCONNECTED: "not asked: it is not connected",
    StackProblem.NODE_NO_ANSWER: "no answer in time",
}
"""What is shown for each problem."""


def _workers(workers: Sequence[int | str]) -> str:
    """Workers by rank, or by name."""
    ranks = [worker for worker in workers if isinstance(worker, int)]
    names = [worker for worker in workers if isinstance(worker, str)]
    return ", ".join([*([format_ranks(ranks)] if ranks else []), *names])


def _silent(node: SilentNode) -> str:
    return f"node {node.node_id} ({node.host})" if node.node is None else f"node {node.node} ({node.host})"
