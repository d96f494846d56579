"""Records of a job with parameter servers: what a node reports of its tasks, and the cluster that the plan describes.

A *task* is one TensorFlow process: chief, worker, parameter server or evaluator. Its rank is its index in the cluster,
and a replacement takes the rank over; its id is new for each process, so `worker-2` may have rank 0. The *version* is
that of the set of parameter servers. No process outlives its version: variables of a server that survived would pass
for the newest state.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.bounds import (
    MAX_TRACE,
    MAX_WHAT,
    Count,
    ExitStatus,
    Name,
    NodeId,
    Port,
    Total,
)
from dlrover_run.coordination.records.plan import PlanPart
from dlrover_run.coordination.records.requests import RequestPart
from dlrover_run.coordination.records.size_choice import SizeChoice
from dlrover_run.words.text import counted, join_words
from tf_ps_runner.cluster.choice import ReplicaChoice, size_choice

MAX_TASKS = 4000
"""Tasks of one job. With the addresses of all of them an order still fits into one message."""

MAX_NODE_TASKS = 400
"""Tasks of one job that one node reports at a time over a network."""

NAME = "parameter_servers"
"""The name of this feature."""

TF_PROGRAM = "tf-ps-run"
"""The program that starts jobs with parameter servers."""

MAX_TABLE_NAME = 200
"""Characters of the name of a table that a chief reports."""

QueueKey = Annotated[str, Meta(max_length=64)]
"""A secret drawn by the host of a chief. The coordinator sends it to the members of the job only, so knowing it proves
membership, also where the job has no token because etcd decides who may take part."""


class Role(enum.StrEnum):
    """What a process does in the cluster, as `TF_CONFIG` names it."""

    CHIEF = "chief"
    WORKER = "worker"
    PS = "ps"
    EVALUATOR = "evaluator"


class TaskKey(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """One process of the job. An id is never given twice in a role."""

    role: Role
    id: Count

    def __str__(self) -> str:
        return f"{self.role.value}-{self.id}"


class TaskStage(enum.StrEnum):
    """How far a task has come, as its node reports it.

    HELD: a port is reserved for it, and nothing was started. STARTED: its process runs. READY: a server answers; a
    chief has a complete model; a worker or an evaluator has begun. ENDED: its process has ended, or was given up and
    killed.
    """

    HELD = "held"
    STARTED = "started"
    READY = "ready"
    ENDED = "ended"


class EndCause(enum.StrEnum):
    """Why a task has ended, which decides what the end costs.

    SUCCESS: exit code 0. RESHAPED: it left because it was ordered to, or because the cluster has changed (exit code
    75); this is free. MEMORY: it was killed because it or a child exceeded its memory limit, or because the machine had
    run out of memory. SILENT: its process lives and does not answer. FAILURE: everything else. REPEATED: the exception
    that ended its predecessor, within seconds.
    """

    SUCCESS = "success"
    RESHAPED = "reshaped"
    MEMORY = "memory"
    SILENT = "silent"
    FAILURE = "failure"
    REPEATED = "repeated"


class TaskEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a task has ended: `exit_text` is a predicate that follows the task's name, `trace` its traceback if it left
    one, and `exit_status` its code as a shell reports it, 0 if it is not known."""

    cause: EndCause
    exit_text: Annotated[str, Meta(max_length=MAX_WHAT)]
    trace: Annotated[str, Meta(max_length=MAX_TRACE)] = ""
    exit_status: ExitStatus = 0


class ServerBounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many parameter servers the partitioned tables of the model allow: `least` to `most`, because `table` has
    `parts` parts.

    With `refused` the chief did not restore the model: the script makes that many parts of the table where the
    checkpoint holds `parts`. `least` and `most` are then the number of servers that would give the parts of the
    checkpoint, 0 if the chief cannot compute it.
    """

    least: Count
    most: Count
    table: Annotated[str, Meta(max_length=MAX_TABLE_NAME)]
    parts: Count
    refused: Count = 0

    def allow(self, servers: int) -> bool:
        """Whether the tables can be read with that many parameter servers. Asked about an operator's number of servers
        (`cluster/scaling`), and about the next servers when a version begins (`cluster/versions`)."""
        return self.least <= servers <= self.most


class TaskStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a node reports of one task that it hosts.

    `port` is reserved for the task, and stays the same for each task of its role and rank that this node hosts later.
    `step` is the last global step that it reported, `saved` the step of its last checkpoint and `restored` the step at
    which it began: -1 while unknown, and for a chief that came back to a live model the step of that model. `reached`
    is the highest step of the earlier versions that any task of its node has reported. `near_memory_limit` is set when
    it nearly uses up its memory limit. `server_bounds` is what a chief reports of its tables, None if it has reported
    nothing. At `queue_port` the host of a chief serves the data queues to other nodes, 0 where it serves none, and a
    client has to present `queue_key`.
    """

    key: TaskKey
    stage: TaskStage
    port: Port = 0
    queue_port: Port = 0
    queue_key: QueueKey = ""
    step: int = -1
    saved: int = -1
    restored: int = -1
    reached: int = -1
    near_memory_limit: bool = False
    server_bounds: ServerBounds | None = None
    end: TaskEnd | None = None


class Capacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most tasks of a role that a node hosts."""

    role: Role
    slots: Count


class DesiredReplicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many parameter servers and workers (beside the chief) the user wants. None stands for as many as fit, up to
    the maximum."""

    ps: Count | None = None
    workers: Count | None = None

    def of(self, role: Role) -> int | None:
        """The number for a role; None for a role that cannot be scaled too."""
        return {Role.PS: self.ps, Role.WORKER: self.workers}.get(role)


class ScaleRequest(msgspec.Struct, RequestPart, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag=NAME):
    """A request for other numbers of parameter servers and workers. None leaves a number as it is. The numbers of the
    roles in `auto` are those with which the job was started."""

    ps: Count | None = None
    workers: Count | None = None
    auto: Annotated[tuple[Role, ...], Meta(max_length=len(Role))] = ()

    program: ClassVar[str] = TF_PROGRAM

    def of(self, role: Role) -> int | None:
        """The number for a role; None for a role that cannot be scaled too."""
        return {Role.PS: self.ps, Role.WORKER: self.workers}.get(role)

    @property
    def text(self) -> str:
        numbers = ((self.ps, "parameter server"), (self.workers, "worker"))
        given = [counted(number, noun) for number, noun in numbers if number is not None]
        nouns = {Role.PS: "parameter servers", Role.WORKER: "workers"}
        return join_words([*given, *(f"any number of {nouns[role]}" for role in self.auto if role in nouns)])


class RoleState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What has happened in a role so far: how many ids were given out, and how many restarts were used after failures
    and for more memory. `succeeded` are the ranks that have succeeded and are not needed again; with `given_up` the
    restarts are used up, and the job starts no more tasks of the role."""

    role: Role
    ids: Total = 0
    failures: Total = 0
    memory_restarts: Total = 0
    succeeded: Annotated[tuple[Count, ...], Meta(max_length=MAX_TASKS)] = ()
    given_up: bool = False


class AssignedTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task as it was assigned to its node. `port` is 0 until the other nodes know it."""

    key: TaskKey
    rank: Count
    version: Total
    port: Port = 0
    memory_mib: Total = 0


class RecoveryHint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The part of the cluster that each node receives only to report it back, for a coordinator without a journal.

    `servers` and `tasks` count the tasks of the version. `assigned` are the tasks of the node itself; the node's client
    adds them.
    """

    version: Total = 0
    servers: Count = 0
    tasks: Count = 0
    desired: DesiredReplicas = DesiredReplicas()
    choice: ReplicaChoice | None = None
    roles: Annotated[tuple[RoleState, ...], Meta(max_length=len(Role))] = ()
    assigned: Annotated[tuple[AssignedTask, ...], Meta(max_length=MAX_NODE_TASKS)] = ()


class PlannedTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process that the plan wants to run. `address` and `port` come from its node and are empty and 0 until it has
    reported them, which is when the task may start; so are a chief's `queue_port` and `queue_key`. `memory_mib` is its
    limit, 0 for none. `since` is the job time at which it was assigned."""

    key: TaskKey
    rank: Count
    version: Total
    node_id: NodeId
    incarnation: NodeId
    host: Name
    address: Name = ""
    port: Port = 0
    queue_port: Port = 0
    queue_key: QueueKey = ""
    memory_mib: Total = 0
    since: float = 0.0

    @property
    def role(self) -> Role:
        return self.key.role

    @property
    def endpoint(self) -> str:
        return self._at(self.port)

    @property
    def queue_endpoint(self) -> str:
        """HOST:PORT where a chief's node serves the data queues; empty while it does not."""
        return self._at(self.queue_port) if self.queue_port else ""

    def _at(self, port: int) -> str:
        return f"[{self.address}]:{port}" if ":" in self.address else f"{self.address}:{port}"


