"""A node's end of the stream to a master: what it says, what it obeys, and what it makes of a master that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import WAIT
from scripted_master import Script, ScriptedMaster, Stream

from dlrover_run.coordination.model import NodePhase, NodeReport, Peer, PlanPhase, RoundKey, Waiting
from dlrover_run.coordination.reasons import sentence
from dlrover_run.coordination.rules import JobRules
from dlrover_run.rendezvous import cut_off, reconnect
from dlrover_run.rendezvous.master_client import MasterClient
from dlrover_run.rendezvous.reconnect import Reaches
from dlrover_run.spec import Entrypoint, JobSpec, MasterSpec, TlsSpec
from dlrover_run.transport import grpc_setup
from dlrover_run.transport.messages import Challenge, Hello, Proof, Refused

STATUS = NodeReport(node_id="n0", incarnation="a", host="here", address="", port=0, workers=1)


def status(**fields: Any) -> NodeReport:
    return msgspec.structs.replace(STATUS, **fields)


class Node:
    """A client with what it has told and whether it has called its listener."""

    def __init__(
        self,
        port: int,
        rules: JobRules | None = None,
        master: dict[str, Any] | None = None,
        reaches: Reaches = cut_off.reaches,
    ) -> None:
        spec = MasterSpec("127.0.0.1", port, is_host=False)
        self.said: list[str] = []
        self._news = asyncio.Event()
        self.client = MasterClient(
            JobSpec(
                entrypoint=Entrypoint("script", "train.py"),
                run_id="job",
                rules=rules or JobRules(),
                backend="master",
                master=replace(spec, **(master or {})),
            ),
            self._news.set,
            self._say,
            reaches=reaches,
        )

    def _say(self, line: str) -> None:
        self.said.append(line)
        self._news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until something that the client tells of makes the condition true."""
        while not condition():
            await asyncio.wait_for(self._news.wait(), WAIT)
            self._news.clear()


def alone(scene: Callable[[], Awaitable[None]]) -> None:
    """Run a scene; what it left undone is a defect of the client."""

    async def play() -> None:
        await scene()
        assert [task for task in asyncio.all_tasks() if "/rendezvous/" in repr(task)] == []

    asyncio.run(play())


@contextlib.asynccontextmanager
async def meeting(
    *scripts: Script, rules: JobRules | None = None, reaches: Reaches = cut_off.reaches, **master: Any
) -> AsyncIterator[tuple[Node, ScriptedMaster]]:
    """A node that has published its status, and the master that it finds."""
    server = ScriptedMaster(*scripts)
    node = Node(await server.start(), rules, master, reaches)
    node.client.report(STATUS)
    try:
        yield node, server
    finally:
        await node.client.close()
        await server.stop()
    assert server.failure is None


async def until_the_end(stream: Stream) -> None:
    """Listen to a node until it ends the stream."""
    with contextlib.suppress(EOFError):
        while True:
            await stream.hear()


async def take_in(stream: Stream) -> None:
    await stream.welcome()
    await stream.assign(reasons=sentence("taken in"))
    await until_the_end(stream)


async def refuse_to_be_met(stream: Stream) -> None:
    raise AssertionError("nobody was to call")


def test_a_node_joins_and_follows_what_is_assigned() -> None:
    heard: list[NodeReport] = []

    async def script(stream: Stream) -> None:
        heard.append(await stream.welcome())
        await stream.assign(reasons=sentence("first"))
        heard.append(await stream.status())
        await stream.assign(reasons=sentence("second"))
        await until_the_end(stream)

    async def scene() -> None:
        async with meeting(script) as (node, _):
            await node.until(lambda: node.client.assignment.reason == "first")
            node.client.report(status(phase=NodePhase.RUNNING))
            await node.until(lambda: node.client.assignment.reason == "second")
            assert node.said == []

    alone(scene)
    assert [status.phase for status in heard] == [NodePhase.WAITING, NodePhase.RUNNING]
    assert {status.address for status in heard} == {"127.0.0.1"}


CUT_OFF = JobRules(cut_off_timeout=0.03)
PEERS = (Peer("10.0.0.2", 2000), Peer("10.0.0.3", 3000))


async def assign_peers_and_end(stream: Stream) -> None:
    await stream.welcome()
    await stream.assign(reasons=sentence("trains"), peers=PEERS)
    await stream.status()


