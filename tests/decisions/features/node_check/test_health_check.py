"""The part of an agent in a node check, with assignments from the test; the check processes here need no torch."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from support.harness import WAIT, WORKERS
from support.policy_parts import check_part, check_report, fold, with_part
from support.scripted_agent import FINISHED, AgentRun, ScriptedAgent, gathering, rank_assignment, training

from dlrover_run import exit_codes
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.node_check import node as node_checks
from dlrover_run.features.node_check.decision.model import (
    CheckKey,
    CheckTask,
    ComputeResult,
    DeviceSpeed,
    HealthStatus,
    LinkEnd,
    LinkResult,
    LinkResults,
    NodeCheckAssignment,
    NodeHealth,
)
from dlrover_run.features.node_check.node import check_processes, check_runner
from dlrover_run.features.node_check.node import machine as health
from dlrover_run.features.node_check.node.check_runner import NodeCheckRunner
from dlrover_run.features.node_check.node.check_workers import find_slow, link_requests
from dlrover_run.features.node_check.node.machine import NodeProblem
from dlrover_run.features.node_check.rules import CHECK_ALWAYS, CHECK_NEVER, CHECK_ONCE, NodeCheckRules
from dlrover_run.processes.process import ProcessSpec, spawn
from dlrover_run.rendezvous import kinds
from dlrover_run.spec import Entrypoint, JobSpec
from dlrover_run.workers.template_client import Template

WAITING, RUNNING, SUCCEEDED, FAILED = NodePhase.WAITING, NodePhase.RUNNING, NodePhase.SUCCEEDED, NodePhase.FAILED

SELF, PEER = LinkEnd(2, "10.0.0.2", 1111, 1), LinkEnd(5, "10.0.0.5", 2222, 3)

LONG = 240.0
"""Timeout of a task in seconds: a quarter of it is more than a test ever waits."""


def key(number: int, round: int = 0) -> CheckKey:
    return CheckKey(1, number, round)


def task(
    number: int = 1, *links: tuple[LinkEnd, ...], compute: bool = False, timeout: float = LONG, round: int = 0
) -> Assignment:
    """Return the assignment of a task to this node, the third of the check."""
    given = CheckTask(key=key(number, round), node=2, compute=compute, links=links, timeout=timeout)
    return Assignment(epoch=1, parts=(NodeCheckAssignment(check_task=given),))


def has_computed(number: int = 0) -> Callable[[NodeReport], bool]:
    """Return a condition: a report has the result of computing in that task; 0 is a computation without a task."""
    wanted = key(number) if number else CheckKey()
    return lambda status: (
        check_report(status).compute_result is not None and check_report(status).compute_result.key == wanted
    )


def has_linked(number: int, round: int = 0) -> Callable[[NodeReport], bool]:
    return lambda status: (
        check_report(status).link_result is not None and check_report(status).link_result.key == key(number, round)
    )


@dataclass
class Workspace:
    """A directory in which an agent runs; its check processes do as `behave` sets, and note the orders they receive."""

    path: Path

    def agent(self, shell: str = "exit 0", check: int = CHECK_ONCE, workers: int = 1, **spec: Any) -> ScriptedAgent:
        rules = JobRules(**fold(NodeCheckRules, {"check": check, **spec.pop("rules", {})}))
        return ScriptedAgent(self.path, shell, spec={"rules": rules, "workers_per_node": workers, **spec})

    def behave(self, *lines: str) -> None:
        (self.path / "behave").write_text("".join(f"{line}\n" for line in lines))

    @property
    def orders(self) -> list[dict[str, Any]]:
        noted = self.path / "orders"
        return [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []

    def orders_to(self, what: str) -> list[dict[str, Any]]:
        return [order for order in self.orders if order["do"] == what]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    # Imports are not tested here, and importing torch takes long.
    monkeypatch.setattr(check_processes, "PRELOAD", ())
    monkeypatch.setattr(node_checks, "NodeCheckRunner", partial(NodeCheckRunner, folder=str(WORKERS / "fake_check")))
    return Workspace(tmp_path)


def last(agent_run: AgentRun, what: str) -> Any:
    """Return the last reported `compute_result` or `link_result`."""
    reports = [getattr(check_report(status), what) for status in agent_run.statuses]
    return [report for report in reports if report is not None][-1]


def dismissed(found: HealthStatus, leaves: bool = True) -> NodeHealth:
    reason = "its links with a and b failed"
    return NodeHealth(node_id="n", incarnation="i", host="h", status=found, reason=reason, dismissed=leaves)


BLANK = NodeReport(node_id="n", incarnation="i", host="h", address="a", port=1, workers=1)


class TestComputing:
    """What a node does before it has a task."""

    def test_it_computes_by_itself_and_reports_each_device(self, workspace: Workspace) -> None:
        agent_run = workspace.agent(workers=2).on(has_computed(), FINISHED).run()
        devices = (DeviceSpeed(0, "fake", 1.0), DeviceSpeed(1, "fake", 2.0))
        assert last(agent_run, "compute_result") == ComputeResult(CheckKey(), devices)
        assert [order["seconds"] for order in workspace.orders] == [check_runner.COMPUTE_SECONDS] * 2
        assert len({check_report(status).check_port for status in agent_run.statuses if status.phase is WAITING}) == 1

    def test_of_many_devices_the_slowest_are_reported(
        self, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(check_runner, "MAX_DEVICES", 2)
        agent_run = workspace.agent(workers=3).on(has_computed(), FINISHED).run()
        assert [device.tflops for device in last(agent_run, "compute_result").devices] == [1.0, 2.0]

    def test_no_node_computes_without_a_check(self, workspace: Workspace) -> None:
        agent_run = (
            workspace.agent(check=CHECK_NEVER).on(WAITING, training(rank_assignment())).on(SUCCEEDED, FINISHED).run()
        )
        assert workspace.orders == []
        assert {check_report(status).check_port for status in agent_run.statuses} == {0}

    def test_static_ranks_of_several_nodes_are_not_checked(self, workspace: Workspace) -> None:
        agent = workspace.agent(rendezvous=kinds.Static(("node0", 1)), rules={"max_nodes": 2}).on(
            WAITING, training(rank_assignment(), 1)
        )
        agent.on(SUCCEEDED, FINISHED).run()
        assert workspace.orders == []

    def test_a_process_that_is_killed_is_this_nodes_problem(self, workspace: Workspace) -> None:
        workspace.behave("1 compute die 9")
        agent_run = workspace.agent(workers=2).on(has_computed(), FINISHED).run()
        problem = "the check process of local rank 1 was killed by SIGKILL: what it said last"
        assert last(agent_run, "compute_result") == ComputeResult(CheckKey(), problem=problem)

    def test_a_process_that_hangs_is_this_nodes_problem(self, workspace: Workspace) -> None:
        workspace.behave("0 compute hang")
        agent_run = workspace.agent(rules={"check_timeout": 3.0}).on(has_computed(), FINISHED).run()
        assert "the check process of local rank 0 gave no answer in" in last(agent_run, "compute_result").problem

    def test_a_wrong_result_is_reported_as_such_and_with_its_rank(self, workspace: Workspace) -> None:
        workspace.behave("1 compute problem wrong by 2e3")
        agent_run = workspace.agent(workers=2).on(has_computed(), FINISHED).run()
        computed = last(agent_run, "compute_result")
        assert computed == ComputeResult(CheckKey(), (DeviceSpeed(0, "fake", 1.0),), "local rank 1: wrong by 2e3", True)

    def test_a_nuisance_is_reported_and_no_problem(self, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
        found = (NodeProblem("the limit on files is 64"),)
        monkeypatch.setattr(health, "find_node_problems", lambda *args: found)
        agent_run = workspace.agent().on(has_computed(), FINISHED).run()
        assert last(agent_run, "compute_result").problem == ""
        assert agent_run.output == "dlrover-run: warning: the limit on files is 64\n"

    def test_a_look_that_fails_is_reported_in_one_line_and_no_problem(
        self, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: object) -> None:
            raise AttributeError("module 'pynvml' has no attribute 'nvmlDeviceGetRemappedRows'")

        monkeypatch.setattr(health, "find_node_problems", fail)
        agent_run = workspace.agent().on(has_computed(), FINISHED).run()
        assert last(agent_run, "compute_result").problem == ""
        assert agent_run.output == (
            "dlrover-run: warning: the look at this machine failed: "
            "AttributeError: module 'pynvml' has no attribute 'nvmlDeviceGetRemappedRows'\n"
        )

    @pytest.mark.parametrize("each", [False, True])
    def test_workers_that_were_counted_as_gpus_need_one_each(
        self, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, each: bool
    ) -> None:
        def look(workers: int, log_dir: object, environ: object, gpu_each: bool) -> tuple[NodeProblem, ...]:
            return (NodeProblem(f"asked for {workers} workers", severe=gpu_each),)

        monkeypatch.setattr(health, "find_node_problems", look)
        agent_run = workspace.agent(workers=2, gpu_each=each).on(has_computed(), FINISHED).run()
        assert ("asked for 2 workers" in last(agent_run, "compute_result").problem) is each

    def test_what_is_severe_comes_in_place_of_a_speed(
        self, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = (NodeProblem("GPU 3 has 12 errors", severe=True), NodeProblem("more", severe=True))
        monkeypatch.setattr(health, "find_node_problems", lambda *args: found)
        agent_run = workspace.agent().on(has_computed(), FINISHED).run()
        assert last(agent_run, "compute_result") == ComputeResult(
            CheckKey(), problem="it was not even tried: GPU 3 has 12 errors"
        )
        assert workspace.orders == []

    def test_a_device_that_is_slow_again_is_named_once(self, workspace: Workspace) -> None:
        workspace.behave(*["2 compute speed 0.25"] * 4)
        agent = workspace.agent(workers=3).on(has_computed(), task(1, compute=True))
        agent_run = agent.on(has_computed(1), FINISHED).run()
        assert last(agent_run, "compute_result").devices[0] == DeviceSpeed(2, "fake", 0.25)
        assert len(workspace.orders_to("compute")) == 3 * 4
        words = "local rank 2 (fake) computes at 0.25 TFLOP/s where the others of this node reach 1 TFLOP/s"
        assert agent_run.output == f"dlrover-run: warning: {words}\n"

    def test_a_device_that_is_slow_once_is_tried_again_without_a_message(self, workspace: Workspace) -> None:
        workspace.behave("1 compute speed 0.25")
        agent_run = workspace.agent(workers=2).on(has_computed(), FINISHED).run()
        devices = (DeviceSpeed(0, "fake", 1.0), DeviceSpeed(1, "fake", 2.0))
        assert last(agent_run, "compute_result") == ComputeResult(CheckKey(), devices)
        assert len(workspace.orders_to("compute")) == 4
        assert agent_run.output == ""

    def test_ranks_that_share_a_cpu_are_not_compared(self) -> None:
        speeds = [DeviceSpeed(rank, "cpu", tflops) for rank, tflops in enumerate((0.01, 1.0, 1.0))]
        assert find_slow(speeds, 2.0) == []
        assert find_slow([DeviceSpeed(rank, "H200", tflops) for rank, tflops in enumerate((1.0, 2.0, 2.0))], 2.0) == []
        assert find_slow([], 2.0) == []

    def test_without_torch_it_ends_with_one_line(self, workspace: Workspace) -> None:
        workspace.behave(f"0 compute problem {check_runner.NO_TORCH}")
        agent_run = workspace.agent(entrypoint=Entrypoint("script", "x.py", python=sys.executable)).run()
        assert agent_run.result.exit_code == exit_codes.BAD_COMMAND_LINE
        assert agent_run.result.error is not None
        assert agent_run.result.error.startswith(f"--network-check needs torch in {sys.executable}, which has none: ")
        assert "\n" not in agent_run.result.error

    def test_the_real_check_process_reports_it_with_the_same_text(
        self, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(node_checks, "NodeCheckRunner", NodeCheckRunner)
        (workspace.path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
        monkeypatch.setenv("PYTHONPATH", str(workspace.path))
        agent_run = workspace.agent().run()
        assert agent_run.result.exit_code == exit_codes.BAD_COMMAND_LINE
        assert "--network-check needs torch in" in str(agent_run.result.error)


class TestTasks:
    """What a node does when it has a task."""

    def test_the_order_of_the_ends_gives_ranks_and_the_host(self) -> None:
        name = {"do": "link", "name": "1/4/1/2-5", "address": "10.0.0.2", "port": 1111, "world": 4, "timeout": 6.0}
        own = link_requests(key(4, 1), (SELF, PEER), 2, 6.0)
        assert own == [{**name, "host": True, "rank": 0}]
        other = link_requests(key(4, 1), (SELF, PEER), 5, 6.0)
        assert other == [{**name, "host": False, "rank": rank} for rank in (1, 2, 3)]

    def test_a_link_within_a_node_has_its_own_ranks_alone(self) -> None:
        orders = link_requests(key(1), (PEER,), 5, 6.0)
        assert [(order["rank"], order["host"], order["world"]) for order in orders] == [
            (0, True, 3),
            (1, False, 3),
            (2, False, 3),
        ]
        assert orders[0]["name"] == "1/1/0/5-5"

    def test_a_link_of_nodes_with_one_gpu_works_and_is_explained_once(self, workspace: Workspace) -> None:
        workspace.behave("0 link shared fake GPU", "0 link shared fake GPU")
        links = ((SELF, PEER), (LinkEnd(1, "10.0.0.1", 1, 1), SELF))
        agent_run = workspace.agent().on(has_computed(), task(1, *links)).on(has_linked(1), FINISHED).run()
        assert last(agent_run, "link_result") == LinkResults(key(1), (LinkResult(5, 8.0), LinkResult(1, 8.0)))
        assert agent_run.output.count("this node and another one share one fake GPU: NCCL refuses that") == 1

    def test_links_are_tried_one_after_the_other_and_the_slowest_rank_counts(self, workspace: Workspace) -> None:
        own = msgspec.structs.replace(SELF, workers=2)
        wanted = task(1, (own, PEER), (LinkEnd(1, "10.0.0.1", 1, 1), own))
        agent_run = workspace.agent(workers=2).on(has_computed(), wanted).on(has_linked(1), FINISHED).run()
        assert last(agent_run, "link_result") == LinkResults(key(1), (LinkResult(5, 7.0), LinkResult(1, 7.0)))
        names = [order["name"] for order in workspace.orders_to("link") if order["local_rank"] == 0]
        assert names == ["1/1/0/2-5", "1/1/0/1-2"]
        assert len(workspace.orders_to("compute")) == 2, "it was not asked to compute again"
        assert len({order["pid"] for order in workspace.orders}) == 2, "the same processes did all of it"

    def test_a_task_is_carried_out_once_however_often_it_is_assigned(self, workspace: Workspace) -> None:
        first, second = task(1, (SELF, PEER)), task(1, (SELF, PEER), round=1)
        again = msgspec.structs.replace(first, epoch=2)
        agent = workspace.agent().on(has_computed(), first).on(has_linked(1), again)
        agent.on(lambda status: status.epoch == 2, msgspec.structs.replace(second, epoch=2))
        agent.on(has_linked(1, 1), FINISHED).run()
        assert [order["name"] for order in workspace.orders_to("link")] == ["1/1/0/2-5", "1/1/1/2-5"]

    def test_it_computes_again_when_asked_to_and_reports_for_which_task(self, workspace: Workspace) -> None:
        agent = workspace.agent().on(has_computed(), task(1, (SELF, PEER), compute=True)).on(has_computed(1))
        agent_run = agent.on(has_linked(1), FINISHED).run()
        assert [order["do"] for order in workspace.orders] == ["compute", "compute", "link"]
        assert last(agent_run, "compute_result").key == key(1)

    def test_a_link_fails_when_it_fails_for_any_rank(self, workspace: Workspace) -> None:
        workspace.behave("1 link problem connection refused")
        own = msgspec.structs.replace(SELF, workers=2)
        agent = workspace.agent(workers=2).on(has_computed(), task(1, (own, PEER)))
        agent_run = agent.on(has_linked(1), FINISHED).run()
        failed = LinkResult(5, problem="local rank 1: connection refused")
        assert last(agent_run, "link_result") == LinkResults(key(1), (failed,))

    @pytest.mark.parametrize(("number", "own"), [(9, True), (6, False)])
    def test_after_a_death_in_a_link_the_rest_is_not_tried_nor_reported_and_the_next_task_finds_other_processes(
        self, workspace: Workspace, number: int, own: bool
    ) -> None:
        """A library aborts (SIGABRT) when the other end of its connection has gone."""
        workspace.behave(f"0 link die {number}")
        other = LinkEnd(7, "10.0.0.7", 1, 1)
        agent = workspace.agent().on(has_computed(), task(1, (SELF, PEER), (SELF, other)))
        agent_run = agent.on(has_linked(1), task(1, (SELF, PEER), round=1)).on(has_linked(1, 1), FINISHED).run()
        first = next(
            check_report(status).link_result
            for status in agent_run.statuses
            if check_report(status).link_result is not None
        )
        words = {9: "SIGKILL", 6: "SIGABRT (abort)"}[number]
        problem = f"the check process of local rank 0 was killed by {words}: what it said last"
        assert first.problem == (problem if own else "")
        assert first.results == (LinkResult(5, problem=problem),)
        assert last(agent_run, "link_result") == LinkResults(key(1, 1), (LinkResult(5, 8.0),))

    def test_after_a_process_that_gave_up_in_a_link_the_next_is_tried_with_another(self, workspace: Workspace) -> None:
        workspace.behave("0 link end")
        other = LinkEnd(7, "10.0.0.7", 1, 1)
        agent = workspace.agent().on(has_computed(), task(1, (SELF, PEER), (SELF, other))).on(has_linked(1), FINISHED)
        tried = (LinkResult(5, problem="it hung"), LinkResult(7, 8.0))
        assert last(agent.run(), "link_result") == LinkResults(key(1), tried)

    @pytest.mark.parametrize(("link", "own"), [((SELF, PEER), False), ((SELF,), True)])
    def test_a_link_that_hangs_is_this_nodes_problem_only_where_no_other_took_part(
        self, workspace: Workspace, link: tuple[LinkEnd, ...], own: bool
    ) -> None:
        workspace.behave("0 link hang")
        agent = workspace.agent().on(has_computed(), task(1, link, timeout=2.0)).on(has_linked(1), FINISHED)
        linked = last(agent.run(), "link_result")
        words, _, seconds = linked.results[0].problem.rpartition(" in ")
        assert words == "the check process of local rank 0 gave no answer"
        assert float(seconds.removesuffix(" s")) <= 0.5, "a quarter of the task's time"
        assert linked.problem == (linked.results[0].problem if own else "")


async def killed(pid: int) -> None:
    """Kill a process, and let this loop be notified of its end."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    pidfd = os.pidfd_open(pid)
    loop.add_reader(pidfd, ended.set_result, None)
    os.kill(pid, signal.SIGKILL)
    await asyncio.wait_for(ended, WAIT)
    loop.remove_reader(pidfd)
    os.close(pidfd)


