"""The master that a node starts for its job: there is only one, it outlives the agent that started it, and it ends with
the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from support.harness import (
    OURS,
    WAIT,
    WORKERS,
    Mailbox,
    agent_of,
    finish,
    kill_leftovers,
    launch,
    only_long,
    run,
    still_alive,
    watched,
)

from dlrover_run.processes import tree
from dlrover_run.rendezvous import kinds
from dlrover_run.rendezvous.master_client import launcher as master_launcher
from dlrover_run.rendezvous.master_client.launcher import CannotLaunchMaster, MasterLauncher
from dlrover_run.transport.addresses import is_local_address, resolve, route_source

AT_A_WORD = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
post(world=os.environ["WORLD_SIZE"])
signal.sigwait([signal.SIGUSR1])
"""
"""A worker that reports itself and exits with success at SIGUSR1."""


class Job:
    """Launches of one job with an endpoint on this machine, and the masters that they start."""

    def __init__(self, mailbox: Mailbox, port: int, *flags: str) -> None:
        self.mailbox = mailbox
        self.endpoint = f"127.0.0.1:{port}"
        self._flags = flags
        self._started: list[subprocess.Popen[str]] = []
        self.script = mailbox.script("wait.py", AT_A_WORD)

    def node(self, *flags: str, env: dict[str, str | None] | None = None) -> subprocess.Popen[str]:
        meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint={self.endpoint}", "--rdzv-id=job")
        node = launch(self.mailbox, *meeting, *self._flags, *flags, self.script, env=env)
        self._started.append(node)
        return node

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def masters(self) -> list[psutil.Process]:
        """The processes that listen at the endpoint."""
        pids = {c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == self.port}
        return [psutil.Process(pid) for pid in pids if pid]

    def close(self) -> None:
        for node in self._started:
            if node.poll() is None:
                node.kill()
                node.communicate()
        for master in self.masters():
            master.kill()


@pytest.fixture
def job(mailbox: Mailbox, free_port: int) -> Iterator[Callable[..., Job]]:
    with ExitStack() as jobs:

        def make(*flags: str) -> Job:
            one = Job(mailbox, free_port, *flags)
            jobs.callback(one.close)
            return one

        yield make


@contextmanager
def following(process: psutil.Process) -> Iterator[Callable[[float], bool]]:
    """Whether a process is still alive after at most this many seconds."""
    with watched(process.pid) as pidfds:
        try:
            yield lambda timeout: still_alive(pidfds, timeout) > 0
        finally:
            kill_leftovers(pidfds)


def read_until(node: subprocess.Popen[str], text: str) -> str:
    """Read the standard error of a launch up to a line that contains `text`."""
    assert node.stderr is not None
    output = ""
    for line in node.stderr:
        output += line
        if text in line:
            return output
    raise AssertionError(f"the launch ended before it said {text!r}:\n{output}")


def let_succeed(workers: list[dict[str, int]]) -> None:
    for worker in workers:
        os.kill(worker["pid"], signal.SIGUSR1)


@pytest.mark.parametrize("method", ["spawn", *only_long("forkserver")])
def test_three_agents_that_start_at_once_have_one_master_that_exits_with_the_job(
    job: Callable[..., Job], method: str
) -> None:
    three = job("--nnodes=3", f"--start-method={method}")
    nodes = [three.node() for _ in range(3)]
    workers = three.mailbox.gather(3)
    masters = three.masters()
    assert [master.name() for master in masters] == [tree.MASTER_NAME]
    for node in nodes:
        assert "grpc" not in Path(f"/proc/{node.pid}/maps").read_text(), "the watchdog has no gRPC"
        assert "grpc" in Path(f"/proc/{agent_of(node).pid}/maps").read_text()
    with following(masters[0]) as lives:
        let_succeed(workers)
        ended = [finish(node) for node in nodes]
        assert not lives(WAIT)
    assert [end.code for end in ended] == [0, 0, 0]
    # The test compares the whole output, so gRPC, Python and the launcher print no warning. Other tests cover what a
    # round prints.
    assert not [line for end in ended for line in end.err.splitlines() if re.search(r"warning|[EWI]\d{4} |fork", line)]


@pytest.mark.parametrize("method", ["spawn", *only_long("forkserver")])
def test_a_worker_does_not_load_grpc(mailbox: Mailbox, free_port: int, method: str) -> None:
    meeting = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--rdzv-id=job")
    nodes = [launch(mailbox, *meeting, f"--start-method={method}", WORKERS / "observe.py") for _ in range(2)]
    seen = mailbox.gather(2)
    assert [finish(node).code for node in nodes] == [0, 0]
    for worker in seen:
        assert worker["fds"] == [0, 1, 2]
        assert worker["blocked"] == []
        assert {name for name in worker["environ"] if name.startswith("GRPC_")} <= os.environ.keys()


@pytest.mark.parametrize("end", ["signal", "kill the watchdog", *only_long("kill the agent")])
def test_the_master_outlives_the_launcher_that_started_it(job: Callable[..., Job], end: str) -> None:
    elastic = job("--nnodes=1:2", "--rdzv-conf=last_call_timeout=600")
    host = elastic.node()
    read_until(host, "waiting")
    other = elastic.node()
    elastic.mailbox.gather(2)
    (master,) = elastic.masters()
    with following(master) as lives:
        if end == "signal":
            host.terminate()
        else:
            (agent_of(host) if end == "kill the agent" else psutil.Process(host.pid)).kill()
        # Both its pipes are at their end, so no living process holds them.
        assert finish(host).code == {"signal": 143, "kill the agent": 137, "kill the watchdog": -9}[end]
        # The other node continues alone, a decision that only the master can have made.
        (worker,) = elastic.mailbox.gather(1)
        assert worker["world"] == "1"
        assert lives(0)
        let_succeed([worker])
        assert finish(other).code == 0
        assert not lives(WAIT)


