"""What a node does next with its tasks: a pure function of its order, of what it holds and runs, and of whether it has
to go.

The loop around it carries the steps out and asks again, so that only the latest order counts, and no order of events
can be forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dlrover_run.policies.parameter_servers.model import NodeOrder, Role, Task, TaskKey
from tf_ps_runner.tf_config import servers_of, tf_config


@dataclass(frozen=True)
class TaskState:
    """What this node knows of a task: all that the next step depends on.

    `version`, `rank` and `servers` are what it was started with, or held for. `live` says that its process runs, and
    `ended` that it has run: neither is true while only a port is held. `dying` says that SIGKILL is on its way,
    `ending` that another signal is, and `leaving` that it was told to leave in its own time. `waited` says that the
    addresses of workers were waited for long enough.
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
    """Hold a port for a task that shall run here."""

    task: Task


@dataclass(frozen=True)
class Start:
    """Start a task whose port is held, with this `TF_CONFIG`."""

    task: Task
    config: str


@dataclass(frozen=True)
class Drain:
    """Tell a worker or an evaluator to leave, in its own time: others go on with what it was a part of."""

    key: TaskKey


@dataclass(frozen=True)
class Terminate:
    """End a task by a signal, and kill it after a grace."""

    key: TaskKey


@dataclass(frozen=True)
class Kill:
    """Kill a task at once: nothing that it could still do is of any use, and some of it would do harm."""

    key: TaskKey


@dataclass(frozen=True)
class Release:
    """Let go of a task that has ended, or that was never started, and of its port."""

    key: TaskKey


@dataclass(frozen=True)
class WaitForPeers:
    """The addresses of some workers are not known yet: wait for them for a while, then start the task without."""

    key: TaskKey


Step = ReservePort | Start | Drain | Terminate | Kill | Release | WaitForPeers


@dataclass(frozen=True)
class ReconcileInput:
    """All that the next steps depend on.

    `order` is None while this node hosts nothing; while a new coordinator is finding out, it is what it was. `over`
    says that the job has ended for this node, and `departing` that a signal or the loss of the launcher tells it to go.
    """

    order: NodeOrder | None
    known: tuple[TaskState, ...]
    over: bool = False
    departing: bool = False
    sparse: bool = False


def reconcile(situation: ReconcileInput) -> tuple[Step, ...]:
    """The steps that bring this node nearer to its order; none when there is nothing to do but to wait."""
    if situation.over or situation.departing:
        # An order that holds no more names what may be ended in peace.
        return tuple(Terminate(one.key) for one in _first_to_end(situation.known) if not (one.dying or one.ending))
    order = situation.order or NodeOrder(version=0)
    wanted = {task.key: task for task in order.tasks}
    steps: list[Step] = []
    for one in situation.known:
        task = wanted.get(one.key)
        if task is None or _is_another(one, task, order):
            steps += _let_go(one, order)
    kept = {one.key: one for one in situation.known}
    occupied = {(one.key.role, one.rank) for one in situation.known if one.live and one.key not in wanted}
    for task in order.tasks:
        one_known = kept.get(task.key)
        if one_known is None:
            # Its port shall be that of its predecessor, which is still about to let go of it.
            if (task.role, task.rank) not in occupied:
                steps.append(ReservePort(task))
        elif not (one_known.live or one_known.ended) and not _is_another(one_known, task, order):
            steps += _begin(one_known, task, order, situation.sparse)
    return tuple(steps)


def _first_to_end(known: Iterable[TaskState]) -> list[TaskState]:
    """Those that run, without the servers as long as somebody here trains: a session that is closed waits for servers
    which have gone, and what is saved at the end is theirs."""
    live = [one for one in known if one.live]
    train = any(one.key.role in (Role.CHIEF, Role.WORKER) for one in live)
    return [one for one in live if not (train and one.key.role is Role.PS)]


def _is_another(one: TaskState, task: Task, order: NodeOrder) -> bool:
    """Whether that is not the task which this node knows by that name: another coordinator, which knew nothing of the
    first, may have given the name again; or its servers are others by now, and it holds on to what is gone."""
    if (one.rank, one.version) != (task.rank, task.version):
        return True
    servers = servers_of(order, task) if task.role is not Role.EVALUATOR else ()
    return bool(one.live and servers and all(servers) and one.servers != servers)


def _let_go(one: TaskState, order: NodeOrder) -> Iterable[Step]:
    if not one.live:
        return [Release(one.key)]
    if one.dying:
        return []
    same = one.version == order.version and one.servers == order.servers
    if one.key.role is Role.EVALUATOR or (one.key.role is Role.WORKER and same):
        return [] if one.leaving or one.ending else [Drain(one.key)]
    return [Kill(one.key)]


def _begin(one: TaskState, task: Task, order: NodeOrder, sparse: bool) -> Iterable[Step]:
    config = tf_config(order, task, sparse, gaps=one.waited)
    if config is not None:
        return [Start(task, config)]
    if not one.waited and tf_config(order, task, sparse, gaps=True) is not None:
        return [WaitForPeers(one.key)]
    return []
