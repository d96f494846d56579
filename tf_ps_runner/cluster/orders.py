"""What the cluster asks of one node, and what the node remembers of it for a coordinator without a journal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.assignment import AssignmentPart, PartMemory
from dlrover_run.coordination.records.bounds import Name, Total
from dlrover_run.coordination.records.report import ReportPart
from dlrover_run.features.autoscale.model import Time
from tf_ps_runner.cluster.model import (
    MAX_NODE_TASKS,
    MAX_TASKS,
    NAME,
    AssignedTask,
    PlannedTask,
    QueueKey,
    RecoveryHint,
    TaskStatus,
)
from tf_ps_runner.cluster.reports import NodeTasks

MAX_ENDS_BYTES = 48 * 1024
"""Bytes of the ends in one status that are sent in full. When a server dies each process of the node may leave a
traceback, and a few of them explain as much as all."""

SHORT_END = 100
"""Characters that are sent of the other ends."""


class NodeOrder(msgspec.Struct, AssignmentPart, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=NAME):
    """What a cluster asks of one node: to run exactly `tasks`, and to end all other tasks of this job.

    `servers`, `chief` and `workers` are the addresses of all tasks of these roles by rank. A task of these roles starts
    only once it is listed there, with all servers of its version, at the address where its port is reserved.
    Those of the next version, `version` + 1, are `next_servers`. An address is empty where a rank has no task, or none
    with a reserved port yet; none is known while `servers` is empty. A task of another role starts once they are known.
    `open` lets workers in. `pause` has workers leave after the step that they are in, and `save` has the chief save and
    leave; both with exit code 75. `ending` has all tasks but servers end by themselves. `hint` is for the node to
    report back. `queue_endpoint` is where the chief's node serves the data queues, empty while unknown, and `queue_key`
    what a client has to present there. Every `report_interval` seconds a node reports its steps and the load of its
    servers, 0 for never.

    `keep` comes from a coordinator that has just begun and knows none of this yet: the node continues as it is. The
    node's client replaces such an order by the last one before it, so that an agent never sees one.
    """

    version: Total
    tasks: Annotated[tuple[PlannedTask, ...], Meta(max_length=MAX_NODE_TASKS)] = ()
    servers: Annotated[tuple[Name, ...], Meta(max_length=MAX_TASKS)] = ()
    next_servers: Annotated[tuple[Name, ...], Meta(max_length=MAX_TASKS)] = ()
    chief: Name = ""
    workers: Annotated[tuple[Name, ...], Meta(max_length=MAX_TASKS)] = ()
    open: bool = False
    pause: bool = False
    save: bool = False
    ending: bool = False
    hint: RecoveryHint | None = None
    queue_endpoint: Name = ""
    queue_key: QueueKey = ""
    report_interval: Time = 0.0
    keep: bool = False

    @property
    def has_tasks(self) -> bool:
        return bool(self.tasks)

    @property
    def task_names(self) -> tuple[str, ...]:
        return tuple(f"{task.role.value} {task.rank}" for task in self.tasks)

    @property
    def job_processes(self) -> int:
        return len(self.servers) + len(self.workers)

    def split(self) -> tuple[NodeOrder | None, NodeOrder]:
        """The part that all nodes with an order receive alike, which may be long, and this node's own part."""
        empty = NodeOrder(version=self.version)
        return None if self.hint is None else empty.join(self), self.join(empty)

    def join(self, common: AssignmentPart) -> NodeOrder:
        """The order whose own part is this and whose common part is `common`."""
        return msgspec.structs.replace(common, tasks=self.tasks) if isinstance(common, NodeOrder) else self

    def remember(self, memory: PartMemory | None) -> OrderMemory:
        """The memory after this order, which is none to continue. An order without a hint does not erase the one
        before: the job may continue, and count its restarts from there."""
        hint = self.hint or (memory.hint if isinstance(memory, OrderMemory) else None)
        assigned = tuple(AssignedTask(one.key, one.rank, one.version, one.port, one.memory_mib) for one in self.tasks)
        return OrderMemory(hint and msgspec.structs.replace(hint, assigned=assigned))


@dataclass(frozen=True)
class OrderMemory(PartMemory):
    hint: RecoveryHint | None = None

    def forget(self) -> OrderMemory:
        return OrderMemory(self.hint and msgspec.structs.replace(self.hint, assigned=()))

    def add_to(self, part: ReportPart) -> ReportPart:
        if not isinstance(part, NodeTasks):
            return part
        return msgspec.structs.replace(part, hint=self.hint, tasks=_with_short_ends(part.tasks))


def _with_short_ends(tasks: tuple[TaskStatus, ...]) -> tuple[TaskStatus, ...]:
    """The same tasks, with short texts for the ends that do not fit into one message; the shortest are sent in full."""
    sizes = {task.key: len(msgspec.json.encode(task.end)) for task in tasks if task.end is not None}
    left, too_long = MAX_ENDS_BYTES, set()
    for key in sorted(sizes, key=lambda key: (sizes[key], key)):
        left -= sizes[key]
        if left < 0:
            too_long.add(key)

    def shortened(task: TaskStatus) -> TaskStatus:
        if task.end is None or task.key not in too_long:
            return task
        short = msgspec.structs.replace(task.end, exit_text=task.end.exit_text[:SHORT_END], trace="")
        return msgspec.structs.replace(task, end=short)

    return tuple(map(shortened, tasks)) if too_long else tasks
