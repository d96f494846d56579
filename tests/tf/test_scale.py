"""`tf-ps-run scale`: what it requests of a job here or elsewhere, its output, and its timeout."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from support.command_lines import isolate
from support.harness import WAIT
from support.places import place_of

from dlrover_run import exit_codes
from dlrover_run.command_line.entry_point import run
from dlrover_run.coordination.records.requests import Action, OperatorRequest
from dlrover_run.features.operate.agent_socket import AgentSocket
from dlrover_run.features.operate.commands.asker import REFUSED, requester
from dlrover_run.features.operate.jobs.find import JobElsewhere
from dlrover_run.features.operate.protocol import AgentInfo
from dlrover_run.job_status.status import JobState, JobStatus
from dlrover_run.rendezvous.client import AskFailed
from tf_ps_runner.cluster.model import Role, ScaleRequest
from tf_ps_runner.command_line import options
from tf_ps_runner.command_line.options import TF_PS_RUN


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, and no variable of the machine that could change what is asked."""
    isolate(tmp_path, monkeypatch)
    for name in [name for name in os.environ if name.startswith(options.PREFIX)]:
        monkeypatch.delenv(name)


STATUS = JobStatus(
    job="ads",
    state=JobState.TRAINING,
    seconds=1.0,
    age=1.0,
    epoch=1,
    round=1,
    min_nodes=1,
    max_nodes=1,
    node_counts={},
    nodes=(),
)


class PretendAgent:
    """The socket of an agent of a job, in a thread with its own event loop. `requests` are those that it received. It
    raises a refusal, returns a status with an answer, or never answers."""

    def __init__(self, job: str, answer: str | AskFailed | None, program: str) -> None:
        self.requests: list[OperatorRequest | None] = []
        self._answer = answer
        info = AgentInfo(job=job, program=program, backend="memory", host="vm", node_id="a", pid=os.getpid())
        self._socket = AgentSocket(lambda: info, self._ask)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._socket.listen()
        asyncio.run_coroutine_threadsafe(self._socket.accept(), self._loop).result(WAIT)

    async def _ask(self, request: OperatorRequest | None) -> JobStatus:
        self.requests.append(request)
        if self._answer is None:
            await asyncio.Event().wait()
        if isinstance(self._answer, AskFailed):
            raise self._answer
        return msgspec.structs.replace(STATUS, answer=self._answer or "")

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

    def make(job: str, answer: str | AskFailed | None, program: str = "tf-ps-run") -> PretendAgent:
        made.append(PretendAgent(job, answer, program))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


JOB = f"job-{os.getpid()}"


def requested(**numbers: int) -> OperatorRequest:
    return OperatorRequest(Action.SCALE, by=requester(), part=ScaleRequest(**numbers))


@pytest.mark.parametrize(
    ("flags", "answer", "code", "printed"),
    [
        pytest.param("", "a new set is started", 0, "accepts: a new set is started"),
        pytest.param("", AskFailed("there is no \x1b[2Jroom"), 1, "refuses: there is no room"),
        pytest.param("--timeout=0.2", None, 1, "has not answered within 0.2 s (--timeout)"),
    ],
    ids=["accepted", "refused", "no answer"],
)
def test_the_answer_of_a_job_is_one_sentence_and_an_exit_code(
    flags: str,
    answer: str | AskFailed | None,
    code: int,
    printed: str,
    agents: Agents,
    capsys: pytest.CaptureFixture[str],
) -> None:
    agent = agents(JOB, answer)
    assert run(TF_PS_RUN, ["scale", "--ps=2", f"--rdzv-id={JOB}", *flags.split()]) == code
    assert agent.requests == [requested(ps=2)]
    out, err = capsys.readouterr()
    assert (err if code == exit_codes.SUCCESS else out) == ""
    assert (out + err).startswith("tf-ps-run scale: ")
    assert (out + err).count("\n") == 1
    assert printed in out + err


def test_auto_gives_numbers_back(agents: Agents) -> None:
    agent = agents(JOB, "done")
    assert run(TF_PS_RUN, ["scale", "--ps=auto", "--workers=3", f"--rdzv-id={JOB}"]) == 0
    size = ScaleRequest(workers=3, auto=(Role.PS,))
    assert agent.requests == [OperatorRequest(Action.SCALE, by=requester(), part=size)]
    assert "any number of parameter servers" in size.text


def test_a_number_that_is_not_given_is_not_requested(agents: Agents) -> None:
    agent = agents(JOB, "done")
    for flags in ("--workers=0", "--ps=3 --workers=2"):
        assert run(TF_PS_RUN, ["scale", *flags.split(), f"--rdzv-id={JOB}"]) == exit_codes.SUCCESS
    assert agent.requests == [requested(workers=0), requested(ps=3, workers=2)]


ELSEWHERE = ["scale", "--ps=3", "--rdzv-endpoint=node0:4000", "--rdzv-id=ads", "--timeout=5"]


@pytest.mark.parametrize("backend", [["--rdzv-backend=master"], []])
def test_a_remote_request_is_sent_to_the_master_that_the_flags_name(
    monkeypatch: pytest.MonkeyPatch, backend: list[str]
) -> None:
    sent = []

    async def ask(self: JobElsewhere, request: OperatorRequest | None = None) -> JobStatus:
        sent.append((self.spec, request))
        return msgspec.structs.replace(STATUS, answer="a new set is started")

    monkeypatch.setattr(JobElsewhere, "ask", ask)
    monkeypatch.setenv("DLROVER_RDZV_TOKEN", "a secret")
    assert run(TF_PS_RUN, [*ELSEWHERE, *backend]) == exit_codes.SUCCESS
    ((spec, request),) = sent
    assert place_of(spec).master is not None
    assert (spec.run_id, place_of(spec).master.host, place_of(spec).master.port, place_of(spec).master.token) == (
        "ads",
        "node0",
        4000,
        "a secret",
    )
    assert request == requested(ps=3)
    assert "DLROVER_RDZV_TOKEN" not in os.environ


def test_a_job_that_cannot_be_reached_is_reported_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def ask(*_: object) -> JobStatus:
        raise AskFailed("the master at node0:4000 cannot be reached", no_job=True)

    monkeypatch.setattr(JobElsewhere, "ask", ask)
    assert run(TF_PS_RUN, ELSEWHERE) == REFUSED
    assert capsys.readouterr().err == "tf-ps-run scale: the master at node0:4000 cannot be reached.\n"
