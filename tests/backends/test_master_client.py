"""A node's end of the stream to a master: what it sends, what it obeys, and how it handles the loss of the master."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from scripted_master import Script, ScriptedMaster, Stream
from support.harness import WAIT

from dlrover_run.coordination.records.assignment import Peer
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.round import Failure, RoundKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.rendezvous import cut_off, kinds, reconnect
from dlrover_run.rendezvous.master_client.client import MasterClient
from dlrover_run.rendezvous.reconnect import Reaches
from dlrover_run.spec import Entrypoint, JobSpec
from dlrover_run.transport import grpc_setup
from dlrover_run.transport.messages import Challenge, Hello, Proof, Refused
from dlrover_run.words.reasons import sentence

STATUS = NodeReport(node_id="n0", incarnation="a", host="here", address="", port=0, workers=1)


def status(**fields: Any) -> NodeReport:
    return msgspec.structs.replace(STATUS, **fields)


class Node:
    """A client, the lines that it printed, and whether it has called its listener."""

    def __init__(
        self,
        port: int,
        rules: JobRules | None = None,
        master: dict[str, Any] | None = None,
        reaches: Reaches = cut_off.reaches,
        local_addr: str | None = None,
    ) -> None:
        spec = kinds.Master("127.0.0.1", port, is_host=False)
        self.output: list[str] = []
        self._news = asyncio.Event()
        self.client = MasterClient(
            JobSpec(
                entrypoint=Entrypoint("script", "train.py"),
                run_id="job",
                rules=rules or JobRules(),
                rendezvous=msgspec.structs.replace(spec, **(master or {})),
                local_addr=local_addr,
            ),
            self._news.set,
            self._print,
            reaches=reaches,
        )

    def _print(self, line: str) -> None:
        self.output.append(line)
        self._news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition is true; it is tested after each event of the client."""
        while not condition():
            await asyncio.wait_for(self._news.wait(), WAIT)
            self._news.clear()


def alone(scene: Callable[[], Awaitable[None]]) -> None:
    """Run a scene. A task that is left over is a defect of the client."""

    async def play() -> None:
        await scene()
        assert [task for task in asyncio.all_tasks() if "/rendezvous/" in repr(task)] == []

    asyncio.run(play())


@contextlib.asynccontextmanager
async def meeting(
    *scripts: Script,
    rules: JobRules | None = None,
    reaches: Reaches = cut_off.reaches,
    local_addr: str | None = None,
    **master: Any,
) -> AsyncIterator[tuple[Node, ScriptedMaster]]:
    """A node that has reported its status, and the master that it connects to."""
    server = ScriptedMaster(*scripts)
    node = Node(await server.start(), rules, master, reaches, local_addr)
    node.client.report(STATUS)
    try:
        yield node, server
    finally:
        await node.client.close()
        await server.stop()
    assert server.failure is None


async def until_the_end(stream: Stream) -> None:
    """Receive from a node until it ends the stream."""
    with contextlib.suppress(EOFError):
        while True:
            await stream.receive()


def assigns(*reasons: str, then: Script = until_the_end, token: str = "", rules: JobRules | None = None) -> Script:
    """The script of a master that accepts a node and sends an assignment for each of these reasons."""

    async def script(stream: Stream) -> None:
        await stream.welcome(rules, token=token)
        for reason in reasons:
            await stream.assign(reasons=sentence(reason))
        await then(stream)

    return script


async def end_at_once(stream: Stream) -> None:
    pass


take_in = assigns("taken in")


async def refuse_to_be_met(stream: Stream) -> None:
    raise AssertionError("no one was to be called")


def refuses(reason: str, retry: bool = False, over: bool = False) -> Script:
    async def script(stream: Stream) -> None:
        await stream.challenge()
        await stream.send(Refused(reason, retry, over))

    return script


def has_reason(node: Node, reason: str) -> Callable[[], bool]:
    return lambda: node.client.assignment.reason == reason


def problem(node: Node) -> str:
    """Why the client has failed; empty while it has not."""
    return node.client.problem or ""


def waits_for(node: Node) -> str:
    waiting = node.client.assignment.waiting
    return waiting.text if waiting is not None else ""


def server_port(node: Node) -> int:
    return node.client._master.port


