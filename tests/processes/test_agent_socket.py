"""The socket on which an agent answers programs of the same user: which clients get an answer, and that the socket
leaves no trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

import msgspec
import pytest
from support.harness import WAIT
from support.virtual_torch import TorchJob, rules

from dlrover_run.coordination.records.requests import Action, OperatorRequest
from dlrover_run.features.operate import agent_socket
from dlrover_run.features.operate.agent_socket import AgentSocket
from dlrover_run.features.operate.jobs import survey as survey_module
from dlrover_run.features.operate.jobs.find import JobHere
from dlrover_run.features.operate.jobs.survey import SilentAgent, survey
from dlrover_run.features.operate.protocol import AgentInfo, AgentRequest, JobEnding
from dlrover_run.job_status.status import JobStatus
from dlrover_run.processes import unix_sockets
from dlrover_run.processes.unix_sockets import Peer
from dlrover_run.rendezvous.client import AskFailed

INFO = AgentInfo(
    job=f"job-{os.getpid()}", program="dlrover-run", backend="master", host="vm", node_id="a", pid=os.getpid()
)


class Bed:
    """An agent's socket. `asked` are the requests that reached the coordinator, which refuses to drain."""

    def __init__(self) -> None:
        self.asked: list[OperatorRequest | None] = []
        self.socket = AgentSocket(lambda: INFO, self._ask)

    async def _ask(self, request: OperatorRequest | None) -> JobStatus:
        self.asked.append(request)
        if request is not None and request.action is Action.DRAIN:
            raise AskFailed("no node of the job has that rank")
        job = TorchJob(rules(1, 1))
        job.come("a")
        return job.coordinator.status(INFO.job, job.now)


async def opened(agent: AgentSocket) -> None:
    agent.listen()
    await agent.accept()


async def own_names() -> list[str]:
    """The sockets of the agents of this test."""
    return [name for name, agent in (await survey(os.geteuid())).found if agent.job == INFO.job]


def bounded(work: object) -> None:
    asyncio.run(asyncio.wait_for(work, WAIT))  # type: ignore[arg-type]


def test_it_is_found_answers_and_leaves_no_name() -> None:
    async def work() -> None:
        bed = Bed()
        await opened(bed.socket)
        (name,) = await own_names()
        assert bed.asked == [], "finding the socket sends no request to the coordinator"
        job = JobHere([(name, INFO)])
        assert (await job.ask()).job == INFO.job
        with pytest.raises(AskFailed, match="no node"):
            await job.ask(OperatorRequest(Action.DRAIN, "7"))
        assert bed.asked == [None, OperatorRequest(Action.DRAIN, "7")]
        bed.socket.close()
        assert await own_names() == []

    bounded(work())


def test_a_request_to_stop_is_answered_by_the_agent_that_it_ends() -> None:
    """The job stops before its coordinator has answered; the exit code of `stop` was 3."""

    class Stopping(Bed):
        def __init__(self) -> None:
            super().__init__()
            self.ends, self.answers = asyncio.Event(), asyncio.Event()

        async def _ask(self, request: OperatorRequest | None) -> JobStatus:
            self.ends.set()
            await self.answers.wait()
            return await super()._ask(request)

    async def work() -> None:
        bed = Stopping()
        await opened(bed.socket)
        (name,) = await own_names()
        asking = asyncio.ensure_future(JobHere([(name, INFO)]).ask(OperatorRequest(Action.STOP)))
        await bed.ends.wait()
        ending = asyncio.ensure_future(bed.socket.finish(lambda: JobEnding(exit_code=0, reason="", seconds=0.0)))
        await asyncio.sleep(0)
        bed.answers.set()
        await ending
        bed.socket.close()
        assert (await asking).job == INFO.job

    bounded(work())


def test_each_of_64_agents_is_found() -> None:
    async def work() -> None:
        beds = [Bed() for _ in range(64)]
        for bed in beds:
            await opened(bed.socket)
        assert len(await own_names()) == 64
        for bed in beds:
            bed.socket.close()

    bounded(work())


