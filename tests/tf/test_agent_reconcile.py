"""The next steps of a node for its tasks: examples, and properties for any order and any set of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_run.agent.reconcile import Action, Release, Reserve, Start, Stop, StopMode, reconcile
from tf_ps_runner.agent.desired import LocalTask, desired_tasks, task_states
from tf_ps_runner.cluster.model import PlannedTask, Role, TaskKey
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.tf_config import tf_config

SERVERS = ("h:20", "h:21")
NEXT = ("h:30",)


def task(role: Role, number: int = 0, rank: int = 0, version: int = 1, port: int = 1) -> PlannedTask:
    return PlannedTask(
        key=TaskKey(role, number),
        rank=rank,
        version=version,
        node_id="n",
        incarnation="i",
        host="h",
        address="h",
        port=port,
    )


def here(one: PlannedTask, servers: tuple[str, ...] = SERVERS, **state: Any) -> LocalTask:
    return LocalTask(one.key, one.rank, one.version, servers, **state)


def held(one: PlannedTask) -> LocalTask:
    return here(one, ())


def running(one: PlannedTask, servers: tuple[str, ...] = SERVERS, **state: Any) -> LocalTask:
    return here(one, servers, live=True, **state)


def ended(one: PlannedTask) -> LocalTask:
    return here(one, ended=True)


def every(kind: Callable[[PlannedTask], LocalTask], *tasks: PlannedTask) -> tuple[LocalTask, ...]:
    return tuple(map(kind, tasks))


DRAIN, TERMINATE, KILL = StopMode.DRAIN, StopMode.TERMINATE, StopMode.KILL

PS, PS1 = task(Role.PS), task(Role.PS, 1, 1)
CHIEF, WORKER, EVALUATOR = task(Role.CHIEF), task(Role.WORKER), task(Role.EVALUATOR)
ALL = (CHIEF, PS, PS1, WORKER)
ORDER = NodeOrder(version=1, tasks=ALL, servers=SERVERS, chief="h:1", workers=("h:1",), open=True)


def order(**changes: Any) -> NodeOrder:
    return msgspec.structs.replace(ORDER, **changes)


COMING = task(Role.PS, 2, 0, 2)
NO_ADDRESSES = order(servers=(), chief="", workers=())
NEXT_VERSION = order(version=2, tasks=(COMING, task(Role.PS, 3, 1, 2), task(Role.CHIEF, 1, 0, 2)), servers=("", ""))
OLD = (PS1, CHIEF, WORKER)
RESHAPED = order(tasks=(*ALL, COMING), next_servers=("",))
FIRST = order(tasks=(CHIEF,), workers=("",))
NEW_SERVERS = NodeOrder(version=2, tasks=(EVALUATOR,), servers=("h:9",), chief="h:1")


def steps(
    wanted: NodeOrder | None, *here: LocalTask, shutting_down: bool = False, sparse: bool = False
) -> tuple[Action[TaskKey], ...]:
    wanted = wanted or NodeOrder(version=0)
    return reconcile(desired_tasks(wanted, here, sparse), task_states(wanted, here), shutting_down)


def kinds(found: tuple[Action[TaskKey], ...]) -> str:
    """The actions as one text, such as `Reserve chief-0, KILL ps-1`, ordered by task."""
    return ", ".join(
        f"{action.mode.name if isinstance(action, Stop) else type(action).__name__} {action.key}"
        for action in sorted(found, key=lambda action: str(action.key))
    )


@pytest.mark.parametrize(
    ("wanted", "known", "expected"),
    [
        # A port is held for each task before any is started.
        (NO_ADDRESSES, (), "Reserve chief-0, Reserve ps-0, Reserve ps-1, Reserve worker-0"),
        (NO_ADDRESSES, every(held, *ALL), ""),
        (ORDER, every(held, *ALL), "Start chief-0, Start ps-0, Start ps-1, Start worker-0"),
        # Nothing is done while everything is as ordered.
        (ORDER, every(running, *ALL), ""),
        (ORDER, every(ended, *ALL), ""),
        # The tasks of the last version are killed at once, and their ports become free before they are reserved.
        (NEXT_VERSION, every(running, *OLD), "KILL chief-0, KILL ps-1, Reserve ps-2, KILL worker-0"),
        (NEXT_VERSION, tuple(running(one, stopping=KILL) for one in OLD), "Reserve ps-2"),
        (
            NEXT_VERSION,
            every(ended, *OLD),
            "Release chief-0, Reserve chief-1, Release ps-1, Reserve ps-2, Reserve ps-3, Release worker-0",
        ),
        # A surplus worker is requested to leave once; a server or a chief is killed.
        (order(tasks=(CHIEF, PS, PS1)), every(running, *ALL), "DRAIN worker-0"),
        (
            order(tasks=(CHIEF, PS, PS1)),
            (*every(running, CHIEF, PS, PS1), running(WORKER, stopping=DRAIN)),
            "",
        ),
        (order(tasks=(PS, PS1, WORKER)), every(running, *ALL), "KILL chief-0"),
        # The servers of the next version are started beside those of this one, and killed when it is canceled.
        (RESHAPED, every(running, *ALL), "Reserve ps-2"),
        (order(tasks=RESHAPED.tasks, next_servers=NEXT), (*every(running, *ALL), held(COMING)), "Start ps-2"),
        (ORDER, (*every(running, *ALL), running(COMING, NEXT)), "KILL ps-2"),
        # A task that was started with other servers is killed though it is ordered; an evaluator continues.
        (
            order(servers=("h:20", "h:99")),
            every(running, *ALL),
            "KILL chief-0, KILL ps-0, KILL ps-1, KILL worker-0",
        ),
        (NEW_SERVERS, (running(EVALUATOR),), ""),
        (msgspec.structs.replace(NEW_SERVERS, tasks=()), (running(EVALUATOR),), "DRAIN evaluator-0"),
        # The address of a worker is waited for once.
        (FIRST, (held(CHIEF),), "WaitForPeers chief-0"),
        (FIRST, (here(CHIEF, (), waited=True),), "Start chief-0"),
        # A node without an order runs nothing.
        (None, (running(WORKER), held(PS)), "Release ps-0, KILL worker-0"),
    ],
)
def test_what_a_node_does_next(wanted: NodeOrder | None, known: tuple[LocalTask, ...], expected: str) -> None:
    assert kinds(steps(wanted, *known)) == expected


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (
            (running(PS), running(WORKER, stopping=TERMINATE), running(CHIEF, stopping=DRAIN), held(PS1)),
            "TERMINATE chief-0",
        ),
        ((running(PS), running(WORKER, stopping=TERMINATE)), ""),
        ((running(PS), ended(WORKER)), "TERMINATE ps-0"),
    ],
)
def test_at_the_end_each_task_is_requested_to_end_once_and_servers_last(
    known: tuple[LocalTask, ...], expected: str
) -> None:
    assert kinds(steps(ORDER, *known, shutting_down=True)) == expected


def test_a_server_of_the_next_version_is_started_with_the_servers_of_that_version() -> None:
    config = tf_config(order(tasks=RESHAPED.tasks, next_servers=NEXT), COMING, sparse=False)
    assert '"ps": ["h:30"]' in str(config)


roles = st.sampled_from(Role)
small = st.integers(0, 2)
tasks = st.builds(task, roles, small, small, st.integers(1, 3), st.sampled_from([0, 5]))
addresses = st.lists(st.sampled_from(["", "h:20", "h:21"]), max_size=3).map(tuple)
orders = st.builds(
    lambda given, version, servers, coming, chief, workers: NodeOrder(
        version=version,
        tasks=tuple({one.key: one for one in given}.values()),
        servers=servers,
        next_servers=coming,
        chief=chief,
        workers=workers,
    ),
    st.lists(tasks, max_size=6),
    st.integers(1, 3),
    addresses,
    addresses,
    st.sampled_from(["", "h:1"]),
    addresses,
)
states = st.sampled_from(
    [
        {},
        {"live": True},
        {"ended": True},
        {"live": True, "stopping": KILL},
        {"live": True, "stopping": TERMINATE},
        {"live": True, "stopping": DRAIN},
        {"waited": True},
    ]
)
knowns = st.lists(st.builds(lambda one, servers, state: here(one, servers, **state), tasks, addresses, states)).map(
    lambda given: tuple({one.key: one for one in given}.values())
)


@given(orders, knowns, st.booleans(), st.booleans())
def test_each_step_is_possible_in_any_situation(
    order: NodeOrder, known: tuple[LocalTask, ...], shutting_down: bool, sparse: bool
) -> None:
    found = steps(order, *known, shutting_down=shutting_down, sparse=sparse)
    by_key = {one.key: one for one in known}
    wanted = {one.key: one for one in order.tasks}
    keys = [step.key for step in found]
    assert len(keys) == len(set(keys)), "one step for each task at a time"
    for step, key in zip(found, keys, strict=True):
        one = by_key.get(key)
        if isinstance(step, Reserve):
            assert one is None
            place = (wanted[key].role, wanted[key].rank)
            occupants = [k for k in known if (k.key.role, k.rank) == place and k.live]
            assert all(k.key in wanted for k in occupants), "its port belongs to a task that is about to exit"
        else:
            assert one is not None
            assert one.live == isinstance(step, Stop)
            assert not (one.stopping is KILL and isinstance(step, Stop))
        if isinstance(step, Start):
            assert one is not None
            assert not one.ended
            config = tf_config(order, wanted[key], sparse, gaps=one.waited)
            assert config is not None
            assert '""' not in config
            assert '":0"' not in config
        if isinstance(step, Release):
            assert key not in wanted or (one is not None and (one.rank, one.version) != _place(wanted[key]))


def _place(one: PlannedTask) -> tuple[int, int]:
    return one.rank, one.version


@given(orders, knowns)
def test_following_the_steps_leads_to_the_ordered_tasks(order: NodeOrder, known: tuple[LocalTask, ...]) -> None:
    """Once each process that is to exit has exited, and all addresses are known, no step is left."""
    order = msgspec.structs.replace(
        order,
        servers=("h:20",),
        next_servers=("h:21",),
        chief="h:1",
        workers=("h:1",),
        tasks=tuple(
            msgspec.structs.replace(one, port=5, version=min(order.version + 1, max(order.version, one.version)))
            for one in order.tasks
        ),
    )
    local = {one.key: one for one in known}
    wanted = {one.key: one for one in order.tasks}
    for _ in range(12):
        found = steps(order, *local.values())
        for step in found:
            if isinstance(step, Reserve):
                local[step.key] = held(wanted[step.key])
            elif isinstance(step, Start):
                assigned = wanted[step.key]
                servers = order.next_servers if assigned.version > order.version else order.servers
                local[step.key] = running(assigned, servers)
            elif isinstance(step, Release):
                del local[step.key]
            elif isinstance(step, Stop):
                local[step.key] = _ended(local[step.key])
        after = {key: _ended(one) if one.stopping else one for key, one in local.items()}
        if not found and after == local:
            break
        local = after
    else:
        raise AssertionError("there is always something left to do")
    assert set(local) == {one.key for one in order.tasks}
    assert all(one.live or one.ended for one in local.values())


def _ended(one: LocalTask) -> LocalTask:
    return LocalTask(one.key, one.rank, one.version, one.servers, ended=True)