def test_a_node_joins_and_follows_its_assignments() -> None:
    received: list[NodeReport] = []

    async def script(stream: Stream) -> None:
        received.append(await stream.welcome())
        await stream.assign(reasons=sentence("first"))
        received.append(await stream.status())
        await stream.assign(reasons=sentence("second"))
        await until_the_end(stream)

    async def scene() -> None:
        async with meeting(script) as (node, _):
            await node.until(has_reason(node, "first"))
            node.client.report(status(phase=NodePhase.RUNNING))
            await node.until(has_reason(node, "second"))
            assert node.output == []
        async with meeting(script, local_addr="10.1.2.3") as (node, _):
            await node.until(has_reason(node, "first"))

    alone(scene)
    assert [(status.phase, status.address) for status in received] == [
        (NodePhase.WAITING, "127.0.0.1"),
        (NodePhase.RUNNING, "127.0.0.1"),
        (NodePhase.WAITING, "10.1.2.3"),
    ]


CUT_OFF = JobRules(cut_off_timeout=0.03)
PEERS = (Peer("10.0.0.2", 2000), Peer("10.0.0.3", 3000))


async def assign_peers_and_end(stream: Stream) -> None:
    await stream.welcome()
    await stream.assign(reasons=sentence("trains"), peers=PEERS)
    await stream.status()


class Machines:
    """Answers this many probes of a node."""

    def __init__(self, answers: int) -> None:
        self.left = answers
        self.probed: list[tuple[str, int]] = []

    async def reaches(self, host: str, port: int) -> bool:
        self.probed.append((host, port))
        self.left -= 1
        return self.left >= 0


def test_a_node_that_is_cut_off_exits_so_that_it_can_be_replaced() -> None:
    async def scene() -> None:
        machines = Machines(answers=20)
        async with meeting(assign_peers_and_end, end_at_once, rules=CUT_OFF, reaches=machines.reaches) as (node, _):
            await node.until(lambda: node.client.assignment.peers == PEERS)
            node.client.report(status(phase=NodePhase.RUNNING))
            await node.until(lambda: node.client.problem)
            assert node.client.is_cut_off
            assert "this node is cut off: neither the master at " in str(node.client.problem)
            assert "0.03 s (--rdzv-conf cut_off_timeout)" in str(node.client.problem)
        # While one of two peers answered, the node continued, and it probed both each time.
        assert len(machines.probed) > 20
        assert set(machines.probed) == {(peer.address, peer.port) for peer in PEERS}

    alone(scene)


@pytest.mark.parametrize("rules", [JobRules(cut_off_timeout=0.0), CUT_OFF], ids=["never", "answers"])
def test_the_loss_of_the_master_ends_no_node_that_reaches_others(rules: JobRules) -> None:
    async def scene() -> None:
        machines = Machines(answers=10**6)
        came_back = asyncio.Event()

        async def script(stream: Stream) -> None:
            if len(machines.probed) < 10 and rules is CUT_OFF:
                return
            await stream.welcome()
            came_back.set()
            await until_the_end(stream)

        async with meeting(assign_peers_and_end, script, rules=rules, reaches=machines.reaches) as (node, _):
            await node.until(lambda: node.client.assignment.peers == PEERS)
            node.client.report(status(phase=NodePhase.RUNNING))
            await asyncio.wait_for(came_back.wait(), WAIT)
            assert node.client.problem is None
            assert not node.client.is_cut_off
        assert bool(machines.probed) == (rules is CUT_OFF)

    alone(scene)


def test_an_unchanged_status_is_not_sent_and_only_the_latest_of_several_is() -> None:
    async def script(stream: Stream) -> None:
        status = await stream.status()
        await stream.assign(reasons=sentence(f"received {status.port}"))
        await until_the_end(stream)

    async def scene() -> None:
        rules = JobRules(keep_alive_interval=1000.0)
        async with meeting(assigns("taken in", then=script, rules=rules)) as (node, _):
            await node.until(has_reason(node, "taken in"))
            node.client.report(STATUS)
            for port in range(1, 50):
                node.client.report(status(port=port))
            await node.until(has_reason(node, "received 49"))

    alone(scene)