class Workers:
    """Replaces the starter of workers, whose template also starts the check processes if it has one."""

    def __init__(self, spec: JobSpec) -> None:
        self.started: list[int] = []

    async def prestarted(self, parent: object) -> None:
        pass

    def has_imported(self, module: str) -> bool:
        return True

    async def start(self, start: ProcessSpec, folder: str) -> int:
        self.started.append(spawn(start))
        return self.started[-1]


async def healthy() -> tuple[str, ...]:
    return ()


class CheckRun:
    """The node check of one node, without an agent. `assign` passes an assignment to it, and `until` waits for the
    result."""

    def __init__(self, workers: int = 1) -> None:
        entrypoint = Entrypoint("script", "x.py", python=sys.executable)
        rules = JobRules(parts=(NodeCheckRules(check=CHECK_ONCE),))
        place = kinds.Master("node0", 29400)
        spec = JobSpec(entrypoint, "job", workers, rules, rendezvous=place, start_method="forkserver")
        self.workers = Workers(spec)
        self._news = asyncio.Event()
        self.warnings: list[str] = []
        starter: Any = self.workers
        self.part = NodeCheckRunner(
            spec, starter, nullcontext, self._news.set, healthy, self.warnings.append, str(WORKERS / "fake_check")
        )
        self._word = Assignment()
        self._hung = os.open("hung", os.O_RDWR | os.O_NONBLOCK)

    def assign(self, word: Assignment) -> None:
        self._word = word
        self._follow()

    def _follow(self) -> None:
        self.part.update(check_part(self._word).check_task, check_part(self._word).health)

    async def until(self, reached: Callable[[NodeReport], bool]) -> NodeReport:
        self._follow()
        while not reached(status := self.part.add_to_report(BLANK)):
            await asyncio.wait_for(self._news.wait(), WAIT)
            self._news.clear()
            self._follow()
        return status

    async def until_it_hangs(self) -> None:
        loop = asyncio.get_running_loop()
        hung = loop.create_future()
        loop.add_reader(self._hung, hung.set_result, None)
        await asyncio.wait_for(hung, WAIT)
        loop.remove_reader(self._hung)
        os.read(self._hung, 1)

    async def close(self) -> None:
        await self.part.close()
        os.close(self._hung)
        assert not [pid for pid in self.workers.started if psutil.pid_exists(pid)]


