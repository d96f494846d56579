"""The supervision of the nodes of a local cluster, for all events in any order."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_run import exit_codes
from dlrover_run.agent.result import JobResult
from dlrover_run.exit_reasons import ExitReason
from dlrover_run.features.local_nodes.nodes import end_of
from dlrover_run.features.local_nodes.settings import LocalSettings
from dlrover_run.features.local_nodes.supervision import (
    EndKind,
    LocalCluster,
    LocalNode,
    NodeEnd,
    Transition,
    begin,
    cannot_start,
    exit_code,
    join,
    node_ended,
    stop,
)

LOST = (EndKind.DIED, EndKind.EXCLUDED, EndKind.LEFT)


@dataclass
class History:
    """A cluster with the history of its actions."""

    local: LocalSettings
    cluster: LocalCluster
    steps: list[Transition]
    settled: list[bool] = field(default_factory=list)

    @classmethod
    def of(cls, local: LocalSettings) -> History:
        first = begin(local)
        return cls(local, first.cluster, [first], [False])

    def follow(self, step: Transition) -> Transition:
        self.settled.append(self.cluster.settled)
        self.steps.append(step)
        self.cluster = step.cluster
        return step

    def end(self, number: int, kind: EndKind = EndKind.DIED, code: int = 137, clause: str = "ended") -> Transition:
        return self.follow(node_ended(self.cluster, NodeEnd(number, kind, code, clause)))

    def refuse(self, node: LocalNode) -> Transition:
        return self.follow(cannot_start(self.cluster, node, "no memory is left."))

    def join(self) -> Transition:
        return self.follow(join(self.cluster))

    def stop(self, number: signal.Signals = signal.SIGINT) -> Transition:
        return self.follow(stop(self.cluster, number))

    @property
    def started(self) -> list[LocalNode]:
        return [node for step in self.steps for node in step.start]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Draw a cluster after any events: also ends of nodes that had ended before, or never existed."""
    least = draw(st.integers(1, 4))
    history = History.of(LocalSettings(least, draw(st.integers(least, 6)), draw(st.integers(0, 3))))
    for event in draw(st.lists(st.sampled_from(("lost", "lost", "any", "any", "refuse", "join", "stop")), max_size=14)):
        number = draw(st.integers(0, history.cluster.numbers))
        if event in ("lost", "any"):
            kind = draw(st.sampled_from(LOST if event == "lost" else tuple(EndKind)))
            history.end(number, kind, 0 if kind is EndKind.DONE else draw(st.sampled_from((1, 72, 73, 137))))
        elif event == "refuse":
            history.refuse(draw(st.sampled_from(history.started)))
        elif event == "join":
            history.join()
        else:
            history.stop(draw(st.sampled_from((signal.SIGINT, signal.SIGTERM))))
    return history


def possible_steps(history: History) -> list[Transition]:
    """Return the events that may happen next."""
    cluster = history.cluster
    ends = [NodeEnd(number, kind, 1, "ended") for number in range(cluster.numbers) for kind in EndKind]
    return [
        join(cluster),
        stop(cluster, signal.SIGTERM),
        *(node_ended(cluster, end) for end in ends),
        *(cannot_start(cluster, node, "it") for node in history.started),
    ]


@given(histories())
def test_no_place_has_two_nodes_and_no_number_is_given_twice(history: History) -> None:
    for step in history.steps:
        places = [node.place for node in step.cluster.running]
        assert len(set(places)) == len(places) <= history.local.max_nodes
        assert set(places) <= set(range(history.local.max_nodes))
        assert set(step.start) <= set(step.cluster.running)
    assert [node.number for node in history.started] == list(range(history.cluster.numbers))


@given(histories())
def test_no_more_nodes_are_replaced_than_may_be(history: History) -> None:
    places = [node.place for node in history.started]
    replaced = len(places) - len(set(places))
    assert replaced == history.cluster.replaced <= history.local.restarts


@given(histories())
def test_no_node_is_started_once_it_is_settled_how_the_job_ends(history: History) -> None:
    for step, settled in zip(history.steps, history.settled, strict=True):
        assert not (settled and step.start)
        assert step.cluster.settled or not settled


@given(histories())
def test_the_record_is_over_exactly_when_nothing_runs_and_nothing_more_may_start(history: History) -> None:
    starts = any(step.start for step in possible_steps(history))
    assert history.cluster.over == (not history.cluster.running)
    assert not (history.cluster.over and starts)
    assert history.cluster.more_to_come == bool(join(history.cluster).start)


@given(histories())
def test_others_are_awaited_once_and_only_while_there_are_any(history: History) -> None:
    awaited = [step for step in history.steps if step.end_others]
    assert len(awaited) <= 1
    for step in awaited:
        assert step.cluster.running
        assert step.cluster.done or step.cluster.failed is not None


