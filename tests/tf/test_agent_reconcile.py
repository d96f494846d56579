"""What a node does next with its tasks: by example, and for whatever order and whatever it runs."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dlrover_run.agent.reconcile import Action, Release, Reserve, Start, Stop, StopMode, WaitForPeers, reconcile
from dlrover_run.policies.parameter_servers.model import PlannedTask, Role, TaskKey
from dlrover_run.policies.parameter_servers.orders import NodeOrder
from tf_ps_runner.agent.desired import LocalTask, desired_tasks, task_states
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


def running(one: PlannedTask, servers: tuple[str, ...] = SERVERS, **state: Any) -> LocalTask:
    return known_of(one, servers, live=True, **state)


def known_of(one: PlannedTask, servers: tuple[str, ...] = (), **state: Any) -> LocalTask:
    return LocalTask(one.key, one.rank, one.version, servers, **state)


PS, PS1 = task(Role.PS), task(Role.PS, 1, 1)
CHIEF, WORKER = task(Role.CHIEF), task(Role.WORKER)
ORDER = NodeOrder(version=1, tasks=(CHIEF, PS, PS1, WORKER), servers=SERVERS, chief="h:1", workers=("h:1",), open=True)


DRAIN, TERMINATE, KILL = StopMode.DRAIN, StopMode.TERMINATE, StopMode.KILL


def steps(
    order: NodeOrder | None, *here: LocalTask, ends: bool = False, sparse: bool = False
) -> tuple[Action[TaskKey], ...]:
    order = order or NodeOrder(version=0)
    return reconcile(desired_tasks(order, here, sparse), task_states(order, here), ends)


def kinds(found: tuple[Action[TaskKey], ...]) -> list[str]:
    return sorted(
        f"{action.mode.name if isinstance(action, Stop) else type(action).__name__} {action.key}" for action in found
    )


def test_a_port_is_held_for_each_task_before_any_is_started() -> None:
    unknown = msgspec.structs.replace(ORDER, servers=(), chief="", workers=())
    assert kinds(steps(unknown)) == [
        "Reserve chief-0",
        "Reserve ps-0",
        "Reserve ps-1",
        "Reserve worker-0",
    ]
    held = [known_of(one) for one in ORDER.tasks]
    assert steps(unknown, *held) == ()
    assert kinds(steps(ORDER, *held)) == ["Start chief-0", "Start ps-0", "Start ps-1", "Start worker-0"]


def test_nothing_is_done_while_all_is_as_it_shall_be() -> None:
    assert steps(ORDER, *(running(one) for one in ORDER.tasks)) == ()
    assert steps(ORDER, *(known_of(one, SERVERS, ended=True) for one in ORDER.tasks)) == ()


def test_those_of_the_last_version_are_killed_at_once_and_their_ports_are_waited_for() -> None:
    following = (task(Role.PS, 2, 0, 2), task(Role.PS, 3, 1, 2), task(Role.CHIEF, 1, 0, 2))
    order = msgspec.structs.replace(ORDER, version=2, tasks=following, servers=("", ""))
    old = [running(one) for one in (PS1, CHIEF, WORKER)]
    assert kinds(steps(order, *old)) == ["KILL chief-0", "KILL ps-1", "KILL worker-0", "Reserve ps-2"]
    dying = [running(one, stopping=KILL) for one in (PS1, CHIEF, WORKER)]
    assert kinds(steps(order, *dying)) == ["Reserve ps-2"]
    gone = [known_of(one, SERVERS, ended=True) for one in (PS1, CHIEF, WORKER)]
    found = kinds(steps(order, *gone))
    assert found == [
        "Release chief-0",
        "Release ps-1",
        "Release worker-0",
        "Reserve chief-1",
        "Reserve ps-2",
        "Reserve ps-3",
    ]


def test_a_worker_too_many_is_requested_to_leave_and_no_other_is() -> None:
    fewer = msgspec.structs.replace(ORDER, tasks=(CHIEF, PS, PS1))
    others = [running(one) for one in (CHIEF, PS, PS1)]
    assert steps(fewer, running(WORKER), *others) == (Stop(WORKER.key, DRAIN),)
    assert steps(fewer, running(WORKER, stopping=DRAIN), *others) == ()


def test_a_server_or_a_chief_that_is_not_wanted_any_more_is_killed() -> None:
    fewer = msgspec.structs.replace(ORDER, tasks=(PS, PS1, WORKER))
    assert kinds(steps(fewer, *(running(one) for one in ORDER.tasks))) == ["KILL chief-0"]


def test_the_servers_of_the_next_version_stand_beside_those_of_this_one() -> None:
    coming = task(Role.PS, 2, 0, 2)
    order = msgspec.structs.replace(ORDER, tasks=(*ORDER.tasks, coming), next_servers=("",))
    now = [running(one) for one in ORDER.tasks]
    assert steps(order, *now) == (Reserve(coming.key),)
    known = msgspec.structs.replace(order, next_servers=NEXT)
    found = steps(known, *now, known_of(coming))
    assert kinds(found) == ["Start ps-2"]
    assert '"ps": ["h:30"]' in str(tf_config(known, coming, sparse=False))
    assert kinds(steps(ORDER, *now, running(coming, NEXT))) == ["KILL ps-2"]


def test_a_task_whose_servers_are_others_by_now_is_killed_though_its_name_stands_there() -> None:
    moved = msgspec.structs.replace(ORDER, servers=("h:20", "h:99"))
    assert kinds(steps(moved, *(running(one) for one in ORDER.tasks))) == [
        "KILL chief-0",
        "KILL ps-0",
        "KILL ps-1",
        "KILL worker-0",
    ]


def test_an_evaluator_goes_on_when_the_servers_change() -> None:
    evaluator = task(Role.EVALUATOR)
    order = NodeOrder(version=2, tasks=(evaluator,), servers=("h:9",), chief="h:1")
    assert steps(order, running(evaluator)) == ()
    assert steps(msgspec.structs.replace(order, tasks=()), running(evaluator)) == (Stop(evaluator.key, DRAIN),)


def test_the_address_of_a_worker_is_waited_for_once() -> None:
    order = msgspec.structs.replace(ORDER, tasks=(CHIEF,), workers=("",))
    assert steps(order, known_of(CHIEF)) == (WaitForPeers(CHIEF.key),)
    assert kinds(steps(order, known_of(CHIEF, waited=True))) == ["Start chief-0"]


def test_at_the_end_all_that_runs_is_requested_to_end_once_and_servers_last() -> None:
    known = [running(PS), running(WORKER, stopping=TERMINATE), running(CHIEF, stopping=DRAIN), known_of(PS1)]
    assert kinds(steps(ORDER, *known, ends=True)) == ["TERMINATE chief-0"]
    assert kinds(steps(ORDER, running(PS), running(WORKER, stopping=TERMINATE), ends=True)) == []
    assert kinds(steps(ORDER, running(PS), known_of(WORKER, ended=True), ends=True)) == ["TERMINATE ps-0"]


def test_a_node_without_an_order_runs_nothing() -> None:
    assert kinds(steps(None, running(WORKER), known_of(PS))) == ["KILL worker-0", "Release ps-0"]


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
knowns = st.lists(st.builds(lambda one, servers, state: known_of(one, servers, **state), tasks, addresses, states)).map(
    lambda given: tuple({one.key: one for one in given}.values())
)


@given(orders, knowns, st.booleans(), st.booleans())
def test_whatever_the_situation_each_step_can_be_carried_out(
    order: NodeOrder, known: tuple[LocalTask, ...], ends: bool, sparse: bool
) -> None:
    found = steps(order, *known, ends=ends, sparse=sparse)
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
            assert all(k.key in wanted for k in occupants), "its port is that of one who is about to go"
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
def test_following_the_steps_leads_to_what_was_ordered(order: NodeOrder, known: tuple[LocalTask, ...]) -> None:
    """Once each process that is told to go has gone, and all addresses are known, nothing is left over."""
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
    here = {one.key: one for one in known}
    wanted = {one.key: one for one in order.tasks}
    for _ in range(12):
        found = steps(order, *here.values())
        for step in found:
            if isinstance(step, Reserve):
                here[step.key] = known_of(wanted[step.key])
            elif isinstance(step, Start):
                assigned = wanted[step.key]
                servers = order.next_servers if assigned.version > order.version else order.servers
                here[step.key] = known_of(assigned, servers, live=True)
            elif isinstance(step, Release):
                del here[step.key]
            elif isinstance(step, Stop):
                here[step.key] = _ended(here[step.key])
        after = {key: _ended(one) if one.stopping else one for key, one in here.items()}
        if not found and after == here:
            break
        here = after
    else:
        raise AssertionError("there is always something left to do")
    assert set(here) == {one.key for one in order.tasks}
    assert all(one.live or one.ended for one in here.values())


def _ended(one: LocalTask) -> LocalTask:
    return LocalTask(one.key, one.rank, one.version, one.servers, ended=True)