async def end_at_once(stream: Stream) -> None:
    pass


class Machines:
    """Answers the probes of a node: the given number of them."""

    def __init__(self, answers: int) -> None:
        self.left = answers
        self.probed: list[tuple[str, int]] = []

    async def reaches(self, host: str, port: int) -> bool:
        self.probed.append((host, port))
        self.left -= 1
        return self.left >= 0


def test_a_node_that_is_cut_off_ends_so_that_it_can_be_replaced() -> None:
    async def scene() -> None:
        machines = Machines(answers=20)
        async with meeting(assign_peers_and_end, end_at_once, rules=CUT_OFF, reaches=machines.reaches) as (node, _):
            await node.until(lambda: node.client.assignment.peers == PEERS)
            node.client.report(status(phase=NodePhase.RUNNING))
            await node.until(lambda: node.client.problem)
            assert node.client.is_cut_off
            assert "this node is cut off: neither the master at " in str(node.client.problem)
            assert "0.03 s (--rdzv-conf cut_off_timeout)" in str(node.client.problem)
        # As long as one of two answered it went on, and both were asked each time.
        assert len(machines.probed) > 20
        assert set(machines.probed) == {(peer.address, peer.port) for peer in PEERS}

    alone(scene)


@pytest.mark.parametrize("rules", [JobRules(cut_off_timeout=0.0), CUT_OFF], ids=["never", "answers"])
def test_a_master_that_is_gone_ends_no_node_that_reaches_others(rules: JobRules) -> None:
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


def test_an_address_that_the_user_gave_is_the_one_that_is_advertised() -> None:
    async def scene() -> None:
        joined: asyncio.Future[NodeReport] = asyncio.get_running_loop().create_future()

        async def script(stream: Stream) -> None:
            joined.set_result(await stream.welcome())
            await until_the_end(stream)

        server = ScriptedMaster(script)
        spec = JobSpec(
            entrypoint=Entrypoint("script", "train.py"),
            run_id="job",
            backend="master",
            master=MasterSpec("localhost", await server.start(), is_host=False),
            local_addr="10.1.2.3",
        )
        client = MasterClient(spec, lambda: None, print)
        client.report(STATUS)
        assert (await asyncio.wait_for(joined, WAIT)).address == "10.1.2.3"
        await client.close()
        await server.stop()

    alone(scene)


def test_a_status_that_has_not_changed_is_not_sent_and_of_many_the_latest_counts() -> None:
    async def script(stream: Stream) -> None:
        await stream.welcome(JobRules(keep_alive_interval=1000.0))
        await stream.assign(reasons=sentence("taken in"))
        status = await stream.status()
        await stream.assign(reasons=sentence(f"heard of {status.port}"))
        await until_the_end(stream)

    async def scene() -> None:
        async with meeting(script) as (node, _):
            await node.until(lambda: node.client.assignment.reason == "taken in")
            node.client.report(STATUS)
            for port in range(1, 50):
                node.client.report(status(port=port))
            await node.until(lambda: node.client.assignment.reason == "heard of 49")

    alone(scene)


def collect_phases(heard: list[NodePhase]) -> Callable[[Stream], Awaitable[None]]:
    """The script of a master that takes the node in and appends the phase of each of its reports to `heard`."""

    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.assign(reasons=sentence("taken in"))
        with contextlib.suppress(EOFError):
            while True:
                heard.append((await stream.status()).phase)

    return script


@pytest.mark.parametrize("turns", range(8))
def test_the_last_status_is_reported_though_another_is_on_its_way(turns: int) -> None:
    heard: list[NodePhase] = []

    async def scene() -> None:
        async with meeting(collect_phases(heard)) as (node, _):
            await node.until(lambda: node.client.assignment.reason == "taken in")
            node.client.report(status(phase=NodePhase.FAILED))
            for _ in range(turns):
                # One turn of the loop.
                await asyncio.sleep(0)
            node.client.report(status(phase=NodePhase.LEFT))

    alone(scene)
    assert heard[-1] is NodePhase.LEFT


def test_what_an_older_coordinator_says_is_not_obeyed() -> None:
    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.assign(epoch=7, reasons=sentence("new"))
        await stream.assign(epoch=6, phase=PlanPhase.FAILED, reasons=sentence("old"))
        await stream.assign(epoch=7, reasons=sentence("newer"))
        await until_the_end(stream)

    async def scene() -> None:
        reasons: list[str] = []
        async with meeting(script) as (node, _):
            await node.until(lambda: reasons.append(node.client.assignment.reason) or reasons[-1] == "newer")
        assert "old" not in reasons

    alone(scene)


