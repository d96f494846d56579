"""Which clients may take part in a job, and that the job's secret cannot be read. Real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.cluster import Cluster, leave, succeed
from support.harness import WAIT, only_long
from support.master_node import Node as Rogue
from support.master_node import grpc, status

from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.round import Failure
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.transport import auth
from dlrover_run.transport.grpc_setup import CHANNEL_OPTIONS
from dlrover_run.transport.messages import METHOD, Challenge, Join, Proof, Refused, encode_rules

TOKEN = "a-secret-of-this-test-7f3a"
KNOWN = {"DLROVER_RDZV_TOKEN": TOKEN}

PUBLIC = ("environ", "cmdline")
"""Files of a process that other processes of the same user, or of the machine, can read."""

HUNDRED_MEGABYTES = 100 * 1000 * 1000


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ("another-secret-entirely", "this node's token is not the master's"),
        (None, "the master requires the job's token and this node has none"),
    ],
)
def test_a_node_with_a_wrong_token_or_none_is_refused_and_the_job_continues(
    cluster: Cluster, known: str | None, words: str
) -> None:
    nodes = cluster.nodes("ab", "2", env=KNOWN)
    world = cluster.world(2)
    stranger = cluster.node("x", "2", "--spares=1", env={"DLROVER_RDZV_TOKEN": known})
    assert stranger.finish() == 72
    assert stranger.has_printed(words), stranger.output
    assert cluster.mailbox.pending() == []
    succeed(world, *nodes)
    for captured in (stranger, *nodes):
        assert TOKEN not in captured.output
        assert "another-secret" not in captured.output


def test_a_node_does_not_obey_a_master_without_the_token(cluster: Cluster) -> None:
    master = cluster.stand_alone_master()
    node = cluster.node("a", "1:2", env=KNOWN, conf={"is_host": 0, "last_call_timeout": 0.1})
    assert node.finish() == 72
    assert node.has_printed("this node has a token and the master has none")
    assert cluster.mailbox.pending() == []
    master.signal(signal.SIGTERM)
    assert master.finish() == 0


def blame_another_node(cluster: Cluster, host: str) -> str:
    """Join as a third node and report that the worker with rank 0 failed on that host. Return why the master ends the
    stream.
    """

    async def act() -> str:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.port}", options=CHANNEL_OPTIONS) as channel:
            # The host name that sorts last gets the last rank.
            rogue = Rogue(channel, status("rogue", host="zz-rogue", workers=1))
            await rogue.join(JobRules(min_nodes=2, max_nodes=3, max_restarts=2))
            await rogue.take_ranks(1)
            assert {member["world"] for member in await asyncio.to_thread(cluster.mailbox.gather, 2)} == {3}
            failure = Failure(rank=0, host=host, exit_text="was broken by a rogue")
            await rogue.report(phase=NodePhase.FAILED, failure=failure)
            return (await rogue.refused()).reason

    return asyncio.run(act())


@pytest.mark.long
@pytest.mark.parametrize("host", ["its own", "another"])
def test_a_node_cannot_report_a_failure_of_another_nodes_worker(cluster: Cluster, host: str) -> None:
    nodes = cluster.nodes("ab", "2:3", "--max-restarts=2", "--rdzv-id=job")
    for node in nodes:
        node.until_prints("2 nodes of 2 to 3 are here")
    reason = blame_another_node(cluster, "zz-rogue" if host == "its own" else "honest")
    assert "reports a failure" in reason
    # The rogue node is lost, which costs no restart.
    world = cluster.world(2)
    assert world[0]["restart"] == 0
    succeed(world, *nodes)
    assert not any("was broken" in node.output for node in nodes)


def claim_a_later_master(port: int) -> Refused:
    """Report a later epoch than exists. Return why the master ends the stream."""

    async def act() -> Refused:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
            rogue = Rogue(channel, status("rogue", epoch=2**61))
            hello = rogue.hello
            await rogue.send(hello)
            challenge = await rogue.receive()
            assert isinstance(challenge, Challenge)
            mac = auth.node_mac("", hello, challenge.nonce)
            await rogue.send(Proof(mac), Join(rogue.status, encode_rules(JobRules(min_nodes=2, max_nodes=2))))
            return await rogue.refused()

    return asyncio.run(act())


def test_a_master_does_not_step_down_because_one_node_reports_a_later_epoch(cluster: Cluster) -> None:
    nodes = cluster.nodes("ab", "2", "--max-restarts=1", "--rdzv-id=job")
    before = cluster.world(2)
    for _ in range(3):
        assert claim_a_later_master(cluster.port).retry
    os.kill(before[0]["pid"], signal.SIGKILL)
    after = cluster.world(2)
    assert after[0]["restart"] == 1
    assert not any("lost the master" in node.output for node in nodes)
    succeed(after, *nodes)


def test_a_node_whose_master_cannot_store_its_state_exits_at_once(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.node("a", "1:2", conf={"state_dir": tmp_path / ("x" * 300)})
    assert node.finish() == 2
    assert node.has_printed("cannot be created (File name too long)")


def test_with_auth_required_nothing_starts_without_credentials(cluster: Cluster) -> None:
    node = cluster.node("a", "1:2", conf={"auth": "required"})
    assert node.finish() == 2
    assert node.has_printed("auth=required, and this node has no credentials")
    assert cluster.mailbox.pending() == []


@pytest.mark.parametrize(
    ("way", "method"), [("variable", "spawn"), *only_long(("file of a variable", "forkserver"), ("setting", "spawn"))]
)
def test_the_token_is_in_no_environment_command_line_or_output(
    cluster: Cluster, tmp_path: Path, method: str, way: str
) -> None:
    file = tmp_path / "secret"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    env = {"variable": KNOWN, "file of a variable": {"DLROVER_RDZV_TOKEN_FILE": str(file)}}.get(way, {})
    conf = {"token_file": file} if way == "setting" else {}
    logs, state = tmp_path / "logs", tmp_path / "state"
    options = ("2", "--max-restarts=1", f"--log-dir={logs}", "-r", "3", f"--start-method={method}")
    nodes = cluster.nodes("ab", *options, env={**env, "LOGLEVEL": "DEBUG"}, conf={**conf, "state_dir": state})
    os.kill(cluster.world(2)[0]["pid"], signal.SIGKILL)
    world = cluster.world(2)
    processes = [process for node in nodes for process in node.processes] + [cluster.master()]
    seen = {}
    for process in processes:
        # A child process may have exited meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            seen |= {(process.pid, name): Path(f"/proc/{process.pid}/{name}").read_bytes() for name in PUBLIC}
    # The watchdog, the agent, the relay and the worker of each node, and the master.
    assert len({pid for pid, _ in seen}) >= 9
    assert b"TEST_MAILBOX" in seen[world[0]["pid"], "environ"], "the test can read environments"
    assert not [place for place, content in seen.items() if TOKEN.encode() in content]
    succeed(world, *nodes)
    written = [path for place in (logs, state) for path in place.rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert not [node.name for node in nodes if TOKEN in node.output]


def memory_of(pid: int) -> Iterator[bytes]:
    """All writable memory of a process."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            place, rights, *_ = line.split()
            begin, end = (int(number, 16) for number in place.split("-"))
            if rights.startswith("rw"):
                memory.seek(begin)
                with contextlib.suppress(OSError):
                    yield memory.read(end - begin)


