"""What a node does next with its tasks: by example, and for whatever order and whatever it runs."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_run.policies.parameter_servers.model import NodeOrder, Role, Task, TaskKey
from tf_ps_runner.agent.reconcile import (
    Action,
    Drain,
    Kill,
    ReconcileInput,
    Release,
    ReservePort,
    Start,
    TaskState,
    Terminate,
    WaitForPeers,
    reconcile,
)

SERVERS = ("h:20", "h:21")
NEXT = ("h:30",)


def task(role: Role, number: int = 0, rank: int = 0, version: int = 1, port: int = 1) -> Task:
    return Task(
        key=TaskKey(role, number),
        rank=rank,
        version=version,
        node_id="n",
        incarnation="i",
        host="h",
        address="h",
        port=port,
    )


def running(one: Task, servers: tuple[str, ...] = SERVERS, **state: bool) -> TaskState:
    return known_of(one, servers, live=True, **state)


def known_of(one: Task, servers: tuple[str, ...] = (), **state: bool) -> TaskState:
    return TaskState(one.key, one.rank, one.version, servers, **state)


PS, PS1 = task(Role.PS), task(Role.PS, 1, 1)
CHIEF, WORKER = task(Role.CHIEF), task(Role.WORKER)
ORDER = NodeOrder(version=1, tasks=(CHIEF, PS, PS1, WORKER), servers=SERVERS, chief="h:1", workers=("h:1",), open=True)


def steps(order: NodeOrder | None, *known: TaskState, **more: bool) -> tuple[Action, ...]:
    return reconcile(ReconcileInput(order, known, **more))


def kinds(found: tuple[Action, ...]) -> list[str]:
    return sorted(
        f"{type(step).__name__} {step.task.key if isinstance(step, ReservePort | Start) else step.key}"
        for step in found
    )


def test_a_port_is_held_for_each_task_before_any_is_started() -> None:
    unknown = msgspec.structs.replace(ORDER, servers=(), chief="", workers=())
    assert kinds(steps(unknown)) == [
        "ReservePort chief-0",
        "ReservePort ps-0",
        "ReservePort ps-1",
        "ReservePort worker-0",
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
    assert kinds(steps(order, *old)) == ["Kill chief-0", "Kill ps-1", "Kill worker-0", "ReservePort ps-2"]
    dying = [running(one, dying=True) for one in (PS1, CHIEF, WORKER)]
    assert kinds(steps(order, *dying)) == ["ReservePort ps-2"]
    gone = [known_of(one, SERVERS, ended=True) for one in (PS1, CHIEF, WORKER)]
    found = kinds(steps(order, *gone))
    assert found == [
        "Release chief-0",
        "Release ps-1",
        "Release worker-0",
        "ReservePort chief-1",
        "ReservePort ps-2",
        "ReservePort ps-3",
    ]


def test_a_worker_too_many_is_told_to_leave_and_nobody_else_is() -> None:
    fewer = msgspec.structs.replace(ORDER, tasks=(CHIEF, PS, PS1))
    others = [running(one) for one in (CHIEF, PS, PS1)]
    assert steps(fewer, running(WORKER), *others) == (Drain(WORKER.key),)
    assert steps(fewer, running(WORKER, leaving=True), *others) == ()


def test_a_server_or_a_chief_that_is_not_wanted_any_more_is_killed() -> None:
    fewer = msgspec.structs.replace(ORDER, tasks=(PS, PS1, WORKER))
    assert kinds(steps(fewer, *(running(one) for one in ORDER.tasks))) == ["Kill chief-0"]


def test_the_servers_of_the_next_version_stand_beside_those_of_this_one() -> None:
    coming = task(Role.PS, 2, 0, 2)
    order = msgspec.structs.replace(ORDER, tasks=(*ORDER.tasks, coming), next_servers=("",))
    now = [running(one) for one in ORDER.tasks]
    assert steps(order, *now) == (ReservePort(coming),)
    known = msgspec.structs.replace(order, next_servers=NEXT)
    found = steps(known, *now, known_of(coming))
    assert kinds(found) == ["Start ps-2"]
    assert isinstance(found[0], Start)
    assert '"ps": ["h:30"]' in found[0].config
    assert kinds(steps(ORDER, *now, running(coming, NEXT))) == ["Kill ps-2"]


def test_a_task_whose_servers_are_others_by_now_is_killed_though_its_name_stands_there() -> None:
    moved = msgspec.structs.replace(ORDER, servers=("h:20", "h:99"))
    assert kinds(steps(moved, *(running(one) for one in ORDER.tasks))) == [
        "Kill chief-0",
        "Kill ps-0",
        "Kill ps-1",
        "Kill worker-0",
    ]


def test_an_evaluator_goes_on_when_the_servers_change() -> None:
    evaluator = task(Role.EVALUATOR)
    order = NodeOrder(version=2, tasks=(evaluator,), servers=("h:9",), chief="h:1")
    assert steps(order, running(evaluator)) == ()
    assert steps(msgspec.structs.replace(order, tasks=()), running(evaluator)) == (Drain(evaluator.key),)


def test_the_address_of_a_worker_is_waited_for_once() -> None:
    order = msgspec.structs.replace(ORDER, tasks=(CHIEF,), workers=("",))
    assert steps(order, known_of(CHIEF)) == (WaitForPeers(CHIEF.key),)
    assert kinds(steps(order, known_of(CHIEF, waited=True))) == ["Start chief-0"]


@pytest.mark.parametrize("more", [{"over": True}, {"departing": True}])
def test_at_the_end_all_that_runs_is_told_to_end_once_and_servers_last(more: dict[str, bool]) -> None:
    known = [running(PS), running(WORKER, ending=True), running(CHIEF, leaving=True), known_of(PS1)]
    assert kinds(steps(ORDER, *known, **more)) == ["Terminate chief-0"]
    assert kinds(steps(ORDER, running(PS), running(WORKER, ending=True), **more)) == []
    assert kinds(steps(ORDER, running(PS), known_of(WORKER, ended=True), **more)) == ["Terminate ps-0"]


def test_a_node_without_an_order_runs_nothing() -> None:
    assert kinds(steps(None, running(WORKER), known_of(PS))) == ["Kill worker-0", "Release ps-0"]


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
        {"live": True, "dying": True},
        {"live": True, "leaving": True},
        {"waited": True},
    ]
)
knowns = st.lists(st.builds(lambda one, servers, state: known_of(one, servers, **state), tasks, addresses, states)).map(
    lambda given: tuple({one.key: one for one in given}.values())
)


@given(orders, knowns, st.booleans(), st.booleans(), st.booleans())
def test_whatever_the_situation_each_step_can_be_carried_out(
    order: NodeOrder, known: tuple[TaskState, ...], over: bool, departing: bool, sparse: bool
) -> None:
    found = reconcile(ReconcileInput(order, known, over, departing, sparse))
    by_key = {one.key: one for one in known}
    wanted = {one.key: one for one in order.tasks}
    keys = [step.task.key if isinstance(step, ReservePort | Start) else step.key for step in found]
    assert len(keys) == len(set(keys)), "one step for each task at a time"
    for step, key in zip(found, keys, strict=True):
        one = by_key.get(key)
        if isinstance(step, ReservePort):
            assert one is None
            occupants = [k for k in known if (k.key.role, k.rank) == (step.task.role, step.task.rank) and k.live]
            assert all(k.key in wanted for k in occupants), "its port is that of one who is about to go"
        else:
            assert one is not None
            assert one.live == isinstance(step, Kill | Drain | Terminate)
            assert not (one.dying and isinstance(step, Kill | Drain | Terminate))
        if isinstance(step, Start):
            assert one is not None
            assert not one.ended
            assert step.task is wanted[key]
            assert '""' not in step.config
            assert '":0"' not in step.config
        if isinstance(step, Release):
            assert key not in wanted or (one is not None and (one.rank, one.version) != _place(wanted[key]))


def _place(one: Task) -> tuple[int, int]:
    return one.rank, one.version


@given(orders, knowns)
def test_following_the_steps_leads_to_what_was_ordered(order: NodeOrder, known: tuple[TaskState, ...]) -> None:
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
    for _ in range(12):
        found = reconcile(ReconcileInput(order, tuple(here.values())))
        for step in found:
            if isinstance(step, ReservePort):
                here[step.task.key] = known_of(step.task)
            elif isinstance(step, Start):
                servers = order.next_servers if step.task.version > order.version else order.servers
                here[step.task.key] = known_of(step.task, servers, live=True)
            elif isinstance(step, Release):
                del here[step.key]
            elif isinstance(step, Kill | Drain | Terminate):
                here[step.key] = _ended(here[step.key])
        after = {key: _ended(one) if one.dying or one.leaving or one.ending else one for key, one in here.items()}
        if not found and after == here:
            break
        here = after
    else:
        raise AssertionError("there is always something left to do")
    assert set(here) == {one.key for one in order.tasks}
    assert all(one.live or one.ended for one in here.values())


def _ended(one: TaskState) -> TaskState:
    return TaskState(one.key, one.rank, one.version, one.servers, ended=True)
