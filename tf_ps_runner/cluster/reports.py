"""What a node reports of the tasks that it hosts, and what no node can report."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.bounds import Total
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.report import NodeReport, ReportPart
from dlrover_run.coordination.records.validation import last_round
from dlrover_run.features.autoscale.model import Time
from tf_ps_runner.cluster.choice import Percent
from tf_ps_runner.cluster.model import (
    MAX_NODE_TASKS,
    MAX_TASKS,
    NAME,
    TF_PROGRAM,
    Capacity,
    RecoveryHint,
    Role,
    TaskStatus,
)

MAX_ID = 900_000
"""More processes than any role of a job has had. Later ones still have a number that fits into a message."""

MAX_STEP = 2**53
"""More steps than any training has."""

MAX_CAPACITY = MAX_NODE_TASKS // 2
"""Slots for tasks on one node, those for servers counted twice: while a version changes, a node reports its tasks and
those of the next version."""

MAX_ADDRESS = 100
"""Characters of the address of a node with parameter servers: each node receives those of all tasks."""


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last global step in this version that the node of the chief knows of. `seconds` is the time from the first
    step of the version that the node has seen to that one, and `age` how long ago that was."""

    version: Total
    step: Total
    seconds: Time
    age: Time


class ServerLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the servers of this version on one node use, in percent: together of the processors that the node may use,
    since the report before; and one of them of its memory, the one that uses most."""

    version: Total
    processor: Percent
    memory: Percent


class NodeTasks(msgspec.Struct, ReportPart, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=NAME):
    """What a node reports of its tasks; a part of its status. `hint` is what the coordinator sent the node to report
    back. `pace` and `load` are reported to a job that chooses its own size."""

    capacity: Annotated[tuple[Capacity, ...], Meta(max_length=len(Role))] = ()
    tasks: Annotated[tuple[TaskStatus, ...], Meta(max_length=MAX_NODE_TASKS)] = ()
    hint: RecoveryHint | None = None
    pace: Pace | None = None
    load: ServerLoad | None = None

    program: ClassVar[str] = TF_PROGRAM

    def problem(self, report: NodeReport, plan: Plan) -> str | None:
        # The servers of two versions run beside each other for a while.
        slots = sum(one.slots * (2 if one.role is Role.PS else 1) for one in self.capacity)
        if slots > MAX_CAPACITY:
            most = f"a node has at most {MAX_CAPACITY} slots for tasks, those for servers counted twice"
            return f"{most}; this one has {slots}"
        if len({one.role for one in self.capacity}) < len(self.capacity):
            return "a report has the capacity for one role twice"
        if len({task.key for task in self.tasks}) < len(self.tasks):
            return "a report has one task twice"
        if any(task.key.id > MAX_ID for task in self.tasks):
            return "a report has a task that no job has"
        steps = [step for task in self.tasks for step in (task.step, task.saved, task.restored, task.reached)]
        steps += [] if self.pace is None else [self.pace.step]
        if not all(-1 <= step <= MAX_STEP for step in steps):
            return "a report has a step that no training has"
        if len(report.address) > MAX_ADDRESS:
            return f"the address of a node has at most {MAX_ADDRESS} characters here: give --local-addr a shorter one"
        hint = self.hint
        if hint is None:
            return None
        versions = [hint.version, *(given.version for given in hint.assigned)]
        ids = [number for state in hint.roles for number in (state.ids, state.failures, state.memory_restarts)]
        ids += [given.key.id for given in hint.assigned]
        ranks = [
            *(rank for state in hint.roles for rank in state.succeeded),
            hint.servers,
            hint.tasks,
            *(given.rank for given in hint.assigned),
        ]
        if max(versions) > last_round(plan) or max(ids, default=0) > MAX_ID or max(ranks) > MAX_TASKS:
            return "a report repeats a cluster that no job has"
        return None