class Stage(enum.StrEnum):
    """What the cluster is doing.

    STARTING: its servers start, and the chief with them. TRAINING: the chief has a complete model, and workers are let
    in. CHANGING: the same, while the servers of the next version start beside the current ones. PAUSING: the next
    servers are ready, and the workers leave. SAVING: the workers have left, and the chief saves and leaves. ENDING: the
    chief has succeeded, and the workers have their grace.
    """

    STARTING = "starting"
    TRAINING = "training"
    CHANGING = "changing"
    PAUSING = "pausing"
    SAVING = "saving"
    ENDING = "ending"


class MemoryLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory in MiB that a rank has now, after it needed more than it had at first."""

    role: Role
    rank: Count
    memory_mib: Total


class UnexpectedExits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many processes of a rank in a row have left for a change of the cluster that was never ordered."""

    role: Role
    rank: Count
    times: Total


class Cluster(msgspec.Struct, PlanPart, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=NAME):
    """The desired state of the cluster; a part of the plan, which only the coordinator writes.

    `version` counts from 1, and is the number of the plan's round. `choice` is what a job that chooses its own numbers
    of workers and servers wants, None in any other; what is `desired` takes precedence. `tasks` are those of this
    version, `next_servers` the servers of the next one while it is prepared. `until` is the job time at which the stage
    is given up. `step` and `saved` are the newest reported before this version opened, and from then on the step at
    which it began. `server_bounds` are the numbers of servers that the tables of the model allow, None for any;
    `proven_servers` is the number of servers of the last version in which the chief had a model, 0 before that.
    `outcome` is the end of a task after which the job cannot continue. `paused` is set when all tasks that trained had
    left before this version began, so that `step` is exactly the last step.

    Milestones of this version, in job time, None before: `ports_held_at`, when all addresses were known, so that its
    tasks may start; `servers_ready_at`, when all its servers answered; `opened_at`, when the chief had a complete
    model. From `next_ports_held_at` on the next servers may start. Since `insufficient_since` there is no slot for a
    chief and the minimum of workers. `unexpected_exits` counts exits that are free only a few times in a row.
    """

    version: Total = 0
    stage: Stage = Stage.STARTING
    since: float = 0.0
    until: float | None = None
    desired: DesiredReplicas = DesiredReplicas()
    choice: ReplicaChoice | None = None
    tasks: tuple[PlannedTask, ...] = ()
    next_servers: tuple[PlannedTask, ...] = ()
    roles: tuple[RoleState, ...] = ()
    memory_limits: tuple[MemoryLimit, ...] = ()
    step: int = -1
    saved: int = -1
    outcome: TaskEnd | None = None
    ports_held_at: float | None = None
    servers_ready_at: float | None = None
    opened_at: float | None = None
    next_ports_held_at: float | None = None
    insufficient_since: float | None = None
    unexpected_exits: tuple[UnexpectedExits, ...] = ()
    server_bounds: ServerBounds | None = None
    proven_servers: Count = 0
    paused: bool = False

    @property
    def size_choice(self) -> SizeChoice | None:
        fixed = {role.value: number for role in Role if (number := self.desired.of(role)) is not None}
        return None if self.choice is None else size_choice(self.choice, fixed)

    def wanted(self, role: Role, least: int) -> int | None:
        """How many tasks of a role are wanted, None for as many as fit. A job that chooses begins with the `least`
        servers."""
        number, choice = self.desired.of(role), self.choice
        if number is not None or choice is None:
            return number
        if role is Role.PS:
            return choice.servers.target or least
        return choice.wanted_workers if role is Role.WORKER else None

    def role_state(self, role: Role) -> RoleState:
        return next((state for state in self.roles if state.role is role), RoleState(role))

    def with_role(self, state: RoleState, **changes: Any) -> Cluster:
        """The cluster with that state of a role, and these changes of it. Called when the restarts, the ids or the
        ended tasks of a role change (`cluster/budgets`, `cluster/placement`, `cluster/failures`), and when a server
        near its memory limit is counted (`cluster/reshape`)."""
        state = msgspec.structs.replace(state, **changes)
        others = [other for other in self.roles if other.role is not state.role]
        return msgspec.structs.replace(self, roles=tuple(sorted([*others, state], key=lambda one: one.role)))
