"""The status of a job as plain lines for a person. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlrover_run.console.text import format_duration, sanitize
from dlrover_run.coordination.status import JobState, JobStatus, NodeStatus
from dlrover_run.coordination.text import counted
from dlrover_run.operate.protocol import TaskProgress

GAP = "  "
"""What stands between two columns."""


@dataclass(frozen=True)
class Effectiveness:
    """The effective training time ratio by the event logs of `nodes` nodes, those that this machine can read."""

    ratio: float
    nodes: int


NodeProgress = Mapping[str, Sequence[TaskProgress]]
"""What the tasks of nodes have done, by the node id."""


def render_status(
    status: JobStatus, effective: Effectiveness | None = None, progress: NodeProgress | None = None
) -> str:
    """The lines of `status`: the job, its restarts, what it waits for, and one line for each node."""
    lines = [_headline(status, effective), _restarts(status)]
    if status.waiting and status.state is JobState.WAITING:
        left = "" if status.waiting_seconds is None else f" (at most {format_duration(status.waiting_seconds)} more)"
        lines.append(f"waits: {status.waiting}{left}")
    lines = [line for line in lines if line]
    if status.nodes:
        lines += ["", *_node_table(status, progress or {})]
    if status.nodes_omitted:
        lines.append(f"... and {counted(status.nodes_omitted, 'node')} more")
    return sanitize("\n".join(lines))


def _headline(status: JobStatus, effective: Effectiveness | None) -> str:
    state = status.state.value
    if status.seconds is not None:
        state += f" for {format_duration(status.seconds)}"
    parts = [f"job {status.job}", state]
    if status.round:
        parts.append(f"{'version' if status.max_restarts is None else 'round'} {status.round}")
    parts.append(_size(status))
    if status.workers:
        parts.append(counted(status.workers, "worker"))
    if status.age is not None:
        parts.append(f"up {format_duration(status.age)}")
    if effective is not None:
        which = "" if effective.nodes >= len(status.nodes) else f" ({counted(effective.nodes, 'log')} read)"
        parts.append(f"ETTR {100 * effective.ratio:.1f} %{which}")
    return "   ".join(parts)


def _size(status: JobStatus) -> str:
    wanted = str(status.max_nodes)
    if status.min_nodes != status.max_nodes:
        wanted = f"{status.min_nodes}:{status.max_nodes}"
    here = status.round_nodes if status.round_nodes else sum(status.node_counts.values())
    if status.max_restarts is None:
        return counted(here, "node")
    spares = status.node_counts.get("spare", 0)
    return f"{here} of {wanted} nodes" + (f" (+{counted(spares, 'spare')})" if spares else "")


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


def _node_table(status: JobStatus, progress: NodeProgress) -> list[str]:
    has_tasks = any(node.tasks for node in status.nodes)
    steps = ("STEP", "STEP/S", "LAST STEP") if progress else ()
    head = ("NODE", "HOST", "STATE", "SINCE", "TASKS" if has_tasks else "RANKS", *steps, "REASON")
    return table(head, [_row(node, progress) for node in status.nodes])


def _row(node: NodeStatus, progress: NodeProgress) -> tuple[str, ...]:
    return (
        "-" if node.node is None else str(node.node),
        node.host or "?",
        node.state.value,
        "-" if node.seconds is None else format_duration(node.seconds),
        ", ".join(node.tasks) if node.tasks else _ranks(node),
        *(_steps(progress.get(node.node_id, ())) if progress else ()),
        node.reason.replace("\n", " "),
    )


def _steps(tasks: Sequence[TaskProgress]) -> tuple[str, str, str]:
    """The steps of a node: those of its slowest task, at its pace; and the time since the last step of any."""
    if not tasks:
        return "-", "-", "-"
    slowest = min(tasks, key=lambda task: task.steps)
    pace = f"{1 / slowest.period:.3g}" if slowest.period else "-"
    return str(slowest.steps), pace, f"{format_duration(min(task.idle for task in tasks))} ago"


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
