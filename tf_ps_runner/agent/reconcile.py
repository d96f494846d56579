"""The actions that bring a node's tasks to what its order asks for: a pure function of the order, the tasks here, and
whether the node leaves.

The loop carries the actions out and asks again. So only the latest order counts, and no sequence of events can be
missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dlrover_run.policies.parameter_servers.model import NodeOrder, Role, Task, TaskKey
from tf_ps_runner.tf_config import servers_of, tf_config


@dataclass(frozen=True)
class TaskState:
    """All that the next action for one task depends on.

    `version`, `rank` and `servers` are those that it was started with, or that its port was reserved for. `live` means
    that its process runs, `ended` that it has run; neither is true while only a port is reserved. `dying` means that
    SIGKILL was sent, `ending` that another signal was, and `leaving` that the task was asked to leave in its own time.
    `waited` means that the wait for the addresses of its peers is over.
    """

    key: TaskKey
    rank: int
    version: int
    servers: tuple[str, ...] = ()
    live: bool = False
    ended: bool = False
    dying: bool = False
    ending: bool = False
    leaving: bool = False
    waited: bool = False


@dataclass(frozen=True)
class ReservePort:
    """Reserve a port for a task that is to run here."""

    task: Task


@dataclass(frozen=True)
class Start:
    """Start a task whose port is reserved, with this `TF_CONFIG`."""

    task: Task
    config: str


@dataclass(frozen=True)
class Drain:
    """Ask a worker or an evaluator to leave in its own time: the other tasks continue without it."""

    key: TaskKey


@dataclass(frozen=True)
class Terminate:
    """End a task by a signal, and kill it after a grace period."""

    key: TaskKey


@dataclass(frozen=True)
class Kill:
    """Kill a task at once: nothing that it could still do is of use, and some of it would do harm."""

    key: TaskKey


@dataclass(frozen=True)
class Release:
    """Remove a task that has ended or never started, and release its port."""

    key: TaskKey


@dataclass(frozen=True)
class WaitForPeers:
    """Wait for addresses of workers that are not known yet, for a limited time; then start the task without them."""

    key: TaskKey


Action = ReservePort | Start | Drain | Terminate | Kill | Release | WaitForPeers


@dataclass(frozen=True)
class ReconcileInput:
    """All that the actions depend on.

    `order` is None while this node has no tasks; while a new coordinator recovers, it is the previous one. `over` means
    that the job has ended for this node, `departing` that a signal or the loss of the launcher asks the node to leave.
    """

    order: NodeOrder | None
    known: tuple[TaskState, ...]
    over: bool = False
    departing: bool = False
    sparse: bool = False


def reconcile(situation: ReconcileInput) -> tuple[Action, ...]:
    """The actions that bring this node closer to its order; none if it only has to wait. Idempotent."""
    if situation.over or situation.departing:
        # The order does not count any more; a task that it does not name may end in peace as well.
        return tuple(Terminate(one.key) for one in _first_to_end(situation.known) if not (one.dying or one.ending))
    order = situation.order or NodeOrder(version=0)
    wanted = {task.key: task for task in order.tasks}
    actions: list[Action] = []
    for one in situation.known:
        task = wanted.get(one.key)
        if task is None or _is_another(one, task, order):
            actions += _stop(one, order)
    kept = {one.key: one for one in situation.known}
    occupied = {(one.key.role, one.rank) for one in situation.known if one.live and one.key not in wanted}
    for task in order.tasks:
        one_known = kept.get(task.key)
        if one_known is None:
            # Its port is that of its predecessor, which has not released it yet.
            if (task.role, task.rank) not in occupied:
                actions.append(ReservePort(task))
        elif not (one_known.live or one_known.ended) and not _is_another(one_known, task, order):
            actions += _start(one_known, task, order, situation.sparse)
    return tuple(actions)


def _first_to_end(known: Iterable[TaskState]) -> list[TaskState]:
    """The running tasks that end first: servers only once no chief or worker runs here. A session that is closed waits
    for servers that are gone, and what is saved at the end is read from them."""
    live = [one for one in known if one.live]
    train = any(one.key.role in (Role.CHIEF, Role.WORKER) for one in live)
    return [one for one in live if not (train and one.key.role is Role.PS)]


def _is_another(one: TaskState, task: Task, order: NodeOrder) -> bool:
    """Whether the task here is not the one that the order names. A coordinator that knew nothing of the first task may
    have used its name again, or the servers have changed and the process still holds the old ones."""
    if (one.rank, one.version) != (task.rank, task.version):
        return True
    servers = servers_of(order, task) if task.role is not Role.EVALUATOR else ()
    return bool(one.live and servers and all(servers) and one.servers != servers)


def _stop(one: TaskState, order: NodeOrder) -> Iterable[Action]:
    if not one.live:
        return [Release(one.key)]
    if one.dying:
        return []
    same = one.version == order.version and one.servers == order.servers
    if one.key.role is Role.EVALUATOR or (one.key.role is Role.WORKER and same):
        return [] if one.leaving or one.ending else [Drain(one.key)]
    return [Kill(one.key)]


def _start(one: TaskState, task: Task, order: NodeOrder, sparse: bool) -> Iterable[Action]:
    config = tf_config(order, task, sparse, gaps=one.waited)
    if config is not None:
        return [Start(task, config)]
    if not one.waited and tf_config(order, task, sparse, gaps=True) is not None:
        return [WaitForPeers(one.key)]
    return []