@pytest.mark.parametrize(("own", "agents", "found"), [(0, 4321, True), (4321, 4321, True), (1234, 4321, False)])
def test_root_is_answered_by_the_agents_of_all_users(
    own: int, agents: int, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says who is at each end of a connection; here that is stated."""

    async def work() -> None:
        monkeypatch.setattr(os, "geteuid", lambda: agents)
        bed = Bed()
        await opened(bed.socket)
        monkeypatch.setattr(survey_module, "peer_of", lambda connection: Peer(os.getpid(), agents))
        monkeypatch.setattr(os, "geteuid", lambda: own)
        everyone = await survey(None)
        monkeypatch.setattr(os, "geteuid", lambda: agents)
        assert [agent.uid for _, agent in everyone.found if agent.job == INFO.job] == [agents] * found
        bed.socket.close()

    monkeypatch.setattr(agent_socket, "_may_ask", lambda connection: True)
    bounded(work())


def test_an_agent_that_is_stopped_is_named_by_its_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "SURVEY_TIMEOUT", 0.05)

    async def work() -> None:
        with socket.socket(socket.AF_UNIX) as stopped:
            stopped.bind(f"\0{unix_sockets.new_socket_name()}")
            stopped.listen()
            assert SilentAgent(os.getpid(), os.geteuid()) in (await survey(os.geteuid())).silent

    bounded(work())


def test_nothing_is_left_of_an_agent_that_was_killed() -> None:
    script = (
        "import asyncio\n"
        "from dlrover_run.features.operate.agent_socket import AgentSocket\n"
        "async def work():\n"
        "    agent = AgentSocket(None, None)\n"
        "    agent.listen()\n"
        "    await agent.accept()\n"
        "    print(flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(work())\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    with agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        own = f"{unix_sockets.socket_prefix(os.geteuid())}{agent.pid}-"
        assert unix_sockets.socket_names(own)
        agent.send_signal(signal.SIGKILL)
    assert not unix_sockets.socket_names(own)


@pytest.mark.parametrize("line", [b"\n", b"{}" * agent_socket.MAX_REQUEST + b"\n", b'{"status": "yes"}\n', b""])
def test_an_invalid_request_closes_the_connection(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_socket, "READ_TIMEOUT", 0.05)

    async def work() -> None:
        bed = Bed()
        await opened(bed.socket)
        (name,) = await own_names()
        reader, writer = await asyncio.open_unix_connection(f"\0{name}")
        writer.write(line)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert await own_names() == [name], "the socket still serves other clients"
        bed.socket.close()

    bounded(work())


def test_a_coordinator_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_socket, "ASK_TIMEOUT", 0.05)

    async def forever(request: OperatorRequest | None) -> JobStatus:
        await asyncio.sleep(WAIT)
        raise AssertionError

    async def work() -> None:
        silent = AgentSocket(lambda: INFO, forever)
        await opened(silent)
        (name,) = await own_names()
        with pytest.raises(AskFailed) as failed:
            await JobHere([(name, INFO)]).ask()
        assert failed.value.no_job, "as for a job that does not exist: docs/operate.md"
        silent.close()

    bounded(work())


def test_the_size_of_a_request_is_limited() -> None:
    longest = AgentRequest(status=True, request=OperatorRequest(Action.DRAIN, "n" * 255, by="b" * 255))
    assert len(msgspec.json.encode(longest)) < agent_socket.MAX_REQUEST


def test_an_interrupt_of_top_restores_the_terminal() -> None:
    async def work() -> None:
        bed = Bed()
        await opened(bed.socket)
        ours, theirs = os.openpty()
        top = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dlrover_run", "top", f"--rdzv-id={INFO.job}",
            stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
        )  # fmt: skip
        os.close(theirs)
        shown = b""
        while INFO.job.encode() not in shown:
            shown += await asyncio.to_thread(os.read, ours, 65536)
        top.send_signal(signal.SIGINT)
        assert await top.wait() == 0
        with contextlib.suppress(OSError):
            while True:
                shown += os.read(ours, 65536)
        os.close(ours)
        assert b"\x1b[?1049h" in shown
        assert b"\x1b[?1049l" in shown, "the screen before it is shown again"
        bed.socket.close()

    bounded(work())


@pytest.mark.parametrize(
    ("ending", "code", "text"),
    [
        (
            JobEnding(exit_code=0, reason="every worker succeeded", seconds=25.0),
            0,
            "has succeeded after 25 s, 0 restarts",
        ),
        (JobEnding(exit_code=137, reason="rank 1 was killed", seconds=25.0), 2, "0 restarts: rank 1 was killed"),
    ],
)
@pytest.mark.parametrize("on_terminal", [True, False])
def test_top_ends_with_the_last_table_and_the_result_of_the_job(
    ending: JobEnding, code: int, text: str, on_terminal: bool
) -> None:
    async def work() -> None:
        bed = Bed()
        await opened(bed.socket)
        ours, theirs = os.openpty() if on_terminal else os.pipe()
        top = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dlrover_run", "top", f"--rdzv-id={INFO.job}",
            stdin=theirs if on_terminal else subprocess.DEVNULL, stdout=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
        )  # fmt: skip
        os.close(theirs)
        shown = b""
        while INFO.job.encode() not in shown:
            shown += await asyncio.to_thread(os.read, ours, 65536)
        await bed.socket.finish(lambda: ending)
        bed.socket.close()
        assert await top.wait() == code
        with contextlib.suppress(OSError):
            while more := os.read(ours, 65536):
                shown += more
        os.close(ours)
        _, _, after = shown.rpartition(b"\x1b[?1049l")
        assert f"job {INFO.job}".encode() in after, "the last table"
        assert text.encode() in after

    bounded(work())


def test_q_ends_top() -> None:
    async def work() -> None:
        bed = Bed()
        await opened(bed.socket)
        ours, theirs = os.openpty()
        top = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dlrover_run", "top", f"--rdzv-id={INFO.job}",
            stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
        )  # fmt: skip
        os.close(theirs)
        shown = b""
        while INFO.job.encode() not in shown:
            shown += await asyncio.to_thread(os.read, ours, 65536)
        os.write(ours, b"q")
        assert await top.wait() == 0
        os.close(ours)
        bed.socket.close()

    bounded(work())


def test_why_prints_json_of_a_job_without_logs_too() -> None:
    async def work() -> None:
        bed = Bed()
        await opened(bed.socket)
        why = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dlrover_run", "why", "--json", f"--rdzv-id={INFO.job}",
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        out, _ = await why.communicate()
        ((reason,),) = msgspec.json.decode(out)
        assert reason["code"] == "nodes_here"
        assert await why.wait() == 0
        bed.socket.close()

    bounded(work())
