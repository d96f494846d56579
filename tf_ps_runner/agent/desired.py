"""What `reconcile` gets of a node with TensorFlow tasks: those that its order names, and the states of those here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dlrover_run.agent.reconcile import DesiredTask, Readiness, StopMode, TaskState
from tf_ps_runner.cluster.model import PlannedTask, TaskKey
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.cluster.rules import ROLES, Loss
from tf_ps_runner.tf_config import servers_of, tf_config


@dataclass(frozen=True)
class LocalTask:
    """All of one task here that the next action depends on.

    `version`, `rank` and `servers` are those that it was started with, or that its port was reserved for. `live`,
    `ended` and `stopping` are as in `TaskState`. `waited` means that the wait for the addresses of its peers is over.
    """

    key: TaskKey
    rank: int
    version: int
    servers: tuple[str, ...] = ()
    live: bool = False
    ended: bool = False
    stopping: StopMode | None = None
    waited: bool = False


def desired_tasks(order: NodeOrder, here: Iterable[LocalTask], sparse: bool) -> tuple[DesiredTask[TaskKey], ...]:
    """The tasks that the order names. With `sparse` they need fewer addresses (see `tf_config`)."""
    waited = {one.key for one in here if one.waited}
    return tuple(
        DesiredTask(
            key=task.key,
            place=(task.role, task.rank),
            generation=(task.version, task.rank, _known_servers(order, task)),
            readiness=_readiness(order, task, sparse, task.key in waited),
            reserves=True,
        )
        for task in order.tasks
    )


def task_states(order: NodeOrder, here: Iterable[LocalTask]) -> tuple[TaskState[TaskKey], ...]:
    wanted = {task.key: task for task in order.tasks}
    return tuple(_state(order, one, wanted.get(one.key)) for one in here)


def _state(order: NodeOrder, one: LocalTask, task: PlannedTask | None) -> TaskState[TaskKey]:
    # A coordinator that knew nothing of the first task may have used its name again, for another rank or version; or
    # the servers have changed, and the process still has the old ones. Servers that are not all known are no evidence.
    servers = _known_servers(order, task) if task is not None else ()
    role = ROLES[one.key.role]
    same_cluster = one.version == order.version and one.servers == order.servers
    drains = role.outlives_versions or (role.loss is Loss.RESTART and same_cluster)
    return TaskState(
        key=one.key,
        place=(one.key.role, one.rank),
        generation=(one.version, one.rank, one.servers if one.live and servers else servers),
        live=one.live,
        ended=one.ended,
        stopping=one.stopping,
        stop_mode=StopMode.DRAIN if drains else StopMode.KILL,
        serves=not role.ends_with_training,
        served=role.uses_servers,
    )


def _known_servers(order: NodeOrder, task: PlannedTask) -> tuple[str, ...]:
    """The servers that a task needs; empty if they are not all known, or if it is not bound to them."""
    servers = () if ROLES[task.role].outlives_versions else servers_of(order, task)
    return servers if all(servers) else ()


def _readiness(order: NodeOrder, task: PlannedTask, sparse: bool, waited: bool) -> Readiness:
    if tf_config(order, task, sparse, gaps=waited) is not None:
        return Readiness.READY
    if not waited and tf_config(order, task, sparse, gaps=True) is not None:
        return Readiness.LACKS_PEERS
    return Readiness.NOT_READY
