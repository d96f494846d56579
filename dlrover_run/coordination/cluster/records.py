"""What a job with parameter servers adds to the two records: what a node hosts, and the cluster that shall be.

A *task* is one process of TensorFlow: chief, worker, parameter server or evaluator. Its rank is its index in the
cluster, which a replacement takes over; its id is new with each process, so that `worker-2` may have rank 0. The
*version* is that of the set of parameter servers: no process outlives it, for what a server held would be taken for
the newest state.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.bounds import MAX_TRACE, MAX_WHAT, Count, Name, NodeId, Port, Total

MOST_TASKS = 4000
"""Processes of one job: what fits into one message with all their addresses."""

MOST_HOSTED = 400
"""Processes of one job on one node that are told of at a time, where that goes over a network."""


MAX_TABLE_NAME = 200
"""Characters of the name of a table that a chief reports."""

QueueKey = Annotated[str, Meta(max_length=64)]
"""A secret that the host of a chief draws. Whoever takes part in the job is told of it by the coordinator, so that to
know it is to take part, also where the job has no token because etcd decides who may."""


class Role(enum.StrEnum):
    """What a process does in the cluster, as `TF_CONFIG` names it."""

    CHIEF = "chief"
    WORKER = "worker"
    PS = "ps"
    EVALUATOR = "evaluator"


class TaskKey(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """One process, ever: no other one of the job has that id in that role."""

    role: Role
    id: Count

    def __str__(self) -> str:
        return f"{self.role.value}-{self.id}"


class TaskStage(enum.StrEnum):
    """How far a task has come, as its host says.

    HELD: a port is held for it, and nothing was started. STARTED: its process runs. READY: a server answers; a chief
    has a model that is whole; a worker or an evaluator has begun. ENDED: its process has ended, or has been given up
    and killed.
    """

    HELD = "held"
    STARTED = "started"
    READY = "ready"
    ENDED = "ended"


class EndCause(enum.StrEnum):
    """Why a task has ended, which decides what that costs.

    SUCCESS: exit code 0. MEMBERSHIP: it left because it was told to, or because the cluster has changed (exit code 75);
    that is free. MEMORY: it was killed for the memory that it or a child took. SILENT: its process lives and does not
    answer. FAILURE: all else. REPEATED: the same exception that ended its predecessor, within seconds.
    """

    SUCCESS = "success"
    MEMBERSHIP = "membership"
    MEMORY = "memory"
    SILENT = "silent"
    FAILURE = "failure"
    REPEATED = "repeated"


class TaskEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a task has ended: `what` in words without its name, and the traceback if it left one."""

    cause: EndCause
    what: Annotated[str, Meta(max_length=MAX_WHAT)]
    trace: Annotated[str, Meta(max_length=MAX_TRACE)] = ""


class ServerBounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many parameter servers the partitioned tables of the model allow: `least` to `most`, because `table` has
    `parts` parts.

    With `refused` the chief did not restore the model: the script makes that many parts of the table where the
    checkpoint holds `parts`. `least` and `most` are then the number of servers that would give the parts of the
    checkpoint, 0 if the chief cannot tell.
    """

    least: Count
    most: Count
    table: Annotated[str, Meta(max_length=MAX_TABLE_NAME)]
    parts: Count
    refused: Count = 0

    def allow(self, servers: int) -> bool:
        """Whether the tables can be read with that many parameter servers."""
        return self.least <= servers <= self.most


class TaskStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a node says of one task that it hosts.

    `port` is held for it, and is the same for each task of its role and rank that this node hosts one after the other.
    `step` is the last global step that it has told, `saved` that of its last checkpoint and `restored` the one that it
    began with: -1 while that is not known, and for a chief that came back into a live model the step of that. `reached`
    is the highest step of before that which its node has heard of from any of its tasks. `swollen` says that it is near
    its limit of memory. `server_bounds` is what a chief reports of its tables, None while it has reported nothing.
    `queue_port` is where the host of a chief answers other nodes about the queues of the data, 0 where it answers
    nobody else, and `queue_key` is what they have to know for that.
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
    swollen: bool = False
    server_bounds: ServerBounds | None = None
    end: TaskEnd | None = None


class Room(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many tasks of a role a node would host at most."""

    role: Role
    tasks: Count


