"""The driver of a coordinator alone: what it hands out and when, requests, pauses, errors, and the end of a job."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from support.virtual_torch import rules

from dlrover_run.coordination import coordinator as coordinators
from dlrover_run.coordination.coordinator import RETURN_GRACE, Coordinator
from dlrover_run.coordination.driver import (
    ERROR_MEMORY,
    ERROR_RETRY,
    STORE_RETRY,
    Answer,
    Disconnected,
    Driver,
    Event,
    Paused,
    Requested,
    Writes,
)
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.requests import JUST_BEGUN, Action, OperatorRequest
from dlrover_run.coordination.records.round import NodeKey, RoundKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.words.reasons import render

SCALE = OperatorRequest(Action.SCALE, min_nodes=1, max_nodes=1)
FULL = "the disk is full"


class Shell:
    """The owner of a driver: it stores plans in a list, unless they cannot be stored because of `problem`, and sends
    assignments to nodes, which take what they receive."""

    def __init__(
        self, job: JobRules, *, plan: Plan | None = None, kept_together: bool = False, begins: bool = False
    ) -> None:
        self.now = 1000.0
        self.problem = ""
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.stored: list[Plan] = []
        self.turns: list[Writes] = []
        self.received: dict[str, list[Assignment]] = {}
        self.answers: dict[Any, Answer] = {}
        self.reports: dict[str, NodeReport] = {}
        self.connected: set[str] = set()
        self.driver = Driver(
            Coordinator(job, self.now, 5, plan),
            self.lines.append,
            kept_together=kept_together,
            begin=(lambda now: Coordinator(job, now, 9)) if begins else None,
            log_error=self.errors.append,
        )

    def come(self, *names: str) -> None:
        """Nodes join at the same time; each has its first assignment in any case."""
        for name in names:
            port = 2000 + len(self.reports)
            self.connected.add(name)
            self.reports[name] = new_report(name, port)
            self.arrive(self.reports[name])
        self.run()
        for name in names:
            if name not in self.received:
                self._send(name)
        self.run()

    def arrive(self, event: Event) -> bool:
        return self.driver.arrive(event, self.now)

    def report(self, name: str, **changes: Any) -> None:
        self.reports[name] = msgspec.structs.replace(self.reports[name], **changes)
        self.arrive(self.reports[name])
        self.run()

    def lose(self, name: str) -> None:
        self.connected.discard(name)
        self.arrive(Disconnected(key_of(name)))
        self.run()

    def wait(self, seconds: float) -> None:
        """Take a turn whenever the driver wants one, for that long."""
        end = self.now + seconds
        while (at := self.driver.wake_at()) is not None and at <= end:
            self.now = max(self.now, at)
            self.run()
        self.now = end

    def run(self) -> None:
        """Take turns until one returns nothing to do."""
        for _ in range(20):
            writes = self.driver.turn(self.now)
            self.turns.append(writes)
            if writes.plan is not None:
                if not self.problem:
                    self.stored.append(writes.plan)
                self.driver.written(self.now, self.problem)
            self.give(writes)
            if writes.plan is None and not writes.send:
                return
        raise AssertionError("the turns come to no end")

    def give(self, writes: Writes) -> None:
        for id, answer in writes.answers.items():
            assert id not in self.answers, "a request is answered once"
            self.answers[id] = answer
            self.driver.answered(id)
        if writes.send:
            for name in sorted(self.connected):
                self._send(name)

    def _send(self, name: str) -> None:
        assignment = self.driver.assignment(key_of(name), self.now)
        if assignment is None:
            return
        self.received.setdefault(name, []).append(assignment)
        report, ranks = self.reports[name], assignment.ranks
        if report.phase is NodePhase.LEFT:
            return
        changes = {"epoch": assignment.epoch, "known_round": assignment.key, "ranks": ranks}
        phase = NodePhase.RUNNING if ranks else NodePhase.WAITING
        if (report.ranks and report.ranks.key) != (ranks and ranks.key):
            changes |= {"phase": phase, "port": report.port + 100}
        self.reports[name] = msgspec.structs.replace(report, **changes)
        self.arrive(self.reports[name])

    def last(self, name: str) -> Assignment:
        return self.received[name][-1]

    def finish(self, *names: str) -> None:
        for name in names:
            self.report(name, phase=NodePhase.SUCCEEDED, progressed=True)


def key_of(name: str) -> NodeKey:
    return NodeKey(name, "1")


def new_report(name: str, port: int) -> NodeReport:
    return NodeReport(node_id=name, incarnation="1", host=name, address=f"{name}.net", port=port, workers=1)


def pair(**given: Any) -> Shell:
    """A job of two nodes, which train."""
    shell = Shell(rules(1, 2, last_call_timeout=0.0, lost_after=1.0), **given)
    shell.come("a", "b")
    assert shell.last("a").phase is PlanPhase.TRAINING
    return shell


class TestOrder:
    def test_nothing_of_a_plan_is_handed_out_before_it_is_written(self) -> None:
        shell = pair()
        shell.arrive(Disconnected(key_of("b")))
        shell.arrive(Requested("1", SCALE))
        shell.now += 1.1
        lines = len(shell.lines)
        writes = shell.driver.turn(shell.now)
        assert writes == Writes(shell.driver.coordinator.plan)
        assert [member.node_id for member in shell.driver.coordinator.plan.members] == ["a"]
        assert shell.driver.stored == shell.stored[-1], "the plan that is handed out is not stored yet"
        assert shell.driver.turn(shell.now) == writes, "until it is written the same plan is handed out"
        assert len(shell.lines) == lines
        shell.driver.written(shell.now)
        assert shell.driver.stored == writes.plan
        assert shell.driver.turn(shell.now) == Writes(None, True, {"1": Answer()})

    def test_lines_about_a_plan_are_logged_once_it_is_written(self) -> None:
        shell = pair()
        before = shell.driver.coordinator._lines = ["a line"]
        assert shell.lines == []
        shell.driver.rewrite()
        shell.run()
        assert shell.lines == before
        shell.driver.rewrite()
        shell.run()
        assert shell.lines == before

    def test_a_plan_that_is_kept_with_the_assignments_comes_out_with_them(self) -> None:
        shell = pair(kept_together=True)
        assert [writes.send for writes in shell.turns if writes.plan is not None] != []
        assert all(writes.send for writes in shell.turns if writes.plan is not None)
        # Answers come out once it is stored.
        shell.arrive(Requested("1", SCALE))
        writes = shell.driver.turn(shell.now)
        assert (writes.plan is not None, writes.send, dict(writes.answers)) == (True, True, {})
        shell.driver.written(shell.now)
        assert shell.driver.turn(shell.now).answers == {"1": Answer()}

    def test_what_may_not_be_stored_any_more_is_handed_out_again(self) -> None:
        shell = pair()
        assert shell.driver.turn(shell.now) == Writes()
        shell.driver.rewrite()
        assert shell.driver.turn(shell.now) == Writes(shell.stored[-1])
        shell.driver.written(shell.now)
        assert shell.driver.turn(shell.now).send
        together = pair(kept_together=True)
        together.driver.rewrite()
        assert together.driver.turn(together.now) == Writes(together.stored[-1], send=True)

    def test_it_wakes_for_what_is_due_first(self) -> None:
        shell = pair()
        shell.wait(5)
        assert shell.driver.wake_at() is None, "a job that trains undisturbed has no deadline"
        shell.lose("b")
        due = shell.driver.wake_at()
        assert due is not None
        assert due <= shell.now + 1.01
        shell.wait(1.2)
        assert [member.node_id for member in shell.stored[-1].members] == ["a"]


class TestPlanThatCannotBeStored:
    def broken(self) -> Shell:
        """A job whose node b is lost, which cannot be stored."""
        shell = pair()
        shell.problem = FULL
        shell.lose("b")
        shell.wait(1.2)
        return shell

    def test_the_stored_plan_holds_and_says_why(self) -> None:
        shell = self.broken()
        assert shell.driver.write_error == FULL
        assert shell.driver.stored == shell.stored[-1]
        assert shell.driver.stored != shell.driver.coordinator.plan
        assignment = shell.driver.assignment(key_of("a"), shell.now)
        assert assignment is not None
        assert assignment.key == RoundKey(5, 1)
        newcomer = shell.driver.assignment(key_of("c"), shell.now)
        assert newcomer is not None
        assert newcomer.waiting is not None
        assert FULL in render(newcomer.waiting.reasons)

    def test_it_is_tried_again_and_nothing_is_decided_until_then(self) -> None:
        shell = self.broken()
        tried = sum(writes.plan is not None for writes in shell.turns)
        at = shell.driver.wake_at()
        assert at is not None
        assert shell.now < at <= shell.now + STORE_RETRY
        shell.come("c")
        assert sum(writes.plan is not None for writes in shell.turns) == tried
        assert shell.driver.wake_at() == at, "what arrives does not put the attempt off"
        shell.problem = ""
        shell.wait(STORE_RETRY)
        assert shell.driver.write_error == ""
        assert [member.node_id for member in shell.stored[-1].members] == ["a", "c"]
        assert shell.last("a").key == shell.stored[-1].key

    def test_only_a_change_of_the_outcome_is_news(self) -> None:
        shell = pair()
        shell.driver.rewrite()
        shell.driver.turn(shell.now)
        found = [shell.driver.written(shell.now, problem) for problem in ("", FULL, FULL, "", "")]
        assert found == [False, True, False, True, False]

    def test_a_request_is_refused_and_one_that_was_taken_before_waits(self) -> None:
        shell = pair()
        shell.arrive(Requested("before", SCALE))
        shell.problem = FULL
        shell.run()
        assert shell.arrive(Requested("after", SCALE)) is False
        shell.run()
        assert shell.answers == {"after": Answer(refusal=f"{FULL}; nothing is changed until it can")}
        shell.problem = ""
        shell.wait(STORE_RETRY)
        assert shell.answers["before"] == Answer()
        assert shell.driver.stored.desired is not None


class CountedRequests:
    """Counts the requests that a coordinator takes."""

    def __init__(self, shell: Shell) -> None:
        self.taken: list[OperatorRequest] = []
        self._real = shell.driver.coordinator.request
        shell.driver.coordinator.request = self._take  # type: ignore[method-assign]

    def _take(self, request: OperatorRequest, now: float) -> Any:
        self.taken.append(request)
        return self._real(request, now)


class TestRequests:
    @pytest.mark.parametrize("kept_together", [False, True])
    def test_one_that_is_read_again_before_its_answer_is_taken_once(self, kept_together: bool) -> None:
        """A store is read anew when a watch of it breaks off: each request is read again."""
        shell = pair(kept_together=kept_together)
        counted = CountedRequests(shell)
        assert shell.arrive(Requested("1", SCALE)) is True
        assert shell.arrive(Requested("1", SCALE)) is False
        for _ in range(2):
            # The write fails, and the turn is repeated.
            assert shell.driver.turn(shell.now).plan is not None
            assert shell.arrive(Requested("1", SCALE)) is False
            shell.driver.rewrite()
        shell.run()
        assert counted.taken == [SCALE]
        assert shell.answers == {"1": Answer()}

    def test_an_answer_is_repeated_until_it_was_given(self) -> None:
        shell = pair()
        shell.arrive(Requested("1", OperatorRequest(Action.DRAIN, node="nobody")))
        first, second = shell.driver.turn(shell.now), shell.driver.turn(shell.now)
        assert first.answers == second.answers != {}
        assert "nobody" in first.answers["1"].refusal
        shell.driver.answered("1")
        assert shell.driver.turn(shell.now).answers == {}

    def test_two_requests_have_an_answer_each(self) -> None:
        shell = pair()
        counted = CountedRequests(shell)
        assert shell.arrive(Requested("1", SCALE))
        assert not shell.arrive(Requested("2", OperatorRequest(Action.DRAIN, node="nobody")))
        shell.run()
        assert shell.answers.keys() == {"1", "2"}
        assert (shell.answers["1"].refusal, bool(shell.answers["2"].refusal)) == ("", True)
        assert len(counted.taken) == 2

    def test_a_refusal_does_not_wait_for_a_plan_that_is_to_be_stored(self) -> None:
        shell = pair(kept_together=True)
        shell.arrive(Requested("1", SCALE))
        shell.arrive(Requested("2", OperatorRequest(Action.DRAIN, node="nobody")))
        writes = shell.driver.turn(shell.now)
        assert writes.plan is not None
        assert writes.answers.keys() == {"2"}


class TestTheEnd:
    def test_members_do_not_know_the_end_until_they_have_left(self) -> None:
        shell = pair()
        assert (set(shell.driver.unaware), shell.driver.has_absent) == (set(), False)
        shell.finish("a", "b")
        assert shell.driver.is_over
        assert shell.driver.unaware == {key_of("a"), key_of("b")}
        assert not shell.driver.has_absent, "both are connected"
        assert shell.driver.wake_at() is None
        shell.report("a", phase=NodePhase.LEFT)
        assert shell.driver.unaware == {key_of("b")}
        shell.lose("b")
        assert shell.driver.has_absent
        shell.report("b", phase=NodePhase.LEFT)
        assert (set(shell.driver.unaware), shell.driver.has_absent) == (set(), False)

    def test_one_that_left_before_the_end_knows_what_it_has_to(self) -> None:
        shell = pair()
        shell.finish("a")
        shell.report("a", phase=NodePhase.LEFT)
        shell.lose("a")
        shell.finish("b")
        assert shell.driver.is_over
        assert shell.driver.unaware == {key_of("b")}
        assert not shell.driver.has_absent

    def test_nodes_that_have_all_left_know_it(self) -> None:
        shell = pair()
        for name in ("a", "b"):
            shell.report(name, phase=NodePhase.LEFT)
            shell.lose(name)
        shell.wait(2)
        assert shell.driver.is_over
        assert not shell.driver.unaware

    def test_a_process_that_has_its_id_back_and_leaves_has_nothing_to_learn(self) -> None:
        shell = pair()
        shell.driver.displace(key_of("c"))
        shell.come("c")
        shell.report("c", phase=NodePhase.LEFT)
        shell.lose("c")
        shell.report("b", saves=True)
        shell.finish("a", "b")
        assert shell.driver.unaware == {key_of("a"), key_of("b")}

    def test_a_lost_spare_may_come_back_for_the_end(self) -> None:
        shell = pair()
        shell.come("c")
        shell.lose("c")
        shell.wait(0.5)
        shell.finish("a", "b")
        assert key_of("c") in shell.driver.unaware
        assert shell.driver.has_absent

    @pytest.mark.parametrize("after_the_end", [False, True])
    def test_a_process_whose_id_has_another_may_come_to_learn_the_end(self, after_the_end: bool) -> None:
        shell = pair()
        other = NodeKey("a", "0")
        if not after_the_end:
            shell.driver.displace(other)
        shell.finish("a", "b")
        if after_the_end:
            assert not shell.driver.has_absent
            shell.driver.displace(other)
        assert other in shell.driver.unaware
        assert shell.driver.has_absent

    def test_the_end_is_not_known_before_it_is_stored(self) -> None:
        shell = pair()
        shell.problem = FULL
        shell.finish("a", "b")
        assert not shell.driver.is_over
        assert not shell.driver.unaware
        shell.problem = ""
        shell.wait(STORE_RETRY)
        assert shell.driver.is_over
        assert shell.driver.unaware == {key_of("a"), key_of("b")}

    def test_a_driver_that_begins_with_the_end_of_a_job_knows_who_does_not_know_it(self) -> None:
        shell = pair()
        shell.finish("a", "b")
        ended = Shell(shell.driver.coordinator.rules, plan=msgspec.structs.replace(shell.stored[-1], epoch=4))
        assert ended.driver.is_over
        assert ended.driver.wake_at() is None
        unfinished = {member.key for member in shell.stored[-1].members if not member.done}
        assert ended.driver.unaware == unfinished
        assert ended.driver.has_absent == bool(unfinished)


class TestPauses:
    def test_the_time_of_a_pause_counts_for_no_deadline(self) -> None:
        shell = pair()
        shell.lose("b")
        shell.now += 300
        assert shell.arrive(Paused(300)) is False
        shell.run()
        assert len(shell.stored[-1].members) == 2
        shell.wait(1.1)
        assert len(shell.stored[-1].members) == 1

    @pytest.mark.parametrize(("cut_off", "wait"), [(False, 1.1), (True, RETURN_GRACE + 0.1)])
    def test_nodes_that_may_have_given_up_the_coordinator_have_time_to_return(self, cut_off: bool, wait: float) -> None:
        shell = pair()
        shell.arrive(Paused(0.0, cut_off=cut_off))
        shell.lose("b")
        shell.wait(wait - 0.2)
        assert len(shell.stored[-1].members) == 2
        shell.wait(0.4)
        assert len(shell.stored[-1].members) == 1


def fail(*_: object) -> Any:
    raise ZeroDivisionError("planted")


class TestInternalErrors:
    def test_the_last_plan_stays_and_another_decision_is_tried(self) -> None:
        shell = pair()
        before = shell.driver.stored
        with patch.object(coordinators, "decide", fail):
            shell.lose("b")
            shell.wait(2 * ERROR_RETRY + 0.5)
            assert shell.driver.stored == before
            assert len(shell.errors) == 1, "the same line is not repeated"
            assert "ZeroDivisionError('planted')" in shell.errors[0]
            at = shell.driver.wake_at()
            assert at is not None
            assert shell.now < at <= shell.now + ERROR_RETRY
            shell.come("c")
            waiting = shell.last("c").waiting
            assert waiting is not None
            assert "ZeroDivisionError" in render(waiting.reasons)
        shell.wait(ERROR_RETRY)
        assert [member.node_id for member in shell.stored[-1].members] == ["a", "c"]
        assert shell.driver.coordinator.problem == ""
        assert not any("ZeroDivisionError" in line for line in shell.lines), (
            "lines about errors have a log of their own"
        )

    def test_the_same_error_is_logged_again_after_a_while_without_one(self) -> None:
        shell = pair()
        for _ in range(2):
            with patch.object(coordinators, "decide", fail):
                shell.report("a", known_round=RoundKey())
            shell.report("a", known_round=RoundKey(5, 1))
            shell.now += ERROR_MEMORY + 0.1
        assert len(shell.errors) == 2

    def test_a_request_of_the_decision_that_failed_is_refused(self) -> None:
        shell = pair()
        assert shell.arrive(Requested("1", SCALE))
        with patch.object(coordinators, "decide", fail):
            shell.run()
        assert "ZeroDivisionError" in shell.answers["1"].refusal
        shell.wait(ERROR_RETRY + 0.1)
        assert shell.driver.stored.desired is None, "what was refused is not done later"

    def test_a_request_that_cannot_be_taken_is_refused(self) -> None:
        shell = pair()
        with patch.object(Coordinator, "request", fail):
            assert not shell.arrive(Requested("1", SCALE))
        shell.run()
        assert "ZeroDivisionError" in shell.answers["1"].refusal

    def test_a_report_that_cannot_be_taken_is_tried_again(self) -> None:
        shell = pair()
        report = new_report("c", 3000)
        with patch.object(Coordinator, "receive", fail):
            assert shell.arrive(report) is True
            shell.run()
        assert key_of("c") not in shell.driver.coordinator.nodes
        shell.run()
        assert key_of("c") in shell.driver.coordinator.nodes

    def test_but_not_once_its_node_is_gone(self) -> None:
        shell = pair()
        with patch.object(Coordinator, "receive", fail):
            shell.arrive(new_report("c", 3000))
        shell.lose("c")
        shell.wait(10)
        assert key_of("c") not in shell.driver.coordinator.nodes

    def test_an_assignment_that_cannot_be_made_is_sent_later(self) -> None:
        shell = pair()
        with patch.object(Coordinator, "assignment", fail):
            assert shell.driver.assignment(key_of("a"), shell.now) is None
        assert len(shell.errors) == 1
        at = shell.driver.wake_at()
        assert at is not None
        assert at <= shell.now + ERROR_RETRY
        shell.now = at
        assert shell.driver.turn(shell.now).send


class TestLaterCoordinator:
    """A node obeys a later coordinator, whose plan is not stored here."""

    def superseded(self, *, begins: bool) -> Shell:
        shell = pair(begins=begins)
        shell.arrive(Requested("1", SCALE))
        shell.arrive(msgspec.structs.replace(shell.reports["a"], epoch=7))
        return shell

    def test_a_driver_that_cannot_begin_again_decides_no_more(self) -> None:
        shell = self.superseded(begins=False)
        assert shell.driver.superseded
        assert shell.driver.turn(shell.now).plan is None
        shell.come("c")
        assert [plan.epoch for plan in shell.stored] == [5] * len(shell.stored)

    def test_one_that_can_has_a_coordinator_with_a_later_epoch(self) -> None:
        shell = self.superseded(begins=True)
        shell.connected.clear()
        shell.run()
        assert not shell.driver.superseded
        assert shell.driver.stored.epoch == 9
        assert shell.answers == {"1": Answer(refusal=JUST_BEGUN)}
        # The nodes that were connected are known to it, with what they reported last.
        assert shell.driver.coordinator.nodes.keys() == {key_of("a"), key_of("b")}
        assert shell.driver.stored.key == RoundKey(5, 1)