@pytest.mark.parametrize("turns", [None, *range(8)])
def test_the_last_status_is_sent_though_an_earlier_one_is_in_flight(turns: int | None) -> None:
    received: list[NodePhase] = []

    async def script(stream: Stream) -> None:
        with contextlib.suppress(EOFError):
            while True:
                received.append((await stream.status()).phase)

    async def scene() -> None:
        async with meeting(assigns("taken in", then=script)) as (node, _):
            await node.until(has_reason(node, "taken in"))
            if turns is not None:
                node.client.report(status(phase=NodePhase.FAILED))
            for _ in range(turns or 0):
                # One iteration of the event loop.
                await asyncio.sleep(0)
            node.client.report(status(phase=NodePhase.LEFT))

    alone(scene)
    assert received[-1] is NodePhase.LEFT


@pytest.mark.parametrize(
    ("assignments", "obeyed", "ignored"),
    [
        pytest.param(
            [(7, None, None, "new"), (6, None, PlanPhase.FAILED, "old"), (7, None, None, "newer")],
            "newer",
            "old",
            id="an older coordinator",
        ),
        pytest.param(
            [(1, RoundKey(1, 3), None, "third"), (2, None, None, "nothing yet"), (2, RoundKey(1, 3), None, "adopted")],
            "adopted",
            "nothing yet",
            id="a master that does not know the latest round yet",
        ),
    ],
)
def test_an_assignment_of_an_older_epoch_is_ignored(
    assignments: list[tuple[int, RoundKey | None, PlanPhase | None, str]], obeyed: str, ignored: str
) -> None:
    async def script(stream: Stream) -> None:
        for epoch, key, phase, reason in assignments:
            fields = {name: value for name, value in (("key", key), ("phase", phase)) if value is not None}
            await stream.assign(epoch=epoch, reasons=sentence(reason), **fields)
        await until_the_end(stream)

    async def scene() -> None:
        reasons: list[str] = []
        async with meeting(assigns(then=script)) as (node, _):
            await node.until(lambda: reasons.append(node.client.assignment.reason) or reasons[-1] == obeyed)
        assert ignored not in reasons

    alone(scene)


@pytest.mark.parametrize("retry", [True, False])
def test_a_restarted_master_that_refuses_a_node_does_not_end_its_workers(retry: bool) -> None:
    async def break_off(stream: Stream) -> None:
        assert (await stream.status()).phase is NodePhase.RUNNING

    refuse = refuses("the journal is damaged", retry)

    async def scene() -> None:
        async with meeting(assigns("taken in", then=break_off), refuse, refuse, take_in) as (node, _):
            await node.until(has_reason(node, "taken in"))
            node.client.report(status(phase=NodePhase.RUNNING))
            place = f"the master at 127.0.0.1:{server_port(node)}"
            await node.until(lambda: f"{place} is back" in node.output)
            assert node.output == [
                f"lost {place}; running workers do not need it",
                f"{place} refuses this node: the journal is damaged; running workers do not need it",
                f"{place} is back",
            ]
            assert not problem(node)

    alone(scene)


@pytest.mark.parametrize("retry", [True, False])
def test_a_master_that_ends_a_stream_with_a_reason(retry: bool) -> None:
    async def end(stream: Stream) -> None:
        await stream.send(Refused("the master ends: SIGTERM came", retry))

    async def scene() -> None:
        async with meeting(assigns("taken in", then=end), take_in) as (node, _):
            await node.until(lambda: problem(node) or any("is back" in line for line in node.output))
            assert bool(problem(node)) is not retry

    alone(scene)


def test_a_warning_of_the_master_is_printed_once() -> None:
    async def script(stream: Stream) -> None:
        await stream.welcome(notice="your rules are others")
        await stream.assign(reasons=sentence("taken in"), restart_count=master[0].streams)
        if master[0].streams > 1:
            await until_the_end(stream)

    master: list[ScriptedMaster] = []

    async def scene() -> None:
        async with meeting(script) as (node, server):
            master.append(server)
            await node.until(lambda: node.client.assignment.restart_count == 2)
            assert [line for line in node.output if "rules" in line] == ["warning: your rules are others"]

    alone(scene)


async def be_silent(stream: Stream) -> None:
    await stream.welcome(JobRules(keep_alive_interval=0.05, keep_alive_attempts=2))
    await until_the_end(stream)


async def flood(stream: Stream) -> None:
    await stream.receive()
    await stream._context.write(b"x" * (100 * 1024 * 1024))


async def cancel(stream: Stream) -> None:
    await stream._context.abort(grpc_setup.load_grpc().StatusCode.CANCELLED, "")