@pytest.mark.parametrize("way", ["variable", *only_long("file")])
def test_the_token_is_in_the_memory_of_no_process_that_does_not_need_it(
    cluster: Cluster, tmp_path: Path, way: str
) -> None:
    file = tmp_path / "secret"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    env = KNOWN if way == "variable" else {"DLROVER_RDZV_TOKEN_FILE": str(file)}
    nodes = cluster.nodes("ab", "2", "--start-method=forkserver", env=env)
    world = cluster.world(2)
    holders = set()
    for process in nodes[0].processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
            if any(TOKEN.encode() in part for part in memory_of(process.pid)):
                holders.add(process.name())
    succeed(world, *nodes)
    assert "dlrover-agent" in holders, "the test can read memory, and the agent needs the token"
    assert "dlrover-relay" not in holders
    # The watchdog has read the token; the template and the workers never had it.
    assert len(holders) <= 2


def send_nonsense(port: int) -> None:
    for size in (1, 64, 4096, 1 << 20):
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.settimeout(WAIT)
            # The master may close the connection before it has received everything.
            with contextlib.suppress(OSError):
                line.sendall(os.urandom(size))
                line.shutdown(socket.SHUT_WR)
                while line.recv(65536):
                    pass


def pour_bytes(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.settimeout(WAIT)
        with contextlib.suppress(OSError):
            line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(HUNDRED_MEGABYTES))


