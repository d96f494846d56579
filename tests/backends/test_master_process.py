"""The master as a process: its command line, its exit, its secrets, and its successor after SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from support import master_process
from support.cluster import NEVER, Cluster, succeed
from support.harness import WAIT, environment, only_long
from support.master_node import FAST, Ended, Node, grpc, status
from support.master_process import COMMAND, master, read_line
from support.places import place_of
from support.virtual_loop import run_virtually

from dlrover_run.cli import parse
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.coordination.records.rules import RESULT_RETENTION
from dlrover_run.master import command
from dlrover_run.master.command import Options, read_options
from dlrover_run.master.journal import Journal
from dlrover_run.master.server import IdleShutdown
from dlrover_run.spec import JobSpec, SpecError
from dlrover_run.transport.grpc_setup import CHANNEL_OPTIONS, NEVER_MS, SERVER_OPTIONS
from dlrover_run.transport.messages import Proof, encode_rules


def talk(address: str, test: Callable[[Any], Awaitable[None]], credentials: Any = None) -> None:
    """Run `test` with a channel to the master, in a bounded time."""

    async def bounded() -> None:
        channel = (
            grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        )
        async with channel:
            await asyncio.wait_for(test(channel), WAIT)

    asyncio.run(bounded())


async def train(channel: Any, *names: str, job: str = "job", token: str = "") -> list[Node]:
    """Nodes that train in the first round."""
    nodes = [Node(channel, status(name), job, token) for name in names]
    for node in nodes:
        await node.join()
    for node in nodes:
        await node.take_ranks(1)
    return nodes


async def be_done(*nodes: Node) -> None:
    for phase in (NodePhase.SUCCEEDED, NodePhase.LEFT):
        for node in nodes:
            await node.report(phase=phase)
    for node in nodes:
        await node.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, *only_long(signal.SIGINT)])
def test_it_serves_until_it_is_terminated(number: signal.Signals) -> None:
    with master() as one:

        async def test(channel: Any) -> None:
            a, b = await train(channel, "a", "b")
            one.process.send_signal(number)
            for node in (a, b):
                refused = await node.refused()
                assert (refused.reason, refused.retry) == (f"the master ends: received {number.name}", True)

        talk(one.address, test)
        code, output = one.finish()
        assert code == 0
        assert output.splitlines() == [
            f"dlrover-master: listens on {one.address}",
            "dlrover-master: job 'job': begins, for 2 nodes",
            "dlrover-master: job 'job': round 1 with 2 nodes: 2 nodes are here",
            f"dlrover-master: ends: received {number.name}",
        ]


def test_with_an_idle_timeout_it_exits_when_no_node_joins() -> None:
    with master("--idle-timeout", "0.1", env={"DLROVER_RDZV_TOKEN": "short"}) as one:
        code, output = one.finish()
        assert code == 0
        assert "ends: no node was connected for 0.1 s" in output
        assert sum("has fewer than 16 characters" in line for line in output.splitlines()) == 1


def test_with_an_idle_timeout_it_exits_after_its_last_job_and_not_before() -> None:
    with master("--idle-timeout", str(10 * WAIT)) as one:

        async def test(channel: Any) -> None:
            first, second = await train(channel, "a", "b", job="one"), await train(channel, "a", "b", job="two")
            await be_done(*first)
            await second[0].report()
            await second[0].until(bool)
            await be_done(*second)

        talk(one.address, test)
        code, output = one.finish()
        assert code == 0
        assert "ends: every job is over" in output


@pytest.mark.parametrize("number", [signal.SIGHUP, *only_long(signal.SIGQUIT)])
def test_a_terminal_signal_ends_only_a_master_that_a_user_started(number: signal.Signals) -> None:
    with master("--idle-timeout", str(10 * WAIT)) as hosted, master() as alone:
        # A master that an agent started also hides its arguments, so that `pkill -f` with the job's script does not
        # match it.
        assert psutil.Process(hosted.process.pid).cmdline() == ["dlrover-master"]
        assert "--listen" in psutil.Process(alone.process.pid).cmdline()

        async def test(channel: Any) -> None:
            a, b = await train(channel, "a", "b")
            hosted.process.send_signal(number)
            await a.report()
            await a.until(bool)
            await be_done(a, b)

        talk(hosted.address, test)
        code, output = hosted.finish()
        assert code == 0, output
        assert "ends: every job is over" in output
        alone.process.send_signal(number)
        assert alone.finish()[0] == -number


SLOW_TO_END = """
import sys
from dlrover_run.master import server
server.ASKED_TIMEOUT = 3600.0
from dlrover_run.master.command import main
sys.exit(main(sys.argv[1:]))
"""
"""A master that waits an hour after SIGTERM for nodes to reconnect, so that no timeout ends it."""


def test_a_terminated_master_serves_nodes_that_only_lost_their_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(master_process, "COMMAND", (sys.executable, "-c", SLOW_TO_END))
    with master("--idle-timeout", str(10 * WAIT)) as one:

        async def test(channel: Any) -> None:
            a, b = await train(channel, "a", "b")
            one.process.terminate()
            await a.report()
            await a.until(bool)
            for node in (a, b):
                await node.close()
            back = [Node(channel, status(name, "two")) for name in "ab"]
            for node in back:
                await node.join()
                await node.until(bool)
            for node in back:
                await node.report(phase=NodePhase.LEFT)
                await node.close()

        talk(one.address, test)
        code, output = one.finish()
        assert code == 0, output
        assert output.endswith("ends: received SIGTERM\n")


@pytest.mark.parametrize(("timeout", "ended"), [(None, 5.0), (15.0, 5.0), (2.0, 2.0)])
def test_a_terminated_master_exits_soon_after_its_last_node(timeout: float | None, ended: float) -> None:
    async def test() -> None:
        ends: list[tuple[float, str]] = []
        loop = asyncio.get_running_loop()
        idleness = IdleShutdown(timeout, lambda reason: ends.append((loop.time(), reason)))
        idleness.update(2, False)
        idleness.request("received SIGTERM")
        idleness.update(2, False)
        await asyncio.sleep(100.0)
        idleness.update(0, False)
        await asyncio.sleep(1.0)
        idleness.update(1, False)
        await asyncio.sleep(100.0)
        assert ends == []
        idleness.update(0, False)
        await asyncio.sleep(100.0)
        assert ends == [(201.0 + ended, "received SIGTERM")]

    run_virtually(test())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "the following arguments are required: --listen"),
        (["--listen", "localhost:http"], "--listen 'localhost:http' has an invalid port"),
        (["--listen", "::1"], "--listen '::1' has an invalid host"),
        (["--idle-timeout", "soon"], "--idle-timeout 'soon' is not a number"),
        (["--token-fd", "-1"], "--token-fd '-1' is out of range"),
        (["--token-fd", "777"], "--token-fd 777 cannot be read"),
        (["--token-file", "/nowhere"], "--token-file '/nowhere' cannot be read"),
        (["--state-dir", "/dev/null/x"], "--state-dir '/dev/null/x' cannot be created"),
        (["--tls-cert", "/nowhere", "--tls-key", "x"], "--tls-cert '/nowhere' cannot be"),
        (["--tls-key", "/etc/hostname"], "--tls-key '/etc/hostname'"),
        (["--auth-required"], "--auth-required, and the master has no credentials"),
        (["--listne", "1"], "unrecognized arguments: --listne 1"),
    ],
)
def test_a_wrong_option_is_named(args: list[str], words: str) -> None:
    listen = [] if not args or "--listen" in args else ["--listen", "127.0.0.1:0"]
    with pytest.raises(SpecError) as raised:
        read_options([*listen, *args], {})
    assert str(raised.value).startswith(words)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--listen", "127.0.0.1:0", "--token-fd", "0"], 2, "--token-fd 0 contains an empty token"),
        (["--listen", "127.0.0.1:0", "--state-dir", "x" * 300], 2, "--state-dir 'xxx"),
        (
            ["--listen", "127.0.0.1:0", "--tls-cert", "server.pem", "--tls-key", "client.key"],
            2,
            "--tls-cert, --tls-key or --tls-ca cannot be used: ",
        ),
        (["--listen", "192.0.2.1:0"], 71, "--listen '192.0.2.1:0'"),
        (["--listen", "no-such-host.invalid:0"], 71, "--listen 'no-such-host.invalid:0'"),
        (["--listen", "taken"], 71, "--listen '127.0.0.1:"),
    ],
)
def test_a_master_that_cannot_start_reports_it_in_one_line_and_to_its_launcher(
    etcd_certificates: Path, args: list[str], code: int, words: str
) -> None:
    ready, theirs = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = subprocess.run(
            [*COMMAND, "--ready-fd", str(theirs), *(address if word == "taken" else word for word in args)],
            env=environment(),
            cwd=etcd_certificates,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            pass_fds=[theirs],
            timeout=WAIT,
            check=False,
        )
    os.close(theirs)
    assert run.returncode == code
    assert run.stderr.startswith(f"dlrover-master: {words}")
    assert len(run.stderr.splitlines()) == 1
    answer = read_line(ready)
    assert answer["error"] in run.stderr
    assert answer["is_user_error"] is (code == 2)


@pytest.mark.parametrize(
    ("token", "mode", "warnings"),
    [
        ("x" * 16, 0o600, []),
        ("x" * 15, 0o600, ["has fewer than 16 characters"]),
        ("x" * 16, 0o640, ["can be read by other users"]),
        ("x", 0o604, ["has fewer than 16 characters", "can be read by other users"]),
    ],
)
def test_a_weak_token_gives_a_warning_in_one_line(tmp_path: Path, token: str, mode: int, warnings: list[str]) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    file.chmod(mode)
    found = read_options(["--listen", "127.0.0.1:0"], {"DLROVER_RDZV_TOKEN_FILE": str(file)}).warnings
    assert len(found) == bool(warnings)
    assert all(words in found[0] for words in warnings)
    assert all("DLROVER_RDZV_TOKEN_FILE" in sentence and f" {token} " not in sentence for sentence in found)
    by_variable = read_options(["--listen", "127.0.0.1:0"], {"DLROVER_RDZV_TOKEN": token}).warnings
    assert len(by_variable) == ("fewer" in str(warnings))


def test_a_token_file_that_can_be_read_only_once_is_accepted_by_each_program() -> None:
    by_line: dict[str, Callable[[dict[str, str]], str]] = {
        "master": lambda env: read_options(["--listen", "127.0.0.1:0"], env).token,
        "job": lambda env: found(parse(["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1", __file__], env)),
    }
    for program, read in by_line.items():
        reading, writing = os.pipe()
        os.write(writing, b"x" * 16)
        os.close(writing)
        try:
            token = read({"DLROVER_RDZV_TOKEN_FILE": f"/dev/fd/{reading}"})
        finally:
            os.close(reading)
        assert token == "x" * 16, program


def found(spec: JobSpec) -> str:
    assert place_of(spec).master is not None
    return place_of(spec).master.token


def hold_connections(address: str, number: int) -> list[socket.socket]:
    """Unauthenticated connections that send at most one byte."""
    host, _, port = address.rpartition(":")
    held = []
    for _ in range(number):
        with contextlib.suppress(OSError):
            held.append(socket.create_connection((host, int(port))))
            held[-1].send(b"P")
    return held


PATIENT = """
import sys
from dlrover_run.transport import grpc_setup
grpc_setup.SERVER_OPTIONS[:] = [
    (name, 3_600_000 if name.endswith("_ms") else value) for name, value in grpc_setup.SERVER_OPTIONS
]
from dlrover_run.master.command import main
sys.exit(main(sys.argv[1:]))
"""
"""A master that gives unauthenticated connections an hour, so that no timeout makes room for others."""


def test_idle_connections_do_not_block_a_node_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def come(channel: Any) -> None:
        while True:
            with contextlib.suppress(Ended):
                await Node(channel, status("a"), token="a-token-of-this-test").join()
                return
            await asyncio.sleep(0.05)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    monkeypatch.setattr(master_process, "COMMAND", (sys.executable, "-c", PATIENT))
    with master(env={"DLROVER_RDZV_TOKEN": "a-token-of-this-test"}, preexec_fn=limit) as one:
        strangers = hold_connections(one.address, 300)
        talk(one.address, come)
        for stranger in strangers:
            stranger.close()


def test_it_needs_neither_torch_nor_typer() -> None:
    code = (
        "import sys, dlrover_run.master.command, dlrover_run.master.server; "
        "dlrover_run.master.server.load_grpc(); "
        "print(sorted({'torch', 'typer', 'rich', 'numpy', 'google.protobuf'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT, check=True)
    assert run.stdout == "[]\n"


@pytest.mark.parametrize("way", ["variable", "file", "descriptor"])
def test_a_token_is_not_an_argument_and_is_never_printed(way: str, tmp_path: Path) -> None:
    secret = "open-sesame-1234"
    env: dict[str, str | None] = {"DLROVER_RDZV_TOKEN": secret} if way == "variable" else {}
    args: list[str] = []
    fds: list[int] = []
    if way == "file":
        (tmp_path / "token").write_text(f"{secret}\n")
        (tmp_path / "token").chmod(0o600)
        args = ["--token-file", str(tmp_path / "token")]
    if way == "descriptor":
        fds = [os.memfd_create("token")]
        os.write(fds[0], secret.encode())
        os.lseek(fds[0], 0, os.SEEK_SET)
        args = ["--token-fd", str(fds[0])]
    with master("--auth-required", *args, env=env, pass_fds=fds) as one:
        for fd in fds:
            os.close(fd)
        showing = [
            n for n in ("cmdline", "environ") if secret.encode() in Path(f"/proc/{one.process.pid}/{n}").read_bytes()
        ]
        assert showing == []

        async def test(channel: Any) -> None:
            await train(channel, "a", "b", token=secret)
            stranger = Node(channel, status("c"))
            await stranger.send(stranger.hello, Proof("0" * 64))
            assert secret not in (await stranger.refused()).reason

        talk(one.address, test)
        one.process.terminate()
        _, output = one.finish()
        assert "this node's token is not the master's" in output
        assert secret not in output
        assert "warning" not in output


def test_a_public_address_is_distinguished_from_a_local_one() -> None:
    for host in ("127.0.0.1", "localhost", "127.0.0.2"):
        assert all(address.loopback for address in command._addresses(Options(host, 0)))
    for host in ("0.0.0.0", "192.0.2.1"):
        assert not all(address.loopback for address in command._addresses(Options(host, 0)))


def test_the_successor_of_a_killed_master_continues_the_same_round(tmp_path: Path) -> None:
    nodes: list[Node] = []
    with master("--state-dir", tmp_path) as one:

        async def begin(channel: Any) -> None:
            nodes.extend(await train(channel, "a", "b"))
            one.process.kill()
            for node in nodes:
                with contextlib.suppress(AssertionError):
                    await node.ended()

        talk(one.address, begin)
        one.finish()
    # A record that the end of the machine truncated.
    (path,) = tmp_path.iterdir()
    with path.open("ab") as file:
        file.write(b'deadbeef {"epoch":')
    with master("--state-dir", tmp_path, listen=one.address) as two:

        async def go_on(channel: Any) -> None:
            for before in nodes:
                node = Node(channel, before.status)
                welcome = await node.join()
                assert welcome.rules == encode_rules(FAST)
                wanted = await node.until(bool)
                assert wanted.ranks == before.status.ranks
                assert wanted.epoch > before.status.epoch

        talk(two.address, go_on)


def test_the_name_of_a_job_that_ended_before_the_master_began_is_free(tmp_path: Path) -> None:
    """As in a storm of faults: all nodes and the master were gone when the result had just been stored."""
    ended = Plan(
        epoch=7,
        phase=PlanPhase.FAILED,
        key=RoundKey(7, 5),
        members=tuple(status(name).member for name in "ab"),
        store_address="127.0.0.1",
        store_port=1,
    )
    journal = Journal(tmp_path, "job")
    journal.take_over(FAST, 7)
    journal.append(ended)
    journal.close()
    age = RESULT_RETENTION / 2
    decided = time.time() - age
    os.utime(journal.path, (decided, decided))
    for _ in range(2):
        # The second master takes over what the first one has written.
        with master("--state-dir", tmp_path, "--idle-timeout", str(NEVER)) as one:

            async def join(channel: Any) -> None:
                with pytest.raises(AssertionError, match="has just ended; its name is free again in a moment"):
                    await Node(channel, status("new")).join()

            talk(one.address, join)
            one.process.kill()
            assert time.time() - journal.path.stat().st_mtime >= age
    decided -= age
    os.utime(journal.path, (decided, decided))
    # The first node that comes then is not refused once more: it may find no master when it asks again.
    with master("--state-dir", tmp_path) as one:

        async def begin(channel: Any) -> None:
            await train(channel, "c", "d")

        talk(one.address, begin)


def test_a_master_that_keeps_a_result_is_not_idle() -> None:
    async def test() -> None:
        ends: list[str] = []
        idleness = IdleShutdown(15.0, ends.append)
        idleness.update(1, False, False)
        idleness.update(0, False, True)
        await asyncio.sleep(100.0)
        assert ends == []
        idleness.update(0, True, False)
        assert ends == ["every job is over"]

    run_virtually(test())


def test_no_ping_of_grpc_ends_a_connection_whose_silence_the_rules_allow() -> None:
    for options in (dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)):
        assert options["grpc.keepalive_time_ms"] == options["grpc.http2.ping_timeout_ms"] == NEVER_MS


@pytest.mark.long
def test_a_pause_that_the_rules_allow_ends_no_connection() -> None:
    rules = msgspec.structs.replace(FAST, keep_alive_interval=30.0, keep_alive_attempts=3)
    with master() as one:

        async def test(channel: Any) -> None:
            node = Node(channel, status("a"))
            await node.join(rules)
            one.process.send_signal(signal.SIGSTOP)
            # Longer than a ping and its timeout were, 10 s in all.
            await asyncio.sleep(15)
            one.process.send_signal(signal.SIGCONT)
            await node.report(workers=2)
            await node.until(bool)

        talk(one.address, test)


def test_it_serves_though_its_output_is_not_read() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 65536)
    os.set_blocking(write, True)
    with master(stderr=write) as one:
        os.close(write)
        talk(one.address, lambda channel: train(channel, "a", "b"))  # type: ignore[arg-type, return-value]
        one.process.terminate()
        assert one.process.wait(WAIT) == 0
    os.close(read)


@pytest.mark.parametrize("every_node_proves_itself", [False, True])
def test_tls_admits_only_nodes_that_trust_the_master_and_that_it_trusts(
    etcd_certificates: Path, every_node_proves_itself: bool
) -> None:
    folder = etcd_certificates

    def credentials(name: str | None, ca: str = "ca") -> Any:
        own = (None, None) if name is None else [(folder / f"{name}{end}").read_bytes() for end in (".key", ".pem")]
        return grpc.ssl_channel_credentials((folder / f"{ca}.pem").read_bytes(), *own)

    async def be_turned_away(channel: Any) -> None:
        with pytest.raises(Ended):
            await Node(channel, status("s")).join()

    async def be_let_in(channel: Any) -> None:
        await train(channel, "a", "b")

    args = ("--tls-ca", folder / "ca.pem", "--auth-required") if every_node_proves_itself else ()
    with master("--tls-cert", folder / "server.pem", "--tls-key", folder / "server.key", *args) as one:
        strangers = [None, credentials("client", "other-ca")]
        strangers += [credentials(None), credentials("stranger")] if every_node_proves_itself else []
        for stranger in strangers:
            talk(one.address, be_turned_away, stranger)
        talk(one.address, be_let_in, credentials("client" if every_node_proves_itself else None))


def test_a_master_exits_with_its_last_job(cluster: Cluster) -> None:
    """The nodes find it by the environment variable."""
    master = cluster.stand_alone_master(f"--idle-timeout={NEVER}")
    nodes = cluster.nodes("ab", "2", endpoint=0, env={"DLROVER_MASTER_ADDR": f"127.0.0.1:{cluster.port}"})
    succeed(cluster.world(2), *nodes)
    master.until_prints("ends: every job is over")
    assert master.finish() == 0