def writes(what: bytes) -> Script:
    async def script(stream: Stream) -> None:
        await stream.receive()
        await stream._context.write(what)
        await until_the_end(stream)

    return script


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(be_silent, id="silent"),
        # The server's own limit would reject it first.
        pytest.param(flood, id="100 MB"),
        pytest.param(cancel, id="cancels at once"),
        pytest.param(assigns("to be cancelled", then=cancel), id="cancels later"),
        pytest.param(writes(b""), id="nothing"),
        pytest.param(writes(b"\xff\x00"), id="no text"),
        pytest.param(writes(b'{"type":"report"}'), id="another message"),
        pytest.param(writes(b"[" * 100_000), id="deep"),
    ],
)
def test_after_a_protocol_error_of_the_master_the_node_reconnects(first: Script) -> None:
    async def scene() -> None:
        async with meeting(first, take_in) as (node, server):
            await node.until(has_reason(node, "taken in"))
            assert server.streams == 2
            server.failure = None

    alone(scene)


@pytest.mark.parametrize("phase", [PlanPhase.FINISHED, PlanPhase.FAILED])
def test_a_node_does_not_reconnect_after_its_job_has_finished(phase: PlanPhase) -> None:
    async def end(stream: Stream) -> None:
        await stream.welcome()
        await stream.assign(phase=phase)

    async def scene() -> None:
        async with meeting(end, refuse_to_be_met) as (node, _):
            await node.until(lambda: node.client.assignment.phase is phase)
            await asyncio.wait_for(asyncio.shield(node.client._task), WAIT)
            assert node.output == []

    alone(scene)


@pytest.mark.parametrize("other", ["", "wrong"])
def test_a_master_that_cannot_prove_the_token_is_not_obeyed(other: str) -> None:
    async def script(stream: Stream) -> None:
        await stream.challenge(other)

    async def scene() -> None:
        async with meeting(script, token="secret") as (node, _):
            await node.until(lambda: problem(node))
        assert "does not know this job's token" in problem(node)
        assert "secret" not in problem(node)

    alone(scene)


def test_an_unauthenticated_master_in_place_of_a_lost_one_ends_no_running_job() -> None:
    async def be_a_stranger(stream: Stream) -> None:
        hello = await stream.receive()
        assert isinstance(hello, Hello)
        await stream.send(Challenge("0" * 64))
        await stream.send(Proof("1" * 64))
        await until_the_end(stream)

    async def refuse(stream: Stream) -> None:
        await stream.send(Refused("this master speaks another protocol"))

    scripts = (
        assigns("taken in", then=end_at_once, token="secret"),
        be_a_stranger,
        refuse,
        assigns("back", token="secret"),
    )

    async def scene() -> None:
        async with meeting(*scripts, token="secret") as (node, _):
            await node.until(has_reason(node, "back"))
            assert not problem(node)

    alone(scene)


def test_a_node_whose_job_has_ended_meanwhile_ends_though_its_workers_train() -> None:
    async def break_off(stream: Stream) -> None:
        assert (await stream.status()).phase is NodePhase.RUNNING

    async def scene() -> None:
        script = assigns("taken in", then=break_off), refuses("the job has ended", over=True), refuse_to_be_met
        async with meeting(*script) as (node, _):
            await node.until(has_reason(node, "taken in"))
            node.client.report(status(phase=NodePhase.RUNNING))
            await node.until(lambda: problem(node))
            place = f"the master at 127.0.0.1:{server_port(node)}"
            assert problem(node) == f"{place} refuses this node: the job has ended"

    alone(scene)


def test_a_permanent_refusal_ends_the_client_with_its_reason() -> None:
    async def scene() -> None:
        async with meeting(refuses("the job has too many nodes"), refuse_to_be_met) as (node, _):
            await node.until(lambda: problem(node))
            place = f"the master at 127.0.0.1:{server_port(node)}"
            assert problem(node) == f"{place} refuses this node: the job has too many nodes"

    alone(scene)


def test_a_temporary_refusal_is_retried_until_a_timeout() -> None:
    refuse = refuses("node id n0 is in use", retry=True)

    async def scene() -> None:
        async with meeting(refuse, refuse, take_in) as (node, _):
            await node.until(lambda: "node id n0 is in use" in waits_for(node))
            await node.until(has_reason(node, "taken in"))
        async with meeting(refuse) as (node, _):
            node.client._backoff.refusal_timeout = 0.0
            await node.until(lambda: problem(node).endswith("node id n0 is in use"))

    alone(scene)


