"""What follows the stalls of TensorFlow tasks on one node: lines, marks, events and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_run.agent.reconcile import StopMode
from dlrover_run.coordination.records.activity import WAITS
from dlrover_run.events.records import Event, Events, WorkerResumed, WorkerStalled
from dlrover_run.features.hangs.node.diagnosis import Quiet
from dlrover_run.features.hangs.node.stall_report import StallReport
from dlrover_run.features.hangs.search.codes import GuiltCode
from dlrover_run.features.hangs.search.detector import Resumed, StallCode, Stalled
from dlrover_run.features.hangs.search.guilt import Finding
from dlrover_run.features.hangs.search.suspects import Suspect
from dlrover_run.observe.tick import Tick
from tf_ps_runner.agent import task_watch
from tf_ps_runner.agent.task_events import TaskEvents
from tf_ps_runner.agent.task_process import TaskProcess
from tf_ps_runner.agent.task_watch import TaskWatch
from tf_ps_runner.cluster.model import PlannedTask, Role, TaskKey
from tf_ps_runner.cluster.orders import NodeOrder

PS, CHIEF, WORKER = range(3)
ROLES = (Role.PS, Role.CHIEF, Role.WORKER)


class Kept(Events):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


class Sampling:
    """Samples nothing."""

    def __init__(self, pids: object, store_port: int) -> None: ...

    def watch(self, rank: int, pid: int) -> None: ...

    def forget(self, rank: int) -> None: ...

    def close(self) -> None: ...


class Diagnosis:
    """In place of the `LocalDiagnosis`: the test decides what it finds."""

    def __init__(self, detector: object, on_stall: Any, on_resume: Any, pauses: object, find: Any, names: Any) -> None:
        self.on_stall, self.on_resume, self.find, self.names = on_stall, on_resume, find, names
        Diagnosis.last = self

    last: Diagnosis

    def stall(self, task: int, *guilty: int) -> None:
        finding = Finding(GuiltCode.STOPPED, guilty)
        stalled = Stalled(StallCode.TRAINING, (task,), 10.0, 3.0)
        self.on_stall(StallReport(stalled, guilty, finding.reasons, 4.0, {}, guilty, names=self.names))

    def resume(self, task: int) -> None:
        self.on_resume(Resumed(5.0, (task,)))


class Node:
    """A watch over a server, a chief and a worker."""

    def __init__(self, action: str) -> None:
        self.kept, self.lines, self.killed = Kept(), list[str](), list[str]()
        services: Any = SimpleNamespace(
            console=SimpleNamespace(info=self.lines.append),
            run_dir=SimpleNamespace(path=None, keep=False),
            shutdown=SimpleNamespace(requested=False),
            wake=lambda: None,
            events=self.kept,
            tick=Tick(dict, lambda name, error: None),
        )
        job: Any = SimpleNamespace(settings_of=lambda name, kind: kind(action))
        self.tasks = [self._task(role) for role in ROLES]
        self.watch = TaskWatch(job, services, TaskEvents(self.kept), self._kill)
        for task in self.tasks:
            self.watch.start(task)
        self.found = Diagnosis.last

    def events(self, kind: type[WorkerStalled | WorkerResumed]) -> list[str]:
        return [event.name for event in self.kept.events if isinstance(event, kind)]

    def _task(self, role: Role) -> TaskProcess:
        planned = PlannedTask(
            key=TaskKey(role, 0), rank=0, version=1, node_id="a", incarnation="b", host="n01", since=0.0
        )
        task = TaskProcess(planned, 1, lambda: None)
        task.process = SimpleNamespace(pid=role.value)  # type: ignore[assignment]
        return task

    def _kill(self, task: TaskProcess, why: str) -> None:
        task.stopping = StopMode.KILL
        self.killed.append(f"{task.key} {why}")


@pytest.fixture
def on_node(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[Node], None]], None]:
    """Runs a test with a node and an action."""
    monkeypatch.setattr(task_watch, "Sampler", Sampling)
    monkeypatch.setattr(task_watch, "LocalDiagnosis", Diagnosis)

    def run(action: str, test: Callable[[Node], None]) -> None:
        async def scenario() -> None:
            node = Node(action)
            test(node)
            node.watch.close()

        asyncio.run(scenario())

    return run


OnNode = Callable[[str, Callable[[Node], None]], None]


def test_tasks_that_wait_for_one_server_are_one_line_and_the_server_is_the_cause(on_node: OnNode) -> None:
    def test(node: Node) -> None:
        node.found.stall(WORKER, PS)
        node.found.stall(CHIEF, PS)
        assert len(node.lines) == 1
        assert "worker-0" in node.lines[0]
        assert "ps-0 is stopped" in node.lines[0]
        assert node.watch.stalled == {"ps-0": "stall.stopped", "chief-0": WAITS, "worker-0": WAITS}
        stalled = [event for event in node.kept.events if isinstance(event, WorkerStalled)]
        assert [(event.name, event.guilty, bool(event.reasons)) for event in stalled] == [
            ("ps 0", True, True), ("worker 0", False, False), ("chief 0", False, False),
        ]  # fmt: skip
        # The server counts as the cause until nothing waits for it.
        node.found.resume(WORKER)
        assert node.watch.stalled == {"ps-0": "stall.stopped", "chief-0": WAITS}
        node.found.resume(CHIEF)
        assert node.watch.stalled == {}
        assert node.events(WorkerResumed) == ["worker 0", "ps 0", "chief 0"]

    on_node("report", test)


def test_a_restart_kills_the_cause_once_and_nothing_else(on_node: OnNode) -> None:
    def test(node: Node) -> None:
        node.found.stall(WORKER, PS)
        node.found.stall(CHIEF, PS)
        assert [text.split()[0] for text in node.killed] == ["ps-0"]
        assert "stopped by a signal" in node.killed[0]

    on_node("restart", test)


def test_a_restart_without_a_cause_kills_nothing(on_node: OnNode) -> None:
    def test(node: Node) -> None:
        node.found.stall(WORKER)
        assert node.watch.stalled == {"worker-0": WAITS}
        assert node.killed == []

    on_node("restart", test)


def test_the_end_of_a_task_is_the_end_of_its_stall(on_node: OnNode) -> None:
    def test(node: Node) -> None:
        node.found.stall(WORKER, WORKER)
        node.watch.end(node.tasks[WORKER])
        assert node.watch.stalled == {}
        assert node.events(WorkerResumed) == [], "its exit is the event"

    on_node("report", test)


@pytest.mark.parametrize(
    ("order", "found"),
    [
        (NodeOrder(version=1), True),
        (NodeOrder(version=1, pause=True), False),
        (NodeOrder(version=1, ending=True), False),
    ],
)
def test_a_task_that_is_to_leave_is_not_stalled(on_node: OnNode, order: NodeOrder, found: bool) -> None:
    def test(node: Node) -> None:
        node.watch.follow(order)
        stalled = Stalled(StallCode.TRAINING, (WORKER,), 10.0, 3.0)
        quiet = Quiet(stalled, 20.0, (Suspect(WORKER, state="T"),), {}, trains=True, exchanged_at=None)
        assert (node.found.find(quiet) is not None) == found
        node.tasks[WORKER].leaving = True
        assert node.found.find(quiet) is None

    on_node("report", test)
