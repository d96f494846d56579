"""`tf-ps-run scale`: its request to a job on this machine, its output, and its timeout."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_lines import isolate
from harness import WAIT

from dlrover_run import exit_codes
from dlrover_run.operate.agent_socket import AgentSocket
from dlrover_run.operate.protocol import AgentInfo, ScaleReply
from dlrover_run.policies.parameter_servers.model import DesiredReplicas
from dlrover_run.rendezvous.client import AskFailed
from dlrover_run.spec import JobSpec, SpecError
from tf_ps_runner import scale
from tf_ps_runner.cli import main
from tf_ps_runner.command_line import options


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, and no variable of the machine that could change what is asked."""
    isolate(tmp_path, monkeypatch)
    for name in [name for name in os.environ if name.startswith(options.PREFIX)]:
        monkeypatch.delenv(name)


class PretendAgent:
    """The socket of an agent of a job, in a thread with its own event loop. `requests` are those that it received."""

    def __init__(self, job: str, answer: ScaleReply | None, program: str) -> None:
        self.requests: list[DesiredReplicas] = []
        self._answer = answer
        info = AgentInfo(job=job, program=program, backend="memory", host="vm", node_id="a", pid=os.getpid())
        self._socket = AgentSocket(lambda: info, self._ask, scale=self._scale)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._socket.open(), self._loop).result(WAIT)

    async def _scale(self, request: DesiredReplicas) -> ScaleReply:
        self.requests.append(request)
        if self._answer is None:
            await asyncio.Event().wait()
        assert self._answer is not None
        return self._answer

    async def _ask(self, request: object) -> None:
        raise AssertionError("the status was not asked for")

    async def _end(self) -> None:
        self._socket.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Stop listening, and close all connections."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(WAIT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT)
        self._loop.close()


Agents = Callable[..., PretendAgent]


@pytest.fixture
def agents() -> Iterator[Agents]:
    """Starts the sockets of agents."""
    made: list[PretendAgent] = []

    def make(job: str, answer: ScaleReply | None, program: str = "tf-ps-run") -> PretendAgent:
        made.append(PretendAgent(job, answer, program))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


JOB = f"job-{os.getpid()}"


@pytest.mark.parametrize(
    ("flags", "answer", "code", "printed"),
    [
        pytest.param("", ScaleReply(granted=True, text="a new set is started"), 0, "accepts: a new set is started"),
        pytest.param("", ScaleReply(granted=False, text="there is no \x1b[2Jroom"), 1, "refuses: there is no room"),
        pytest.param("--timeout=0.2", None, 1, "has not received the request within 0.2 s (--timeout)"),
    ],
    ids=["accepted", "refused", "no answer"],
)
def test_the_answer_of_a_job_is_one_sentence_and_an_exit_code(
    flags: str, answer: ScaleReply | None, code: int, printed: str, agents: Agents, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = agents(JOB, answer)
    assert main(["scale", "--ps=2", f"--rdzv-id={JOB}", *flags.split()]) == code
    assert agent.requests == [DesiredReplicas(ps=2)]
    out, err = capsys.readouterr()
    assert (err if code == exit_codes.SUCCESS else out) == ""
    assert (out + err).startswith("tf-ps-run scale: ")
    assert (out + err).count("\n") == 1
    assert printed in out + err


def test_a_number_that_is_not_given_is_not_changed(agents: Agents) -> None:
    agent = agents(JOB, ScaleReply(granted=True))
    for flags in ("--workers=0", "--ps=3 --workers=2"):
        assert main(["scale", *flags.split(), f"--rdzv-id={JOB}"]) == exit_codes.SUCCESS
    assert agent.requests == [DesiredReplicas(ps=None, workers=0), DesiredReplicas(ps=3, workers=2)]


def test_a_job_of_another_program_is_not_scaled(agents: Agents, capsys: pytest.CaptureFixture[str]) -> None:
    agent = agents(JOB, ScaleReply(granted=True), program="dlrover-run")
    assert main(["scale", "--ps=2", f"--rdzv-id={JOB}"]) == scale.REFUSED
    assert agent.requests == []
    printed = capsys.readouterr().err
    assert f"no job named {JOB!r} of yours runs on this machine" in printed
    assert "--rdzv-backend" in printed


ELSEWHERE = ["scale", "--ps=3", "--rdzv-endpoint=node0:4000", "--rdzv-id=ads", "--timeout=5"]


@pytest.mark.parametrize("backend", [["--rdzv-backend=master"], []])
def test_a_remote_request_is_sent_to_the_master_that_the_flags_name(
    monkeypatch: pytest.MonkeyPatch, backend: list[str]
) -> None:
    sent = []

    async def join_and_request(spec: JobSpec, request: DesiredReplicas, timeout: float, log: object) -> ScaleReply:
        sent.append((spec, request, timeout))
        return ScaleReply(granted=True, text="a new set is started")

    monkeypatch.setattr(scale, "join_and_request", join_and_request)
    monkeypatch.setenv("DLROVER_RDZV_TOKEN", "a secret")
    assert main([*ELSEWHERE, *backend]) == exit_codes.SUCCESS
    ((spec, request, timeout),) = sent
    assert spec.master is not None
    assert (spec.run_id, spec.master.host, spec.master.port, spec.master.token) == ("ads", "node0", 4000, "a secret")
    # A client starts no master.
    assert (spec.master.is_host, request, timeout) == (False, DesiredReplicas(ps=3), 5)
    assert "DLROVER_RDZV_TOKEN" not in os.environ


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AskFailed("no node of a job 'ads' is here"), scale.REFUSED),
        (SpecError("the installed protobuf does not fit."), exit_codes.BAD_COMMAND_LINE),
    ],
)
def test_a_failed_remote_request_is_reported_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    async def join_and_request(*_: object) -> ScaleReply:
        raise error

    monkeypatch.setattr(scale, "join_and_request", join_and_request)
    assert main(ELSEWHERE) == code
    assert capsys.readouterr().err.startswith(f"tf-ps-run scale: {str(error).rstrip('.')}.\n")
