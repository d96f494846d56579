"""When the commands of hooks run and end, with commands that end when the test says so, on a virtual clock."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from support.harness import open_descriptors
from support.scripted_agent import rank_assignment
from support.virtual_loop import run_virtually

from dlrover_run.agent.result import JobResult, NodeRefused
from dlrover_run.agent.shutdown import ShutdownRequest
from dlrover_run.cli import parse
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.round import RankAssignment
from dlrover_run.events.records import NO_EVENTS
from dlrover_run.exit_reasons import ExitReason
from dlrover_run.features.hooks import node
from dlrover_run.features.hooks.settings import HookSettings
from dlrover_run.features.node_check.node import CheckEvents, NodeChecks
from dlrover_run.processes.user_command import UserCommand
from dlrover_run.words.reasons import Code
from dlrover_run.workers.feature import WorkersFeature

SHUTDOWN_TIMEOUT = 30.0
RANKS = rank_assignment()
STOPPED = Assignment(phase=PlanPhase.FAILED, reasons=(Code.STOPPED_ON_REQUEST(by="root"),))
FAILED = Assignment(phase=PlanPhase.FAILED)
RESULT = JobResult(exit_code=1, exit_reason=ExitReason.WORKER_FAILED, reason="because")


class Command:
    """A command that runs until its limit, or until `end`."""

    def __init__(
        self, name: str, words: tuple[str, ...], environment: Mapping[str, str], seconds: float, node: Node
    ) -> None:
        self.pid = 1
        self.problem = ""
        self.name = words[0]
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._limit = self._loop.call_later(seconds, self.end, "late")
        node.commands.append(self)

    def limit(self, seconds: float) -> None:
        if self._loop.time() + seconds < self._limit.when():
            self._limit.cancel()
            self._limit = self._loop.call_later(seconds, self.end, "late")

    def end(self, problem: str = "") -> None:
        self.problem = problem
        self._over.set()

    def stop(self) -> None:
        self._limit.cancel()

    async def ended(self) -> None:
        await self._over.wait()


class Node:
    """A node with hooks, of which each event has two commands."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.lines: list[str] = []
        self.wakes = 0
        self.is_over = False
        self.state = SimpleNamespace(host="a", node_id="a", round=RANKS.key)
        self.shutdown = ShutdownRequest(
            parse([f"--shutdown-timeout={SHUTDOWN_TIMEOUT}", __file__], {}),
            lambda *_: None,
            lambda *_: None,
            lambda: None,
        )
        events = ("before-round", "after-failure", "at-end")
        settings = HookSettings({event: ((f"{event} 1",), (f"{event} 2",)) for event in events}, timeout=100.0)
        services: Any = SimpleNamespace(
            job=SimpleNamespace(
                settings_of=lambda name, kind: settings, display_name="j", shutdown_timeout=SHUTDOWN_TIMEOUT
            ),
            run_dir=SimpleNamespace(keep=False, path=None),
            console=SimpleNamespace(info=self.lines.append),
            orphans=SimpleNamespace(kill_session=lambda pid: None),
            node_state=self.state,
            shutdown=self.shutdown,
            start=lambda work: asyncio.get_running_loop().create_task(work),
            wake=self._note_wake,
        )
        self.hooks = node.Hooks(services, SimpleNamespace())  # type: ignore[arg-type]

    async def before_round(self, ranks: RankAssignment) -> None:
        """A round of these ranks begins, unless the job is over or the node has other ranks meanwhile."""
        await self.hooks.before_round(ranks, lambda: not self.is_over and self.state.round == ranks.key)

    def end_job(self, assignment: Assignment) -> None:
        """The job is over."""
        self.is_over = True
        self.hooks.follow(assignment, shutting_down=True)

    def _note_wake(self) -> None:
        self.wakes += 1

    def fail(self, ranks: RankAssignment = RANKS) -> None:
        """A worker of this node fails."""
        failure: Any = SimpleNamespace(rank=0, exit_text="exited with code 1", exit_status=1)
        report: Any = SimpleNamespace(failure=failure, ranks=ranks)
        self.hooks.add_to_report(report)

    async def begun(self, count: int) -> Command:
        """The command that runs when that many have begun."""
        async with asyncio.timeout(1):
            while len(self.commands) < count:
                await asyncio.sleep(0.01)
        return self.commands[-1]

    @property
    def ran(self) -> list[str]:
        return [command.name for command in self.commands]


Scene = Callable[[Node], Awaitable[None]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scene], None]:
    def play(scene: Scene) -> None:
        async def run() -> None:
            one = Node()
            monkeypatch.setattr(node, "UserCommand", lambda *told: Command(*told, one))
            await scene(one)

        run_virtually(run())

    return play


def now() -> float:
    return asyncio.get_running_loop().time()


def test_an_error_of_the_node_that_cancels_a_command_after_a_failure_leaves_the_end_of_the_job_to_go_on(
    play: Callable[[Scene], None],
) -> None:
    async def scene(one: Node) -> None:
        one.fail()
        await one.begun(1)
        # As the group of the agent's tasks does on an error.
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await one.hooks.close(RESULT)
        assert one.ran == ["after-failure 1", "at-end 1", "at-end 2"]

    play(scene)


def test_the_commands_after_a_failure_run_also_if_its_report_has_made_the_node_leave_before_they_began(
    play: Callable[[Scene], None],
) -> None:
    async def scene(one: Node) -> None:
        one.fail()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        end = asyncio.ensure_future(one.hooks.close(RESULT))
        for number in range(1, 5):
            (await one.begun(number)).end()
        await end
        assert one.ran == ["after-failure 1", "after-failure 2", "at-end 1", "at-end 2"]

    play(scene)