def test_a_node_whose_workers_have_exited_waits_for_a_lost_master_until_a_timeout() -> None:
    async def scene() -> None:
        server = ScriptedMaster(assigns("taken in", then=end_at_once, rules=JobRules(master_timeout=0.3)))
        node = Node(await server.start())
        node.client.report(status(phase=NodePhase.RUNNING))
        await node.until(has_reason(node, "taken in"))
        await server.stop()
        await node.until(lambda: node.output)
        failed = status(phase=NodePhase.FAILED, failure=Failure(rank=1, host="a", exit_text="exited with code 3"))
        node.client.report(failed)
        assert node.client.is_away
        place = f"the master at 127.0.0.1:{server_port(node)}"
        assert node.output == [
            f"lost {place}; running workers do not need it",
            f"rank 1 failed: exited with code 3; this node waits for {place}, at most 0 s",
        ]
        await node.until(lambda: "was unreachable for 0.3 s (--rdzv-conf master_timeout)" in problem(node))
        await node.client.close()

    alone(scene)


def test_a_client_closes_in_bounded_time_though_the_master_receives_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconnect, "CLOSE_TIMEOUT", 0.01)

    async def scene() -> None:
        stop = asyncio.Event()

        async def receive_nothing(stream: Stream) -> None:
            await stop.wait()

        async with meeting(assigns("taken in", then=receive_nothing)) as (node, _):
            await node.until(has_reason(node, "taken in"))
            await asyncio.wait_for(node.client.close(), WAIT)
            stop.set()

    alone(scene)


@pytest.mark.parametrize(
    ("master", "words"),
    [
        ({}, "the connection was refused"),
        ({"tls": kinds.TlsSpec(ca="/nowhere/absent.pem")}, "absent.pem"),
        ({"host": "no-such-host.invalid"}, "no-such-host.invalid has no address"),
    ],
)
def test_a_client_that_is_closed_while_it_connects_closes_at_once(
    free_port: int, master: dict[str, Any], words: str
) -> None:
    async def scene() -> None:
        node = Node(free_port, master=master)
        node.client.report(STATUS)
        await node.until(lambda: words in waits_for(node))
        await asyncio.wait_for(node.client.close(), WAIT)

    alone(scene)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another program listens there, which is not a master: give"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "another program listens there, which is not a master: give"),
        (b"", "it closed the connection, as a master with TLS does to a node without"),
    ],
)
def test_another_program_at_the_endpoint_is_reported_as_such(answer: bytes, words: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await reader.read(1)
        writer.close()

    async def scene() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        node = Node(server.sockets[0].getsockname()[1])
        node.client.report(STATUS)
        await node.until(lambda: words in waits_for(node))
        await node.client.close()
        server.close()

    alone(scene)


def test_grpc_starts_no_thread_that_receives_signals() -> None:
    # In a separate process: this one has threads of the servers of other tests.
    code = (
        "import asyncio, os\n"
        "from dlrover_run.rendezvous.master_client.client import MasterClient\n"
        "from dlrover_run.coordination.records.report import NodeReport\n"
        "from dlrover_run.rendezvous import kinds\n"
        "from dlrover_run.spec import Entrypoint, JobSpec\n"
        "async def main():\n"
        "    spec = JobSpec(Entrypoint('script', 'x'), 'job',\n"
        "        rendezvous=kinds.Master('127.0.0.1', 1, is_host=False))\n"
        "    news = asyncio.Event()\n"
        "    client = MasterClient(spec, news.set, print)\n"
        "    client.report(NodeReport(node_id='n', incarnation='a', host='h', address='', port=0, workers=1))\n"
        "    await news.wait()\n"
        "    for task in os.listdir('/proc/self/task'):\n"
        "        if int(task) != os.getpid():\n"
        "            with open(f'/proc/self/task/{task}/status') as status:\n"
        "                print(next(line.split()[1] for line in status if line.startswith('SigBlk')))\n"
        "    await client.close()\n"
        "asyncio.run(main())\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT, check=True)
    masks = [int(mask, 16) for mask in run.stdout.split()]
    assert masks
    assert all(mask & 1 << (number - 1) for mask in masks for number in (signal.SIGTERM, signal.SIGCHLD))
    assert run.stderr == ""
