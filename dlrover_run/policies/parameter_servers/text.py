"""How the decisions on a cluster are told to people: one plain sentence each, with numbers."""

from __future__ import annotations

from collections.abc import Sequence

from dlrover_run.coordination.words import counted, names
from dlrover_run.policies.parameter_servers.model import Cluster, Role, ServerBounds, Task
from dlrover_run.policies.parameter_servers.view import Loss

ENDS_NAMED = 3
"""How many ends are told one by one: those of a thousand tasks would fill the screen."""


def named(task: Task) -> str:
    """`ps-1 (rank 1) on host-b`; of the chief and the evaluator there is but one, and a rank says nothing."""
    rank = f" (rank {task.rank})" if task.role in (Role.WORKER, Role.PS) else ""
    return f"{task.key}{rank} on {task.host}"


def ended(losses: Sequence[Loss]) -> str:
    """What became of those tasks."""
    told = [f"{named(loss.task)} {loss.end.what}" for loss in losses[:ENDS_NAMED]]
    more = len(losses) - ENDS_NAMED
    return "; ".join([*told, f"and {more} more"] if more > 0 else told)


def replaced(losses: Sequence[Loss], tasks: Sequence[Task]) -> str:
    """Who takes the places of those that were lost."""
    ranks = {loss.task.rank for loss in losses}
    successors = [task for task in tasks if task.rank in ranks]
    if not successors:
        return ""
    moved = {task.host for task in successors} - {loss.task.host for loss in losses}
    where = f" on {names(sorted(moved))}" if moved else ""
    who = names([str(task.key) for task in successors])
    verb, place = ("takes", "its place") if len(successors) == 1 else ("take", "their places")
    before = {loss.task.rank: loss.task.memory for loss in losses}
    more = [task for task in successors if task.memory != before[task.rank]]
    gets = [
        f"{'and' if len(successors) == 1 else task.key} gets {size(task.memory)} instead of {size(before[task.rank])}"
        for task in more[:ENDS_NAMED]
    ]
    if not gets:
        return f"{who}{where} {verb} {place}"
    unnamed = f", and {len(more) - ENDS_NAMED} others get more too" if len(more) > ENDS_NAMED else ""
    return f"{who}{where} {verb} {place}{' ' if len(successors) == 1 else ', '}{', '.join(gets)}{unnamed}"


def size(memory: int) -> str:
    """A limit of memory in MiB, as one would write it on a command line."""
    return f"{memory // 1024}Gi" if memory and memory % 1024 == 0 else f"{memory}Mi"


def news(before: str, reason: str) -> str:
    """What a reason says that was not said before: one that is only continued need not be told twice."""
    return reason[len(before) + 2 :] if before and reason.startswith(f"{before}; ") else reason


def servers(number: int) -> str:
    """That many parameter servers."""
    return counted(number, "parameter server")


def bounded(cluster: Cluster) -> str:
    """How many parameter servers the tables of the model allow, and why."""
    bounds = cluster.server_bounds
    if bounds is None:
        return ""
    exact = bounds.least == bounds.most
    number = f"stays {bounds.least}" if exact else f"must be at least {bounds.least}"
    return (
        f"the number of parameter servers {number}: the table {bounds.table!r} has {counted(bounds.parts, 'part')} and "
        'is looked up with partition_strategy="mod", so with another number of parts each id would get the row of '
        "another id"
    )


def not_restored(task: Task, bounds: ServerBounds, present: int) -> str:
    """Why the chief of a version with `present` servers did not restore the model."""
    before = f"{task.key} on {task.host} did not restore the checkpoint: "
    if not bounds.parts:
        return f"{before}how many parts it holds of the table {bounds.table!r} cannot be read"
    held = f"it holds {counted(bounds.parts, 'part')} of the table {bounds.table!r}"
    return f"{before}{held}, and the script makes {bounds.refused} with {servers(present)}"


def began(restored: int, before: int, paused: bool) -> str:
    """From which step a version goes on, and how many are lost of those `before`. Unless all had `paused` there may
    have been more of them, which nobody has told of."""
    if restored < 0:
        return ""
    where = f"; {f'restored from step {restored}' if restored else 'begun anew'}"
    lost = max(0, before - restored)
    if before < 0:
        return where if restored else ""
    if before == restored == 0:
        return where
    if not lost:
        return f"{where}, no step lost" if paused else f"{where}, the last that was told of"
    return f"{where}, {'' if paused else 'at least '}{counted(lost, 'step')} lost"