@given(histories(), st.sampled_from(EndKind))
def test_the_end_of_a_node_that_does_not_run_changes_nothing(history: History, kind: EndKind) -> None:
    running = {node.number for node in history.cluster.running}
    for node in [node for node in history.started if node.number not in running]:
        assert node_ended(history.cluster, NodeEnd(node.number, kind, 1, "ended")) == Transition(history.cluster)
        assert cannot_start(history.cluster, node, "it") == Transition(history.cluster)


@given(histories())
def test_a_job_that_was_done_is_a_success_whatever_else_was_lost(history: History) -> None:
    cluster = history.cluster
    if cluster.done and cluster.failed is None:
        assert exit_code(cluster) == exit_codes.SUCCESS
    elif not cluster.settled and cluster.numbers > len(cluster.running):
        assert exit_code(cluster) != exit_codes.SUCCESS


@given(histories())
def test_the_message_is_a_clause_on_one_line_and_names_the_failing_process(history: History) -> None:
    for step in history.steps:
        assert all(line and "\n" not in line and not line.endswith(".") for line in step.lines)
    for step in history.steps[1:]:
        assert all(f"node {node.number} " in "".join(step.lines) for node in step.start)


def test_the_first_nodes_start_at_once_in_their_places() -> None:
    step = begin(LocalSettings(3, 5))
    assert step.start == step.cluster.running == (LocalNode(0, 0), LocalNode(1, 1), LocalNode(2, 2))
    assert step.lines == ("3 nodes on this machine, and 2 more later",)
    assert begin(LocalSettings(1, 1)).lines == ("1 node on this machine",)


@pytest.mark.parametrize("kind", LOST)
def test_a_node_that_was_lost_is_replaced_in_its_place_while_restarts_are_left(kind: EndKind) -> None:
    history = History.of(LocalSettings(4, 4, restarts=2))
    step = history.end(1, kind, clause="was killed by SIGKILL")
    assert step.start == (LocalNode(4, 1),)
    assert step.lines == ("node 1 was killed by SIGKILL; node 4 takes its place (1 of 2 node restarts)",)
    assert history.end(4, kind).start == (LocalNode(5, 1),)
    step = history.end(2, kind, clause="was excluded by the node check (exit code 73)")
    assert (step.start, step.end_others) == ((), False)
    assert step.lines == (
        "node 2 was excluded by the node check (exit code 73); no node restart is left of 2, "
        "so the others go on without it",
    )


def test_without_restarts_the_last_node_to_go_leaves_none() -> None:
    history = History.of(LocalSettings(2, 3, restarts=0))
    line = "node 0 was killed; no node is replaced in this job, so the others go on without it"
    assert history.end(0, clause="was killed").lines == (line,)
    assert history.end(1, EndKind.EXCLUDED, exit_codes.FAULTY_NODE).lines[0].endswith("so no node is left")
    assert history.cluster.over
    assert not history.cluster.more_to_come
    assert exit_code(history.cluster) == exit_codes.FAULTY_NODE


def test_nodes_join_one_at_a_time_with_numbers_of_their_own() -> None:
    history = History.of(LocalSettings(2, 4))
    history.end(0)
    assert history.join().start == (LocalNode(3, 2),)
    step = history.join()
    assert (step.start, step.lines) == ((LocalNode(4, 3),), ("node 4 joins",))
    assert not history.cluster.more_to_come
    assert history.join() == Transition(history.cluster)


def test_the_others_of_a_job_that_is_done_are_awaited_and_not_replaced() -> None:
    history = History.of(LocalSettings(4, 5))
    step = history.end(0, EndKind.DONE, 0, "is done")
    assert (step.end_others, step.lines, history.join().start) == (True, (), ())
    assert not history.end(3, EndKind.DONE, 0, "is done").end_others
    step = history.end(1, EndKind.DIED, 137, "was killed by SIGKILL")
    assert (step.end_others, step.lines, step.start) == (False, ("node 1 was killed by SIGKILL",), ())
    assert history.end(2, EndKind.LEFT, 143, "was stopped by SIGTERM").lines == ()
    assert (history.cluster.over, exit_code(history.cluster)) == (True, exit_codes.SUCCESS)


def test_the_first_failure_of_the_job_is_its_code() -> None:
    history = History.of(LocalSettings(3, 3))
    step = history.end(2, EndKind.FAILED, 7, "failed with exit code 7")
    assert (step.end_others, step.start) == (True, ())
    assert step.lines == ("node 2 failed with exit code 7, so the job has failed",)
    step = history.end(0, EndKind.FAILED, exit_codes.PEER_FAILED, "failed with exit code 1")
    assert (step.end_others, step.lines) == (False, ("node 0 failed with exit code 1",))
    history.end(1, EndKind.DIED)
    assert (history.cluster.over, exit_code(history.cluster)) == (True, 7)