@pytest.mark.parametrize("end", [STOPPED, FAILED])
def test_a_command_before_a_round_does_not_hold_up_the_end_of_the_job_and_is_no_reason_of_it(
    play: Callable[[Scene], None], end: Assignment
) -> None:
    async def scene(one: Node) -> None:
        start = asyncio.ensure_future(one.before_round(RANKS))
        await one.begun(1)
        one.end_job(end)
        one.end_job(end)
        await start
        assert now() == pytest.approx(SHUTDOWN_TIMEOUT, abs=1)
        assert one.ran == ["before-round 1"]

    play(scene)


def test_a_command_that_fails_before_a_round_which_is_not_wanted_any_more_does_not_end_the_node(
    play: Callable[[Scene], None],
) -> None:
    async def scene(one: Node) -> None:
        start = asyncio.ensure_future(one.before_round(RANKS))
        command = await one.begun(1)
        one.state.round = rank_assignment(2).key
        command.end("broken")
        await start
        again = asyncio.ensure_future(one.before_round(rank_assignment(2)))
        (await one.begun(2)).end("broken")
        with pytest.raises(NodeRefused, match="out of round 2: broken"):
            await again

    play(scene)


@pytest.mark.parametrize(("end", "seconds"), [(STOPPED, SHUTDOWN_TIMEOUT), (FAILED, 200.0)])
def test_commands_after_a_failure_have_the_time_of_a_stop_together_and_their_own_at_another_end(
    play: Callable[[Scene], None], end: Assignment, seconds: float
) -> None:
    async def scene(one: Node) -> None:
        one.fail()
        await one.begun(1)
        one.end_job(end)
        await one.before_round(RANKS)
        assert now() == pytest.approx(seconds, abs=1)
        last = "no time was left for it" if end is STOPPED else "late"
        assert one.lines == [f"warning: the hook after-failure has failed: {text}" for text in ("late", last)]

    play(scene)


def test_commands_at_the_end_have_what_is_left_of_the_time_of_a_signal_together(play: Callable[[Scene], None]) -> None:
    async def scene(one: Node) -> None:
        assert one.shutdown.left is None
        one.shutdown.drain()
        # The workers.
        await asyncio.sleep(20)
        assert one.shutdown.left == 10.0
        await one.hooks.close(RESULT)
        assert now() == SHUTDOWN_TIMEOUT
        assert one.ran == ["at-end 1"]
        assert one.lines == [
            f"warning: the hook at-end has failed: {text}" for text in ("late", "no time was left for it")
        ]

    play(scene)


def test_a_round_in_which_workers_are_replaced_has_its_commands_once(play: Callable[[Scene], None]) -> None:
    async def scene(one: Node) -> None:
        for ranks, count in ((RANKS, 2), (RANKS, 2), (rank_assignment(2), 4)):
            one.state.round = ranks.key
            start = asyncio.ensure_future(one.before_round(ranks))
            for number in range(len(one.commands) + 1, count + 1):
                (await one.begun(number)).end()
            await start
            assert len(one.commands) == count

    play(scene)


def test_a_health_check_waits_for_the_commands_after_a_failure(play: Callable[[Scene], None]) -> None:
    async def scene(one: Node) -> None:
        updates: list[object] = []
        one.state.round = None
        checks = object.__new__(NodeChecks)
        services: Any = SimpleNamespace(
            node_state=one.state,
            shutdown=SimpleNamespace(requested=True),
            features_of=lambda kind: [one.hooks, checks],
        )
        tasks: Any = SimpleNamespace(idle=True)
        WorkersFeature.__init__(checks, services, tasks)
        checks._events = CheckEvents(NO_EVENTS)
        runner: Any = SimpleNamespace(update=lambda *told: updates.append(told))
        checks._runner = runner
        one.fail()
        for number in (1, 2):
            command = await one.begun(number)
            checks.follow(Assignment(), shutting_down=False)
            assert not updates
            command.end()
        await one.before_round(RANKS)
        await asyncio.sleep(0)
        assert one.wakes == 1
        checks.follow(Assignment(), shutting_down=False)
        assert len(updates) == 1

    play(scene)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_cause_that_no_variable_can_have_is_passed_on_as_far_as_it_can(
    play: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    async def scene(one: Node) -> None:
        monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
        monkeypatch.setattr(os, "fsencode", lambda text: text.encode(encoding, "surrogateescape"))
        found = one.hooks._environment("at-end", {"CAUSE": "\u6b7b \0"})["DLROVER_CAUSE"]
        assert found == ("? ?" if encoding == "ascii" else "\u6b7b ?")

    play(scene)


def test_a_command_that_cannot_be_started_or_watched_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def scene() -> None:
        before = open_descriptors()
        with pytest.raises(OSError, match="null byte"):
            UserCommand("a", (sys.executable,), {"A": "\0"}, 1.0)
        monkeypatch.setattr("dlrover_run.processes.event_loop.watch_child", refuse)
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            UserCommand("a", (sys.executable, "-c", ""), {}, 1.0)
        assert not open_descriptors() - before

    asyncio.run(scene())


def test_an_internal_error_after_a_failure_is_a_warning_with_its_place_and_ends_no_node(
    play: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ZeroDivisionError("planted")

    async def scene(one: Node) -> None:
        monkeypatch.setattr(one.hooks, "_environment", refuse)
        one.fail()
        # What is begun here ends the node if it raises.
        await one.hooks._after_failure  # type: ignore[misc]
        line, *places = one.lines
        clause = "internal error: ZeroDivisionError('planted'); please report it"
        assert line == f"warning: the hook after-failure has failed: {clause}"
        assert places[-1].startswith("debug: ")
        assert " in refuse: " in places[-1]
        assert one.wakes == 1

    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    play(scene)