def test_a_master_that_does_not_know_the_latest_round_yet_takes_no_node_out_of_it() -> None:
    async def script(stream: Stream) -> None:
        await stream.welcome()
        await stream.assign(epoch=1, key=RoundKey(1, 3), reasons=sentence("third round"))
        await stream.assign(epoch=2, reasons=sentence("no node has reported yet"))
        await stream.assign(epoch=2, key=RoundKey(1, 3), reasons=sentence("adopted"))
        await until_the_end(stream)

    async def scene() -> None:
        reasons: list[str] = []
        async with meeting(script) as (node, _):
            await node.until(lambda: reasons.append(node.client.assignment.reason) or reasons[-1] == "adopted")
        assert "no node has reported yet" not in reasons

    alone(scene)


@pytest.mark.parametrize("retry", [True, False])
def test_a_master_that_came_back_and_refuses_a_node_does_not_end_its_workers(retry: bool) -> None:
    async def take_in_and_break(stream: Stream) -> None:
        await stream.welcome()
        await stream.assign(reasons=sentence("taken in"))
        assert (await stream.status()).phase is NodePhase.RUNNING

    async def refuse(stream: Stream) -> None:
        await stream.challenge()
        await stream.say(Refused("the journal is damaged", retry))

    async def scene() -> None:
        async with meeting(take_in_and_break, refuse, refuse, take_in) as (node, _):
            await node.until(lambda: node.client.assignment.reason == "taken in")
            node.client.report(status(phase=NodePhase.RUNNING))
            place = f"the master at 127.0.0.1:{server_port(node)}"
            await node.until(lambda: f"{place} is back" in node.said)
            assert node.said == [
                f"lost {place}; the workers train on",
                f"{place} refuses this node: the journal is damaged; the workers train on",
                f"{place} is back",
            ]
            assert node.client.problem is None

    alone(scene)


@pytest.mark.parametrize("retry", [True, False])
def test_a_master_that_ends_a_stream_with_a_reason(retry: bool) -> None:
    async def end(stream: Stream) -> None:
        await stream.welcome()
        await stream.assign(reasons=sentence("taken in"))
        await stream.say(Refused("the master ends: SIGTERM came", retry))

    async def scene() -> None:
        async with meeting(end, take_in) as (node, _):
            await node.until(lambda: node.client.problem or any("is back" in line for line in node.said))
            assert bool(node.client.problem) is not retry

    alone(scene)


def test_a_notice_of_the_master_is_reported_once() -> None:
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
            assert [line for line in node.said if "rules" in line] == ["warning: your rules are others"]

    alone(scene)


def test_a_lost_master_is_reported_once_and_once_when_it_is_back() -> None:
    async def scene() -> None:
        first, second = ScriptedMaster(take_in), ScriptedMaster(take_in)
        port = await first.start()
        node = Node(port)
        node.client.report(status(phase=NodePhase.RUNNING))
        await node.until(lambda: node.client.assignment.reason == "taken in")
        await first.stop()
        await node.until(lambda: node.said)
        await second.start(port)
        await node.until(lambda: len(node.said) == 2)
        assert node.said == [
            f"lost the master at 127.0.0.1:{port}; the workers train on",
            f"the master at 127.0.0.1:{port} is back",
        ]
        assert node.client.problem is None
        await node.client.close()
        await second.stop()

    alone(scene)


def test_a_silent_master_is_left_for_another_attempt() -> None:
    async def be_silent(stream: Stream) -> None:
        await stream.welcome(JobRules(keep_alive_interval=0.05, keep_alive_attempts=2))
        await until_the_end(stream)

    async def scene() -> None:
        async with meeting(be_silent, take_in) as (node, server):
            await node.until(lambda: node.client.assignment.reason == "taken in")
            assert server.streams == 2

    alone(scene)


@pytest.mark.parametrize("phase", [PlanPhase.FINISHED, PlanPhase.FAILED])
def test_no_node_looks_for_a_master_whose_job_is_over(phase: PlanPhase) -> None:
    async def end(stream: Stream) -> None:
        await stream.welcome()
        await stream.assign(phase=phase)

    async def scene() -> None:
        async with meeting(end, refuse_to_be_met) as (node, _):
            await node.until(lambda: node.client.assignment.phase is phase)
            await asyncio.wait_for(asyncio.shield(node.client._task), WAIT)
            assert node.said == []

    alone(scene)