def test_a_job_that_an_operator_has_stopped_has_not_failed() -> None:
    """Each node prints who has stopped the job; the supervisor adds no failure to that."""
    history = History.of(LocalSettings(2, 2))
    result = JobResult(143, ExitReason.STOPPED_ON_REQUEST, "ann@n0 stopped the job")
    end = end_of(0, 143, result)
    assert (end.clause, end.requested) == ("was stopped on request", True)
    step = node_ended(history.cluster, end)
    assert (step.lines, step.end_others, step.cluster.failed) == ((), True, 143)
    step = node_ended(step.cluster, end_of(1, 143, result))
    assert (step.lines, exit_code(step.cluster)) == ((), 143)


Event = Callable[[History], Transition]


def ended(number: int, kind: EndKind, code: int) -> Event:
    """A node ends."""
    return lambda history: history.end(number, kind, code)


def stopped(number: signal.Signals) -> Event:
    """The command receives a request to end."""
    return lambda history: history.stop(number)


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([ended(0, EndKind.DONE, 0), ended(1, EndKind.FAILED, 5)], 5),
        ([ended(0, EndKind.FAILED, 5), ended(1, EndKind.DONE, 0)], 5),
        ([ended(0, EndKind.DONE, 0), ended(1, EndKind.EXCLUDED, 73)], 0),
        ([ended(0, EndKind.DIED, 137), ended(1, EndKind.DONE, 0)], 0),
        ([ended(0, EndKind.DIED, 137), ended(1, EndKind.FAILED, 75)], 75),
        ([ended(0, EndKind.DIED, 137), ended(1, EndKind.LEFT, 72)], 72),
        ([stopped(signal.SIGINT), ended(0, EndKind.LEFT, 130), ended(1, EndKind.DIED, 137)], 130),
        (
            [stopped(signal.SIGINT), stopped(signal.SIGTERM), ended(0, EndKind.FAILED, 1), ended(1, EndKind.LEFT, 143)],
            130,
        ),
        ([stopped(signal.SIGTERM), ended(0, EndKind.DONE, 0), ended(1, EndKind.DONE, 0)], 0),
        ([ended(0, EndKind.DONE, 0), stopped(signal.SIGINT), ended(1, EndKind.LEFT, 130)], 0),
        ([ended(0, EndKind.FAILED, 5), stopped(signal.SIGINT), ended(1, EndKind.LEFT, 130)], 5),
    ],
)
def test_the_code_of_the_command_is_the_jobs_else_the_signals_else_the_last_nodes(
    events: list[Event], code: int
) -> None:
    history = History.of(LocalSettings(2, 2, restarts=0))
    for event in events:
        event(history)
    assert history.cluster.over
    assert exit_code(history.cluster) == code


def test_a_node_that_was_requested_to_leave_is_not_replaced_and_not_reported() -> None:
    history = History.of(LocalSettings(2, 3))
    step = history.stop(signal.SIGTERM)
    assert (step.start, step.end_others) == ((), False)
    assert (history.join().start, history.end(0, EndKind.LEFT).lines) == ((), ())
    step = history.end(1, EndKind.DIED, clause="was killed by SIGKILL")
    assert (step.start, step.lines) == ((), ("node 1 was killed by SIGKILL",))


def test_a_job_one_of_whose_first_nodes_cannot_be_started_has_failed() -> None:
    history = History.of(LocalSettings(2, 3))
    step = history.refuse(LocalNode(1, 1))
    assert step.lines == ("node 1 could not be started: no memory is left, so the job has failed",)
    assert (step.end_others, history.join().start) == (True, ())
    history.end(0, EndKind.LEFT, 143)
    assert (history.cluster.over, exit_code(history.cluster)) == (True, exit_codes.CANNOT_START)


def test_a_job_goes_on_without_a_further_node_that_cannot_be_started() -> None:
    history = History.of(LocalSettings(2, 3))
    [newcomer] = history.end(1).start
    step = history.refuse(newcomer)
    assert (step.start, step.end_others) == ((), False)
    assert step.lines == ("node 2 could not be started: no memory is left, so the others go on without it",)
    assert history.join().start == (LocalNode(3, 2),)
    assert not history.cluster.settled


def test_a_node_that_cannot_be_started_any_more_as_the_job_ends_is_reported_and_no_more() -> None:
    history = History.of(LocalSettings(2, 2))
    [newcomer] = history.end(1).start
    history.stop()
    step = history.refuse(newcomer)
    assert (step.lines, step.end_others) == (("node 2 could not be started: no memory is left",), False)


def test_the_code_is_that_of_the_cause_also_when_other_nodes_end_first() -> None:
    history = History.of(LocalSettings(3, 3))
    for number, code, by_peer in ((0, 1, True), (1, 7, False), (2, 1, True)):
        history.follow(node_ended(history.cluster, NodeEnd(number, EndKind.FAILED, code, "failed", by_peer)))
        assert exit_code(history.cluster) == (1 if number == 0 else 7)
    assert [step.end_others for step in history.steps] == [False, True, False, False]
