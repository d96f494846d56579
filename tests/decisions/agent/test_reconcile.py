"""The decision table of the agent: which actions follow from what is desired and what runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_run.agent.reconcile import (
    Action,
    DesiredTask,
    Readiness,
    Release,
    Replace,
    Reserve,
    Start,
    Stop,
    StopMode,
    TaskState,
    WaitForPeers,
    reconcile,
)

DRAIN, TERMINATE, KILL = StopMode
READY, LACKS_PEERS, NOT_READY = Readiness


def desired(key: str = "a", place: str = "p", **more: Any) -> DesiredTask[str]:
    return DesiredTask(key, place, **more)


def held(key: str = "a", place: str = "p", **more: Any) -> TaskState[str]:
    return TaskState(key, place, **more)


def live(key: str = "a", place: str = "p", **more: Any) -> TaskState[str]:
    return TaskState(key, place, live=True, **more)


def ended(key: str = "a", place: str = "p", **more: Any) -> TaskState[str]:
    return TaskState(key, place, ended=True, **more)


TABLE: list[tuple[str, list[DesiredTask[str]], list[TaskState[str]], list[Action[str]]]] = [
    ("nothing desired, nothing here", [], [], []),
    ("a desired task that is not here", [desired()], [], [Start("a")]),
    ("one whose address is passed on first", [desired(reserves=True)], [], [Reserve("a")]),
    ("one with its port, but not all addresses", [desired(readiness=NOT_READY)], [held()], []),
    ("one that only lacks peers", [desired(readiness=LACKS_PEERS)], [held()], [WaitForPeers("a")]),
    ("one with all that it needs", [desired()], [held()], [Start("a")]),
    ("one that runs", [desired()], [live()], []),
    ("one that has run", [desired()], [ended()], []),
    ("one of an earlier generation that runs", [desired(generation=2)], [live(generation=1)], [Stop("a", TERMINATE)]),
    ("one of an earlier generation that stops", [desired(generation=2)], [live(generation=1, stopping=KILL)], []),
    ("one of an earlier generation that has run", [desired(generation=2)], [ended(generation=1)], [Release("a")]),
    ("one of an earlier generation with its port", [desired(generation=2)], [held(generation=1)], [Release("a")]),
    ("a task that is not desired", [], [live()], [Stop("a", TERMINATE)]),
    ("one that leaves by itself", [], [live(stop_mode=DRAIN)], [Stop("a", DRAIN)]),
    ("one that leaves already", [], [live(stop_mode=DRAIN, stopping=DRAIN)], []),
    ("one that left and must be killed by now", [], [live(stop_mode=KILL, stopping=DRAIN)], [Stop("a", KILL)]),
    ("one that is not desired and has ended", [], [ended()], [Release("a")]),
    ("a place that its last task has not left", [desired("b")], [live()], [Stop("a", TERMINATE)]),
    ("a place that its last task has left", [desired("b")], [ended()], [Release("a"), Start("b")]),
    ("a place beside a running task", [desired(), desired("b", "q")], [live()], [Start("b")]),
    (
        "one that goes on with kept processes",
        [desired("b", kept=frozenset({1}))],
        [live()],
        [Replace("b", frozenset({1}))],
    ),
    ("one in which places are free", [desired(kept=frozenset({1}))], [live()], [Replace("a", frozenset({1}))]),
]


@pytest.mark.parametrize(("tasks", "states", "actions"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_what_follows_from_what_is_desired_and_what_is_here(
    tasks: Sequence[DesiredTask[str]], states: Sequence[TaskState[str]], actions: Sequence[Action[str]]
) -> None:
    assert list(reconcile(tasks, states, shutting_down=False)) == actions


@pytest.mark.parametrize(
    ("states", "stopped"),
    [
        ([], []),
        ([held(), ended("b")], []),
        ([live()], ["a"]),
        ([live(stop_mode=DRAIN, stopping=DRAIN)], ["a"]),
        ([live(stopping=TERMINATE), live("b", stopping=KILL)], []),
        ([live(served=True), live("b", serves=True), live("c")], ["a", "c"]),
        ([live(served=True, stopping=TERMINATE), live("b", serves=True)], []),
        ([ended(served=True), live("b", serves=True)], ["b"]),
    ],
)
def test_at_the_end_all_that_runs_gets_a_signal_once_and_servers_get_it_last(
    states: Sequence[TaskState[str]], stopped: Sequence[str]
) -> None:
    assert reconcile([desired()], states, shutting_down=True) == tuple(Stop(key, TERMINATE) for key in stopped)


names, numbers = st.sampled_from("abc"), st.integers(1, 2)
tasks = st.builds(DesiredTask, names, names, numbers, st.sampled_from(Readiness), st.booleans())
phases = st.sampled_from(
    [{}, {"live": True}, {"ended": True}, *({"live": True, "stopping": mode} for mode in StopMode)]
)
states = st.builds(
    lambda key, place, generation, mode, serves, served, phase: TaskState(
        key, place, generation, stop_mode=mode, serves=serves, served=served, **phase
    ),
    names,
    names,
    numbers,
    st.sampled_from(StopMode),
    st.booleans(),
    st.booleans(),
    phases,
)


def each_once(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, max_size=3, unique_by=lambda one: one.key)


@given(each_once(tasks), each_once(states), st.booleans())
def test_each_action_can_be_carried_out(
    tasks: list[DesiredTask[str]], states: list[TaskState[str]], shutting_down: bool
) -> None:
    wanted, here = {task.key: task for task in tasks}, {state.key: state for state in states}
    found = reconcile(tasks, states, shutting_down)
    assert len({action.key for action in found}) == len(found), "one action for each task at a time"
    for action in found:
        state = here.get(action.key)
        if isinstance(action, Stop):
            assert state is not None
            assert state.live
            assert state.stopping is None or state.stopping < action.mode
        elif isinstance(action, Release):
            assert state is not None
            assert not state.live
        else:
            assert not shutting_down
            assert action.key in wanted
            assert state is None or not (state.live or state.ended)
