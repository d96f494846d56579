"""The command that starts and ends nodes, as a real process: what it gets, how it is stopped, and what is reported."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from support.harness import WAIT, open_descriptors

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.events.records import Event, Events, ScaleCommandEnded
from dlrover_run.features.autoscale.command import CommandKey, CommandResult, CommandRun
from dlrover_run.features.autoscale.model import AutoscaleAssignment, AutoscaleNodeReport
from dlrover_run.features.autoscale.scale_command import JOB_VARIABLE, NODES_VARIABLE, ScaleCommand

NODE = NodeKey("a", "1")
PYTHON = (sys.executable, "-c")


class Node(Events):
    """A node with a command, and all that it prints, reports and emits."""

    def __init__(self, *command: str) -> None:
        self.lines: list[str] = []
        self.ended: list[Event] = []
        self.reported = asyncio.Event()
        self.sessions: list[int] = []
        environment = {"PATH": os.environ["PATH"]}
        self.command = ScaleCommand(
            command, "resnet", environment, self.lines.append, self.reported.set, self.sessions.append, self
        )

    def emit(self, event: Event) -> None:
        self.ended.append(event)

    def assign(self, number: int, nodes: int = 4, seconds: float = WAIT, shutting_down: bool = False) -> None:
        run = CommandRun(CommandKey(5, number), nodes, NODE, seconds)
        self.command.follow(Assignment(parts=(AutoscaleAssignment(command=run),)), shutting_down)

    @property
    def result(self) -> CommandResult | None:
        report = NodeReport(node_id="a", incarnation="1", host="a", address="a.net", port=1, workers=1)
        part = AutoscaleNodeReport.find(self.command.add_to_report(report).parts)
        return None if part is None else part.command

    async def end(self, number: int) -> bool:
        """Wait until the end of that run is reported; whether it has failed."""
        while self.result is None or self.result.key.number != number:
            self.reported.clear()
            await asyncio.wait_for(self.reported.wait(), WAIT)
        return self.result.failed


def play(scene: Callable[[Node], Awaitable[None]], *command: str) -> None:
    """Play a scene with a node; no process and no descriptor of it may be left."""

    async def run() -> None:
        node = Node(*command)
        try:
            await scene(node)
        finally:
            pids = node.command.pids
            await node.command.close()
        assert not node.command.pids
        assert not [pid for pid in pids if psutil.pid_exists(pid)]

    before = open_descriptors()
    asyncio.run(run())
    assert not open_descriptors() - before


def test_it_gets_the_number_of_nodes_and_no_shell(tmp_path: Path) -> None:
    told = tmp_path / "told"
    program = f"import os, sys; open({str(told)!r}, 'a').write(repr((sys.argv[1:], dict(os.environ))) + '\\n')"

    async def scene(node: Node) -> None:
        node.assign(1, nodes=8)
        assert not await node.end(1)

    play(scene, *PYTHON, program, "--replicas={nodes}", "$HOME;{nodes}")
    words, variables = eval(told.read_text())
    assert words == ["--replicas=8", "$HOME;8"]
    assert {NODES_VARIABLE: "8", JOB_VARIABLE: "resnet"}.items() <= variables.items()


def test_each_run_begins_once_and_one_at_a_time_and_the_latest_counts(tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    os.mkfifo(go)
    program = f"import os; open({str(log)!r}, 'a').write(os.environ[{NODES_VARIABLE!r}]); open({str(go)!r}).read()"

    async def scene(node: Node) -> None:
        for number, nodes in ((1, 2), (1, 2), (2, 4), (3, 6)):
            node.assign(number, nodes)
            assert len(node.command.pids) == 1
        for number in (1, 3):
            await asyncio.to_thread(go.write_text, "")
            assert not await node.end(number)
            node.assign(3, 6)
        assert node.command.pids == set()

    play(scene, *PYTHON, program)
    assert log.read_text() == "26"


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("import sys; print('quota exceeded'); sys.exit(3)", 3, "ended with code 3: quota exceeded"),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM, "was killed by SIGTERM"),
    ],
)
def test_a_failure_is_a_line_and_an_event(program: str, code: int, said: str) -> None:
    async def scene(node: Node) -> None:
        node.assign(1)
        assert await node.end(1)
        (event,) = node.ended
        assert isinstance(event, ScaleCommandEnded)
        assert (event.nodes, event.code) == (4, code)
        (line,) = node.lines
        assert said in line
        assert said in event.what

    play(scene, *PYTHON, program)


@pytest.mark.parametrize("command", [(), ("/nowhere/resize",)])
def test_a_node_that_cannot_run_it_reports_that(command: tuple[str, ...]) -> None:
    async def scene(node: Node) -> None:
        node.assign(1)
        assert await node.end(1)
        assert node.ended == [ScaleCommandEnded(nodes=4, what=node.lines[0].rpartition("has: ")[2])]

    play(scene, *command)


def test_at_its_time_limit_it_is_stopped_with_what_it_has_started() -> None:
    async def scene(node: Node) -> None:
        node.assign(1, seconds=0.3)
        (pid,) = node.command.pids
        assert await node.end(1)
        assert node.sessions == [pid]
        left = [one for one in psutil.process_iter() if os.getsid(one.pid) == pid]
        assert psutil.wait_procs(left, WAIT)[1] == []

    play(scene, "sh", "-c", "sleep 1000 & sleep 1000")


def test_at_the_end_of_the_job_no_run_begins_and_one_that_runs_is_stopped() -> None:
    async def scene(node: Node) -> None:
        node.assign(1)
        node.assign(2, shutting_down=True)
        await node.command.close()
        assert node.result == CommandResult(CommandKey(5, 1), failed=True)
        node.assign(2, shutting_down=True)
        assert not node.command.pids

    play(scene, "sleep", "1000")


def test_what_it_writes_without_end_is_not_kept() -> None:
    async def scene(node: Node) -> None:
        node.assign(1)
        assert await node.end(1)
        assert len(node.lines[0]) < 1000

    play(scene, *PYTHON, "import sys; sys.stdout.write('x' * 10**6); sys.exit(1)")


OWNER = """
import asyncio, os, signal, sys
sys.path[:0] = {path!r}
from test_scale_command import Node

async def run():
    node = Node("sleep", "1000")
    node.assign(1)
    print(*node.command.pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(run())
"""


def test_it_ends_with_an_agent_that_is_killed() -> None:
    script = OWNER.format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = [process for process in psutil.process_iter() if process.pid == int(done.stdout)]
    # Where this process is a subreaper, it collects the command itself.
    _, alive = psutil.wait_procs(left, WAIT)
    assert not alive