def send_a_giant_message(port: int) -> None:
    async def call() -> None:
        unlimited = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=unlimited) as channel:
            stream = channel.stream_stream(METHOD)()
            # A stream that ended during a write reports why when it is read.
            with contextlib.suppress(grpc.aio.AioRpcError):
                await asyncio.wait_for(stream.write(b"x" * HUNDRED_MEGABYTES), WAIT)
            assert await asyncio.wait_for(stream.code(), WAIT) is grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(call())


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """An HTTP/2 frame."""
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


def reset_streams(port: int) -> None:
    """Open very many streams, and reset each before it can be answered."""
    words = {b":path": METHOD.encode(), b":authority": b"x", b"content-type": b"application/grpc", b"te": b"trailers"}
    header = b"\x83\x86" + b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(text)]) + text for name, text in words.items()
    )
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.settimeout(WAIT)
        with contextlib.suppress(OSError):
            line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
            for first in range(1, 2 * 100_000, 2 * 100):
                numbers = range(first, first + 2 * 100, 2)
                line.sendall(b"".join(frame(1, 4, n, header) + frame(3, 0, n, b"\0\0\0\x08") for n in numbers))


@pytest.mark.parametrize("do", [pour_bytes, *only_long(send_nonsense, send_a_giant_message, reset_streams)])
def test_invalid_clients_do_not_harm_a_running_job(cluster: Cluster, do: Callable[[int], None]) -> None:
    nodes = cluster.nodes("ab", "2", "--max-restarts=1")
    before = cluster.world(2)
    master = cluster.master()
    peak = peak_memory(master)
    do(cluster.port)
    assert cluster.mailbox.pending() == []
    # Its decisions show that the master still works.
    os.kill(before[0]["pid"], signal.SIGKILL)
    after = cluster.world(2)
    assert after[0]["restart"] == 1
    assert cluster.master() == master
    assert peak_memory(master) - peak < HUNDRED_MEGABYTES // 2
    assert not any("lost the master" in node.output for node in nodes)
    succeed(after, *nodes)


def peak_memory(process: psutil.Process) -> int:
    """The peak memory of the process in bytes."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_nodes_with_certificates_meet_and_a_node_without_is_refused(cluster: Cluster, etcd_certificates: Path) -> None:
    files = {"tls_ca": "ca.pem", "tls_cert": "client.pem", "tls_key": "client.key"}
    certificates = {name: etcd_certificates / file for name, file in files.items()}
    nodes = cluster.nodes("ab", "2", conf={**certificates, "auth": "required"})
    world = cluster.world(2)
    half = cluster.node("x", "2", conf={"tls_ca": certificates["tls_ca"], "is_host": 0})
    plain = cluster.node("y", "2", conf={"is_host": 0})
    for stranger in (half, plain):
        stranger.until_prints(f"waiting: the master at 127.0.0.1:{cluster.port} (")
        leave(stranger)
    assert cluster.mailbox.pending() == []
    succeed(world, *nodes)