class Targets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many parameter servers and workers (beside the chief) somebody wants; None for as many as there is room for,
    up to the most. In a wish None leaves that number as it was."""

    ps: Count | None = None
    workers: Count | None = None


class Spent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a role has cost: how many ids were given, and how many restarts were charged."""

    role: Role
    ids: Total = 0
    failures: Total = 0
    memory: Total = 0


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task as its host was given it. `port` is 0 until the others know it."""

    key: TaskKey
    rank: Count
    version: Total
    port: Port = 0
    memory: Total = 0


class Account(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What of the cluster each node is told only to repeat it, for a coordinator that has no journal.

    Of its version it says how many `servers` and how many `tasks` in all there are. `given` are the tasks of the node
    itself, which its board adds.
    """

    version: Total = 0
    servers: Count = 0
    tasks: Count = 0
    targets: Targets = Targets()
    spent: Annotated[tuple[Spent, ...], Meta(max_length=len(Role))] = ()
    done: Annotated[tuple[Count, ...], Meta(max_length=MOST_TASKS)] = ()
    evaluated: bool = False
    unevaluated: bool = False
    given: Annotated[tuple[Given, ...], Meta(max_length=MOST_HOSTED)] = ()


class Hosting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node says of its tasks; a part of its status. `wish` is what a person has asked for through this node,
    and `wish_number` grows with each wish, so that an old one is not taken for a new one. `account` is what the node
    was told of the cluster, as its board repeats it.

    A node with a wish, and without a room or a task, is a *visitor*: it only says what somebody wishes, hears whether
    the job knows of it, and goes.
    """

    rooms: Annotated[tuple[Room, ...], Meta(max_length=len(Role))] = ()
    tasks: Annotated[tuple[TaskStatus, ...], Meta(max_length=MOST_HOSTED)] = ()
    wish: Targets | None = None
    wish_number: Total = 0
    account: Account | None = None

    @property
    def visits(self) -> bool:
        """Whether this node is a visitor."""
        return self.wish is not None and not self.rooms and not self.tasks


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process that shall run: what the plan says of it. `address` and `port` are its host's word, empty and 0 until
    that is heard and it may start, and so are a chief's `queue_port` and `queue_key`. `memory` is its limit in MiB, 0
    for none. `since` is the job time at which it was given."""

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
    memory: Total = 0
    since: float = 0.0

    @property
    def role(self) -> Role:
        """What it does."""
        return self.key.role

    @property
    def target(self) -> str:
        """HOST:PORT, as in `TF_CONFIG`."""
        return self._at(self.port)

    @property
    def queue_target(self) -> str:
        """HOST:PORT where a chief's host answers about the queues; empty while it does not."""
        return self._at(self.queue_port) if self.queue_port else ""

    def _at(self, port: int) -> str:
        return f"[{self.address}]:{port}" if ":" in self.address else f"{self.address}:{port}"


class Stage(enum.StrEnum):
    """What the cluster is at.

    STARTING: its servers are being started, the chief with them. TRAINING: the chief has a whole model, and the workers
    are let in. CHANGING: the same, while the servers of the next version are started beside them. PAUSING: those are
    ready, and the workers leave. SAVING: the workers have left, and the chief saves and leaves. ENDING: the chief has
    succeeded, and the workers have their grace.
    """

    STARTING = "starting"
    TRAINING = "training"
    CHANGING = "changing"
    PAUSING = "pausing"
    SAVING = "saving"
    ENDING = "ending"


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory in MiB that a rank has now, after it was found to need more than it was given at first."""

    role: Role
    rank: Count
    memory: Total


class Uncalled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many processes of a rank in a row have left for a change of membership that nobody had ordered."""

    role: Role
    rank: Count
    times: Total


class HeardWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of the last wish of a node that the coordinator has decided on, whether it was refused, and the answer
    in words: why, or else what follows. An old one has no words any more."""

    node_id: str
    number: Total
    refused: bool = False
    answer: str = ""


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cluster that shall be; a part of the plan, which the coordinator alone writes.

    `version` counts from 1, and is the number of the plan's round. `tasks` are those of this version, `coming` the
    servers of the next one while it is prepared. `until` is the job time at which the stage is given up. `step` and
    `saved` are the newest that were told before this version opened, and from then on the step that it began with.
    `wishes` are the last wish of each node that was heard. `done` are the ranks of workers that have succeeded, and
    `evaluated` says that the evaluator has; `unevaluated` that it has failed too often and is not started again.
    `server_bounds` are the numbers of servers that the tables of the model allow, None for any; `proven_ps` is the
    number of servers of the last version in which the chief had a model, 0 before that. `outcome` is the end of a task
    that the job cannot go on after. `paused` says that all who trained had left before this version began, so that
    `step` is the last step there was.

    Milestones of this version, in job time, None before: `held_at`, when all addresses were known, so that its tasks
    may start; `served_at`, when all its servers answered; `opened_at`, when the chief had a whole model. From
    `coming_held_at` on the next servers may start. Since `short_since` there is no room for a chief and the least
    workers. `uncalled` counts what is free only so often.
    """

    version: Total = 0
    stage: Stage = Stage.STARTING
    since: float = 0.0
    until: float | None = None
    targets: Targets = Targets()
    tasks: tuple[Task, ...] = ()
    coming: tuple[Task, ...] = ()
    done: tuple[Count, ...] = ()
    spent: tuple[Spent, ...] = ()
    limits: tuple[Limit, ...] = ()
    step: int = -1
    saved: int = -1
    wishes: tuple[HeardWish, ...] = ()
    outcome: TaskEnd | None = None
    evaluated: bool = False
    unevaluated: bool = False
    held_at: float | None = None
    served_at: float | None = None
    opened_at: float | None = None
    coming_held_at: float | None = None
    short_since: float | None = None
    uncalled: tuple[Uncalled, ...] = ()
    server_bounds: ServerBounds | None = None
    proven_ps: Count = 0
    paused: bool = False


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a cluster asks of one node: to run exactly `tasks`, and to end all others of this job.

    `servers`, `chief` and `workers` are the addresses of all tasks of each role by rank, without the evaluator; a task
    is started only once it stands there, with all servers of its version, at the address where its port is held. Those
    of `coming` are `next_servers`, of version `version` + 1. An address is empty where a rank has no task, or none that
    holds a port yet; and none is known while `servers` is empty. The evaluator is started once `servers` are known.
    `open` lets workers in. `pause` tells workers to leave after the step that they are at, and `save` the chief to save
    and to leave; both with exit code 75. `ending` tells all but servers to come to an end by themselves. `heard_wish`
    is the number of the last wish of this node that the job has decided on, `wish_refused` whether it is refused, and
    `wish_answer` says why, or else what follows. `account` is for the node to repeat. `queue_at` is the address where
    the chief's host answers about the queues of the data, empty while none is known, and `queue_key` what it has to be
    shown.

    `keep` says that nothing of all this is known yet to a coordinator that has just begun, and that the node shall go
    on as it is: its board makes the last order of before of that, so that an agent sees none.
    """

    version: Total
    tasks: Annotated[tuple[Task, ...], Meta(max_length=MOST_HOSTED)] = ()
    servers: Annotated[tuple[Name, ...], Meta(max_length=MOST_TASKS)] = ()
    next_servers: Annotated[tuple[Name, ...], Meta(max_length=MOST_TASKS)] = ()
    chief: Name = ""
    workers: Annotated[tuple[Name, ...], Meta(max_length=MOST_TASKS)] = ()
    open: bool = False
    pause: bool = False
    save: bool = False
    ending: bool = False
    heard_wish: Total = 0
    wish_refused: bool = False
    wish_answer: Annotated[str, Meta(max_length=MAX_WHAT)] = ""
    account: Account | None = None
    queue_at: Name = ""
    queue_key: QueueKey = ""
    keep: bool = False