@pytest.fixture
def run_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[CheckRun], Awaitable[None]]], None]:
    """Runs such a node in the directory of the test, and checks that no process is left."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("hung")

    def run(act: Callable[[CheckRun], Awaitable[None]]) -> None:
        async def whole() -> None:
            check_run = CheckRun()
            try:
                await act(check_run)
            finally:
                await check_run.close()

        asyncio.run(whole())

    return run


RunCheck = Callable[[Callable[[CheckRun], Awaitable[None]]], None]


class TestReplacing:
    """The latest assignment counts, whatever the check processes are doing."""

    def test_a_newer_task_replaces_a_task_whose_processes_hang(self, run_check: RunCheck, tmp_path: Path) -> None:
        (tmp_path / "behave").write_text("0 link hang\n")

        async def act(check_run: CheckRun) -> None:
            await check_run.until(has_computed())
            check_run.assign(task(1, (SELF, PEER)))
            await check_run.until_it_hangs()
            check_run.assign(task(2, (SELF, PEER)))
            status = await check_run.until(has_linked(2))
            assert check_report(status).link_result == LinkResults(key(2), (LinkResult(5, 8.0),))
            assert len(check_run.workers.started) == 2
            running = asyncio.all_tasks()
            check_run.assign(task(1, (SELF, PEER), round=3))
            assert asyncio.all_tasks() == running, "an earlier one is none that counts"

        run_check(act)

    def test_a_task_that_comes_while_it_computes_has_it_compute_again_later(
        self, run_check: RunCheck, tmp_path: Path
    ) -> None:
        (tmp_path / "behave").write_text("0 compute hang\n")

        async def act(check_run: CheckRun) -> None:
            check_run.part.update(None)
            await check_run.until_it_hangs()
            check_run.assign(task(1, (SELF, PEER)))
            assert check_report(await check_run.until(has_linked(1))).compute_result is None
            assert check_report(await check_run.until(has_computed())).link_result is not None

        run_check(act)

    def test_processes_that_do_not_come_up_in_time_are_this_nodes_problem(
        self, run_check: RunCheck, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def act(check_run: CheckRun) -> None:
            await check_run.until(has_computed())
            await check_run.part.suspend()

            async def never(parent: object) -> None:
                await asyncio.Event().wait()

            monkeypatch.setattr(check_run.workers, "prestarted", never)
            check_run.assign(task(1, (SELF, PEER), compute=True, timeout=0.2))
            status = await check_run.until(has_linked(1))
            problem = (
                "the processes of the node check could not be started in {} s; where starting takes longer, as from a "
                "slow disk, give it more with --rdzv-conf check_timeout=SECONDS"
            )
            assert check_report(status).compute_result == ComputeResult(key(1), problem=problem.format("0.2"))
            assert check_report(status).link_result is not None
            # No time is left, and a link has a quarter of that.
            cleaned = re.sub("in .* s;", "in {} s;", check_report(status).link_result.problem)
            assert (cleaned, check_report(status).link_result.results) == (
                problem,
                (LinkResult(5, problem=check_report(status).link_result.problem),),
            )

        run_check(act)

    def test_the_check_processes_end_with_their_pause_and_a_later_task_finds_others(self, run_check: RunCheck) -> None:
        async def act(check_run: CheckRun) -> None:
            await check_run.until(has_computed())
            assert check_run.part.pids == set(check_run.workers.started)
            await check_run.part.suspend()
            assert check_run.part.pids == set()
            assert not psutil.pid_exists(check_run.workers.started[0])
            check_run.assign(task(1, (SELF, PEER)))
            await check_run.until(has_linked(1))
            assert check_run.part.pids == {check_run.workers.started[1]}

        run_check(act)

    def test_the_check_processes_end_once_their_node_has_passed_and_a_later_task_finds_others(
        self, run_check: RunCheck
    ) -> None:
        async def act(check_run: CheckRun) -> None:
            own = dismissed(HealthStatus.PASSED, leaves=False)
            await check_run.until(has_computed())
            check_run.assign(with_part(task(1, (SELF, PEER)), NodeCheckAssignment, health=own))
            await check_run.until(has_linked(1))
            assert check_run.part.pids == {check_run.workers.started[0]}, "its task stands"
            check_run.assign(Assignment(parts=(NodeCheckAssignment(health=own),)))
            await check_run.until(lambda status: not check_run.part.pids)
            assert not psutil.pid_exists(check_run.workers.started[0])
            check_run.assign(with_part(task(1, (SELF, PEER), round=1), NodeCheckAssignment, health=own))
            await check_run.until(has_linked(1, 1))
            assert check_run.part.pids == {check_run.workers.started[1]}
            assert len(check_run.workers.started) == 2

        run_check(act)

    def test_a_process_that_dies_between_requests_is_replaced_without_a_message(self, run_check: RunCheck) -> None:
        async def act(check_run: CheckRun) -> None:
            await check_run.until(has_computed())
            await killed(check_run.workers.started[0])
            assert check_run.part.pids == set()
            check_run.assign(task(1, (SELF, PEER)))
            assert check_report(await check_run.until(has_linked(1))).link_result == LinkResults(
                key(1), (LinkResult(5, 8.0),)
            )

        run_check(act)

    def test_an_unexpected_failure_is_reported(self, run_check: RunCheck, monkeypatch: pytest.MonkeyPatch) -> None:
        async def act(check_run: CheckRun) -> None:
            def fail(*args: object) -> None:
                raise OSError(24, "Too many open files")

            monkeypatch.setattr(check_processes, "CheckWorkers", fail)
            with pytest.raises(OSError, match="Too many open files"):
                await check_run.until(has_computed())

        run_check(act)

    def test_an_internal_error_is_the_result_of_the_test_and_ends_no_node(
        self, run_check: RunCheck, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The coordinator has the test repeated."""

        def fail(*args: object) -> Any:
            raise ZeroDivisionError("planted")

        async def act(check_run: CheckRun) -> None:
            with monkeypatch.context() as planted:
                planted.setattr(check_runner, "device_speeds", fail)
                computed = check_report(await check_run.until(has_computed())).compute_result
                planted.setattr(check_runner, "link_requests", fail)
                check_run.assign(task(1, (SELF, PEER)))
                linked = check_report(await check_run.until(has_linked(1))).link_result
            text = "internal error: ZeroDivisionError('planted'); please report it"
            assert computed.problem == text
            assert linked == LinkResults(key(1), (LinkResult(5, problem=text),), text)
            assert check_run.warnings == [f"warning: the node check of this node has failed: {text}"]
            check_run.assign(task(2, (SELF, PEER), compute=True))
            again = check_report(await check_run.until(has_linked(2)))
            assert again.link_result == LinkResults(key(2), (LinkResult(5, 8.0),))
            assert not again.compute_result.problem

        run_check(act)

    def test_a_machine_that_cannot_be_inspected_is_tested(
        self, run_check: RunCheck, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def fail() -> tuple[str, ...]:
            raise ZeroDivisionError("planted")

        async def act(check_run: CheckRun) -> None:
            monkeypatch.setattr(check_run.part, "_find_problems", fail)
            assert not check_report(await check_run.until(has_computed())).compute_result.problem
            (line,) = check_run.warnings
            assert "ZeroDivisionError" in line

        run_check(act)


class TestRounds:
    """The check and the workers share their devices, so one ends before the other begins."""

    NO_CHECK_PROCESS_LIVES = (
        "for pid in $(grep -o 'pid\": [0-9]*' orders | cut -d' ' -f2); do [ -e /proc/$pid ] && exit 9; done"
    )
    UNTIL_RELEASED = 'trap : TERM; echo x > up; until read word < gate; do :; done; echo \'{"do": "ended"}\' >> orders'

    def test_the_check_processes_have_ended_before_workers_start(self, workspace: Workspace) -> None:
        agent = workspace.agent(f"{self.NO_CHECK_PROCESS_LIVES}; exit 0", workers=2).on(
            has_computed(), training(rank_assignment(workers=2))
        )
        assert agent.on(SUCCEEDED, FINISHED).run().result.exit_code == 0

    def test_ranks_that_come_while_it_computes_end_that(self, workspace: Workspace) -> None:
        workspace.behave("0 start hang")
        agent = workspace.agent().on(WAITING, training(rank_assignment())).on(SUCCEEDED, FINISHED)
        assert agent.run().result.exit_code == 0

    @pytest.mark.parametrize(("check", "templates"), [(CHECK_ONCE, 2), (CHECK_ALWAYS, 1)])
    def test_a_later_task_finds_check_processes_and_their_template_stays_where_every_round_is_checked(
        self, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, check: int, templates: int
    ) -> None:
        def noted(spec: JobSpec, *rest: Any) -> Any:
            with open("templates", "a") as file:
                file.write("x")
            return real(spec, *rest)

        real = check_processes.Starter
        monkeypatch.setattr(check_processes, "Starter", noted)
        agent = workspace.agent(check=check).on(has_computed(), training(rank_assignment()))
        agent.on(
            SUCCEEDED,
            with_part(gathering(1), NodeCheckAssignment, check_task=check_part(task(1, (SELF, PEER))).check_task),
        )
        agent.on(has_linked(1), FINISHED).run()
        assert [order["do"] for order in workspace.orders] == ["compute", "link"]
        assert len((workspace.path / "templates").read_text()) == templates

    def test_a_task_waits_for_the_end_of_workers_that_still_run(self, workspace: Workspace) -> None:
        for fifo in ("up", "gate"):
            os.mkfifo(workspace.path / fifo)

        def withdrawn() -> Assignment:
            (workspace.path / "up").read_text()
            return with_part(gathering(1), NodeCheckAssignment, check_task=check_part(task(1, (SELF, PEER))).check_task)

        def release() -> None:
            (workspace.path / "gate").write_text("go\n")

        agent = (
            workspace.agent(self.UNTIL_RELEASED).on(has_computed(), training(rank_assignment())).on(RUNNING, withdrawn)
        )
        agent.on(WAITING, release).on(has_linked(1), FINISHED).run()
        assert [order["do"] for order in workspace.orders] == ["compute", "ended", "link"]

    @pytest.mark.parametrize(("needed", "templates"), [("json", "x"), ("msgspec", "xx")])
    def test_check_processes_are_forked_from_the_template_of_the_workers_where_that_has_what_they_need(
        self, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, needed: str, templates: str
    ) -> None:
        monkeypatch.setattr(check_processes, "PRELOAD", (needed,))

        def noted(*args: Any) -> Template:
            with open("templates", "a") as file:
                file.write("x")
            return real(*args)

        real = Template.start
        monkeypatch.setattr(Template, "start", noted)
        (workspace.path / "x.py").write_text(
            f"import os, json; assert os.system({self.NO_CHECK_PROCESS_LIVES + '; exit 0'!r}) == 0"
        )
        entrypoint = Entrypoint("script", "x.py", python=sys.executable)
        agent = workspace.agent(start_method="forkserver", entrypoint=entrypoint, workers=2)
        agent.on(has_computed(), training(rank_assignment(workers=2))).on(SUCCEEDED, FINISHED)
        agent_run = agent.run()
        assert agent_run.result.exit_code == 0
        assert last(agent_run, "compute_result").problem == ""
        assert (workspace.path / "templates").read_text() == templates
        assert "--start-method=forkserver: " not in agent_run.output


class TestLeaving:
    """How a node leaves during a check, or because of it."""

    @pytest.mark.parametrize(
        ("found", "code", "line"),
        [
            (HealthStatus.FAULT, exit_codes.FAULTY_NODE, "RuntimeError: The node network is breakdown."),
            (HealthStatus.STRAGGLER, exit_codes.STRAGGLER, "RuntimeError: The node is a straggler and exits."),
        ],
    )
    def test_a_dismissed_node_leaves_with_a_code_of_its_own_and_a_reason(
        self, workspace: Workspace, found: HealthStatus, code: int, line: str
    ) -> None:
        word = Assignment(epoch=1, parts=(NodeCheckAssignment(health=dismissed(found)),))
        agent_run = workspace.agent().on(has_computed(), word).run()
        assert agent_run.phases == [WAITING, NodePhase.LEFT]
        assert agent_run.result.exit_code == code
        assert agent_run.result.error is not None
        first, second = agent_run.result.error.split("\n")
        assert first == line
        assert "its links with a and b failed" in second
        assert "another machine in its place" in second

    def test_a_straggler_that_is_not_dismissed_stays(self, workspace: Workspace) -> None:
        word = with_part(
            training(rank_assignment()), NodeCheckAssignment, health=dismissed(HealthStatus.STRAGGLER, leaves=False)
        )
        agent_run = workspace.agent().on(has_computed(), word).on(SUCCEEDED, FINISHED).run()
        assert (agent_run.result.exit_code, agent_run.result.error) == (0, None)

    def test_a_signal_ends_a_check_that_hangs(self, workspace: Workspace) -> None:
        workspace.behave("0 compute hang")
        os.mkfifo(workspace.path / "hung")
        agent = workspace.agent(workers=2)

        def end_what_hangs() -> None:
            (workspace.path / "hung").read_text()
            agent.signal(signal.SIGTERM)

        # In a thread: the agent continues in the meantime, and starts the check process.
        agent_run = agent.on(NodePhase.WAITING, threading.Thread(target=end_what_hangs).start).run()
        assert agent_run.result.exit_code == 128 + signal.SIGTERM
        assert agent_run.phases[-1] is NodePhase.LEFT

    def test_no_process_outlives_an_agent_that_is_killed(self, workspace: Workspace) -> None:
        workspace.behave(f"0 compute signal {int(signal.SIGKILL)}")
        with pytest.raises(AssertionError, match="the agent failed"):
            workspace.agent().run()
        checking = [psutil.Process(order["pid"]) for order in workspace.orders if psutil.pid_exists(order["pid"])]
        assert psutil.wait_procs(checking, timeout=WAIT)[1] == []