@pytest.mark.parametrize("other", ["", "wrong"])
def test_a_master_that_cannot_prove_the_token_is_not_obeyed(other: str) -> None:
    async def script(stream: Stream) -> None:
        await stream.challenge(other)

    async def scene() -> None:
        async with meeting(script, token="secret") as (node, _):
            await node.until(lambda: node.client.problem)
        assert node.client.problem is not None
        assert "does not know this job's token" in node.client.problem
        assert "secret" not in node.client.problem

    alone(scene)


def test_a_stranger_in_the_place_of_a_lost_master_ends_no_running_job() -> None:
    async def be_the_master(stream: Stream) -> None:
        await stream.welcome(token="secret")
        await stream.assign(reasons=sentence("taken in"))

    async def be_a_stranger(stream: Stream) -> None:
        hello = await stream.hear()
        assert isinstance(hello, Hello)
        await stream.say(Challenge("0" * 64))
        await stream.say(Proof("1" * 64))
        await until_the_end(stream)

    async def refuse(stream: Stream) -> None:
        await stream.say(Refused("this master speaks another protocol"))

    async def be_back(stream: Stream) -> None:
        await stream.welcome(token="secret")
        await stream.assign(reasons=sentence("back"))
        await until_the_end(stream)

    async def scene() -> None:
        async with meeting(be_the_master, be_a_stranger, refuse, be_back, token="secret") as (node, _):
            await node.until(lambda: node.client.assignment.reason == "back")
            assert node.client.problem is None

    alone(scene)


def test_a_refusal_is_the_end_and_its_reason_is_reported() -> None:
    async def script(stream: Stream) -> None:
        await stream.challenge()
        await stream.say(Refused("the job has too many nodes"))

    async def scene() -> None:
        async with meeting(script, refuse_to_be_met) as (node, _):
            await node.until(lambda: node.client.problem)
            assert node.client.problem == (
                f"the master at 127.0.0.1:{server_port(node)} refuses this node: the job has too many nodes"
            )

    alone(scene)


def server_port(node: Node) -> int:
    return node.client._master.port


def test_a_refusal_that_may_pass_is_met_with_patience() -> None:
    async def refuse(stream: Stream) -> None:
        await stream.challenge()
        await stream.say(Refused("node id n0 is in use", retry=True))

    async def scene() -> None:
        async with meeting(refuse, refuse, take_in) as (node, _):
            await node.until(lambda: node.client.assignment.waiting)
            assert node.client.assignment.waiting is not None
            assert "node id n0 is in use" in node.client.assignment.waiting.text
            await node.until(lambda: node.client.assignment.reason == "taken in")
        async with meeting(refuse) as (node, _):
            node.client._backoff.refusal_timeout = 0.0
            await node.until(lambda: node.client.problem)
            assert node.client.problem is not None
            assert node.client.problem.endswith("node id n0 is in use")

    alone(scene)


def test_a_node_that_finds_no_master_says_what_it_waits_for_and_gives_up_in_the_end(free_port: int) -> None:
    async def scene() -> None:
        node = Node(free_port, JobRules(join_timeout=5))
        node.client.report(STATUS)
        await node.until(lambda: node.client.assignment.waiting)
        waiting = node.client.assignment.waiting
        assert isinstance(waiting, Waiting)
        assert waiting.text.startswith(f"the master at 127.0.0.1:{free_port} (the connection was refused")
        await node.until(lambda: node.client.problem)
        assert node.client.problem is not None
        assert node.client.problem.startswith(
            f"the master at 127.0.0.1:{free_port} was not found within 5 s (--rdzv-conf join_timeout): "
            "the connection was"
        )
        await node.client.close()

    alone(scene)


def test_a_node_whose_workers_have_ended_waits_for_a_lost_master_only_so_long() -> None:
    async def leave(stream: Stream) -> None:
        await stream.welcome(JobRules(join_timeout=0.3))
        await stream.assign(reasons=sentence("taken in"))

    async def scene() -> None:
        server = ScriptedMaster(leave)
        node = Node(await server.start())
        node.client.report(status(phase=NodePhase.RUNNING))
        await node.until(lambda: node.client.assignment.reason == "taken in")
        await server.stop()
        await node.until(lambda: node.said)
        node.client.report(status(phase=NodePhase.FAILED))
        await node.until(lambda: node.client.problem)
        assert node.client.problem is not None
        assert "was unreachable for 0.3 s" in node.client.problem
        await node.client.close()

    alone(scene)