class Outcome(NamedTuple):
    """How many masters a node started, why it could not, and what it printed."""

    started: int
    problem: str | None
    lines: list[str]


def host_alone(spec: kinds.Master) -> Outcome:
    """Have a node check once whether it has to start a master, and kill what it started."""

    async def look() -> Outcome:
        lines: list[str] = []
        host = MasterLauncher(spec, lines.append)
        with contextlib.suppress(CannotLaunchMaster):
            await host.ensure(await resolve(spec.host, spec.port))
        pids = tuple(host.pids)
        with watched(*pids) as pidfds:
            kill_leftovers(pidfds)
            assert still_alive(pidfds, WAIT) == 0
        return Outcome(len(pids), host.problem, lines)

    return asyncio.run(look())


def test_no_master_is_started_where_a_process_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = host_alone(kinds.Master("127.0.0.1", server.getsockname()[1], is_host=True))
    assert outcome == (0, None, [])


@pytest.mark.parametrize("is_host", [None, False])
def test_a_node_that_is_not_the_host_starts_no_master(free_port: int, is_host: bool | None) -> None:
    place = "192.0.2.1" if is_host is None else "127.0.0.1"
    outcome = host_alone(kinds.Master(place, free_port, is_host=is_host))
    assert outcome == (0, None, [])


def test_a_host_without_the_address_reports_what_to_do(free_port: int) -> None:
    started, problem, lines = host_alone(kinds.Master("192.0.2.1", free_port, is_host=True))
    # The caller prints the problem when it ends for it.
    assert (started, lines) == (0, [])
    assert problem is not None
    assert "192.0.2.1 is no address of this machine" in problem
    assert "bind=" in problem


def test_a_first_node_whose_machine_is_not_that_of_mpirun_ends_at_once(tmp_path: Path) -> None:
    """`mpirun -N 1` from a login node, without --hostfile: the only address that is known is that of the login node."""
    script = tmp_path / "train.py"
    script.write_text("")
    job = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_MCA_orte_hnp_uri": "93847552.0;tcp://192.0.2.1:57203",
    }
    ended = run(OURS, [script], cwd=tmp_path, env={**job})
    assert ended.code == 2
    assert ended.err.count("192.0.2.1 is no address of this machine") == 1
    assert "--hostfile" in ended.err


def test_a_bind_address_replaces_the_address_of_the_endpoint(free_port: int) -> None:
    started, problem, lines = host_alone(kinds.Master("192.0.2.1", free_port, is_host=True, bind="127.0.0.1"))
    assert (started, problem, lines) == (1, None, [])


def test_why_a_master_cannot_start_is_left_to_the_caller(free_port: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, problem, lines = host_alone(kinds.Master("127.0.0.1", free_port, state_dir=str(tmp_path / "file")))
    assert lines == []
    assert problem is not None
    assert problem.startswith("no master can be started on this node: ")
    assert str(tmp_path / "file") in problem


def test_a_master_that_never_reports_that_it_listens_is_killed(
    free_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(master_launcher, "READY_TIMEOUT", 0.5)
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))

    async def look() -> None:
        lines: list[str] = []
        host = MasterLauncher(kinds.Master("127.0.0.1", free_port), lines.append)
        await host.ensure(await resolve("127.0.0.1", free_port))
        with watched(*host.pids) as pidfds:
            assert still_alive(pidfds, WAIT) == 0
        assert lines == ["no master can be started on this node: it did not listen within 0.5 s and was killed"]

    asyncio.run(look())


def test_a_public_listener_without_protection_gives_a_warning(free_port: int) -> None:
    lines = host_alone(kinds.Master("127.0.0.1", free_port, bind="0.0.0.0")).lines
    assert [line for line in lines if line.startswith("warning: the master listens on 0.0.0.0:")] == lines != []
    lines = host_alone(kinds.Master("127.0.0.1", free_port, bind="0.0.0.0", token="secret")).lines
    assert lines == []


def test_addresses_of_this_machine_are_recognized() -> None:
    async def look() -> None:
        (loopback,) = await resolve("127.0.0.1", 29400)
        (elsewhere,) = await resolve("192.0.2.1", 29400)
        assert is_local_address(loopback)
        assert not is_local_address(elsewhere)
        assert route_source(loopback) == "127.0.0.1"
        assert str((await resolve("localhost", 1))[0]) == "127.0.0.1:1"
        for v6 in await resolve("::1", 1):
            assert (str(v6), route_source(v6)) == ("[::1]:1", "127.0.0.1")

    asyncio.run(look())


def test_a_web_address_that_needs_a_token_is_refused_once(tmp_path: Path, free_port: int) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    conf = f"web=0.0.0.0:{free_port + 1}"
    flags = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--rdzv-conf", conf]
    ended = run(OURS, [*flags, script], cwd=tmp_path)
    assert ended.code == 2
    assert ended.err.count("needs a token") == 1