@pytest.mark.parametrize("what", [b"", b"\xff\x00", b'{"type":"report"}', b"[" * 100_000])
def test_what_is_no_message_of_a_master_is_met_with_another_attempt(what: bytes) -> None:
    async def talk_nonsense(stream: Stream) -> None:
        await stream.hear()
        await stream._context.write(what)
        await until_the_end(stream)

    async def scene() -> None:
        async with meeting(talk_nonsense, take_in) as (node, _):
            await node.until(lambda: node.client.assignment.reason == "taken in")

    alone(scene)


@pytest.mark.parametrize("late", [False, True])
def test_a_stream_that_the_master_cancels_is_met_with_another_attempt(late: bool) -> None:
    async def cancel(stream: Stream) -> None:
        if late:
            await stream.welcome()
            await stream.assign(reasons=sentence("to be cancelled"))
        await stream._context.abort(grpc_setup.load_grpc().StatusCode.CANCELLED, "")

    async def scene() -> None:
        async with meeting(cancel, take_in) as (node, server):
            await node.until(lambda: node.client.assignment.reason == "taken in")
            server.failure = None

    alone(scene)


def test_a_master_that_floods_is_cut_off() -> None:
    async def flood(stream: Stream) -> None:
        await stream.hear()
        await stream._context.write(b"x" * (100 * 1024 * 1024))

    async def scene() -> None:
        async with meeting(flood, take_in) as (node, server):
            # The server's own limit would stop it first.
            await node.until(lambda: node.client.assignment.reason == "taken in")
            server.failure = None

    alone(scene)


def test_a_closed_client_leaves_in_a_bounded_time_though_the_master_receives_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconnect, "CLOSE_TIMEOUT", 0.01)

    async def scene() -> None:
        stop = asyncio.Event()

        async def hear_nothing(stream: Stream) -> None:
            await stream.welcome()
            await stream.assign(reasons=sentence("taken in"))
            await stop.wait()

        async with meeting(hear_nothing) as (node, _):
            await node.until(lambda: node.client.assignment.reason == "taken in")
            await asyncio.wait_for(node.client.close(), WAIT)
            stop.set()

    alone(scene)


def test_a_board_that_is_closed_while_it_looks_for_a_master_leaves_at_once(free_port: int) -> None:
    async def scene() -> None:
        node = Node(free_port)
        node.client.report(STATUS)
        await node.until(lambda: node.client.assignment.waiting)
        await asyncio.wait_for(node.client.close(), WAIT)

    alone(scene)


def test_files_of_tls_that_cannot_be_read_are_named(free_port: int, tmp_path: Path) -> None:
    async def scene() -> None:
        node = Node(free_port, master={"tls": TlsSpec(ca=str(tmp_path / "absent.pem"))})
        node.client.report(STATUS)
        await node.until(lambda: node.client.assignment.waiting)
        assert node.client.assignment.waiting is not None
        assert "absent.pem" in node.client.assignment.waiting.text
        await node.client.close()

    alone(scene)


def test_a_name_without_an_address_is_reported() -> None:
    async def scene() -> None:
        node = Node(1, master={"host": "no-such-host.invalid"})
        node.client.report(STATUS)
        await node.until(lambda: node.client.assignment.waiting)
        assert node.client.assignment.waiting is not None
        assert "no-such-host.invalid has no address" in node.client.assignment.waiting.text
        await node.client.close()

    alone(scene)


def test_grpc_brings_no_thread_that_takes_signals() -> None:
    # In a process of its own: this one has threads of other tests' servers.
    code = (
        "import asyncio, os\n"
        "from dlrover_run.rendezvous.master_client import MasterClient\n"
        "from dlrover_run.coordination.model import NodeReport\n"
        "from dlrover_run.spec import Entrypoint, JobSpec, MasterSpec\n"
        "async def main():\n"
        "    spec = JobSpec(Entrypoint('script', 'x'), 'job', backend='master',\n"
        "        master=MasterSpec('127.0.0.1', 1, is_host=False))\n"
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
