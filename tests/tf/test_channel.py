"""The agent's end of the channel: real sockets, and processes that send too much, nothing, or invalid data."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from loops import in_loop
from support.harness import open_descriptors

from dlrover_run.processes import line_connection, line_listener
from dlrover_run.processes.line_listener import MAX_UNAUTHENTICATED
from tf_ps_runner.agent.channel import MAX_PENDING_REQUESTS, TaskChannel
from tf_ps_runner.agent.protocol import (
    MAX_LINE,
    MAX_TEXT,
    Answer,
    Disconnected,
    Note,
    OrderMessage,
    ProcessHello,
    Ready,
    Request,
    Restored,
    Saved,
    Snapshot,
    Step,
    Take,
    TaskEvent,
    printable,
    sanitize,
)
from tf_ps_runner.cluster.model import Role, ServerBounds, TaskKey

WORKER, CHIEF = TaskKey(Role.WORKER, 3), TaskKey(Role.CHIEF, 0)
TIMEOUT = 30.0
TAKE = {"type": "take", "queue": "train", "spec": {"size": 10, "shard": 5, "epochs": 1, "seed": 0, "shuffle": False}}
HELLO = ProcessHello("", os.getpid())


class Line:
    """A process's end of a connection, in this process."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(TIMEOUT)
        self.socket.connect("\0" + address[1:])
        self._read = b""

    def send(self, *messages: Any) -> None:
        self.socket.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    def send_bytes(self, data: bytes) -> None:
        """Send as much of the data as the agent reads before it closes the connection."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    async def receive(self) -> Any:
        """The next message; None at the end."""
        loop = asyncio.get_running_loop()
        self.socket.setblocking(False)
        while b"\n" not in self._read:
            try:
                data = await asyncio.wait_for(loop.sock_recv(self.socket, 65536), TIMEOUT)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)


class Agent:
    """A channel that expects a worker and a chief, its events, and requests that are answered when the test decides."""

    def __init__(self) -> None:
        self.events: list[tuple[TaskKey, TaskEvent]] = []
        self.requests: list[tuple[TaskKey, Request, Callable[[Answer], None]]] = []
        self.ended: list[TaskKey] = []
        self._more = asyncio.Event()
        self.channel = TaskChannel(self._on_event, self)
        self.channel.open()
        self.tokens = {task: self.channel.expect(task) for task in (WORKER, CHIEF)}
        self._lines: list[Line] = []

    def line(self) -> Line:
        """A new connection, without a hello."""
        self._lines.append(Line(self.channel.address))
        return self._lines[-1]

    def hello(self, task: TaskKey = WORKER) -> dict[str, Any]:
        return {"type": "hello", "token": self.tokens[task], "pid": 1}

    def connect(self, task: TaskKey = WORKER) -> Line:
        """The connection of a task that has sent its hello."""
        line = self.line()
        line.send(self.hello(task))
        return line

    def _on_event(self, task: TaskKey, event: TaskEvent) -> None:
        self.events.append((task, event))
        self._more.set()

    def ask(self, task: TaskKey, ask: Request, reply: Callable[[Answer], None]) -> None:
        self.requests.append((task, ask, reply))
        self._more.set()

    def gone(self, task: TaskKey) -> None:
        self.ended.append(task)

    def of(self, task: TaskKey) -> list[TaskEvent]:
        """The events of a task."""
        return [event for of, event in self.events if of == task]

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until an event or a request makes the condition true."""
        while not true():
            await asyncio.wait_for(self._more.wait(), TIMEOUT)
            self._more.clear()

    async def received(self, *events: TaskEvent, of: TaskKey = WORKER) -> None:
        """Wait until the last events of a task are these."""
        await self.until(lambda: self.of(of)[-len(events) :] == [*events])

    def close(self) -> None:
        for line in self._lines:
            line.socket.close()
        self.channel.close()


@contextlib.contextmanager
def opened() -> Iterator[Agent]:
    """An agent that is closed afterwards."""
    with contextlib.closing(Agent()) as agent:
        yield agent


@in_loop
async def test_a_process_is_identified_by_its_token_and_by_the_pid_from_the_kernel() -> None:
    with opened() as agent:
        line = agent.connect()
        line.send({"type": "ready"}, {"type": "step", "step": 7}, {"type": "note", "text": "a word"})
        line.send({"type": "saved", "step": 8, "path": "/x/model.ckpt-8"})
        line.send({"type": "restored", "step": 9, "path": None, "how": "live", "skipped": ["a sentence"]})
        line.socket.close()
        await agent.received(
            HELLO,
            Ready(),
            Step(7),
            Note("a word"),
            Saved(8, "/x/model.ckpt-8"),
            Restored(9, "live", None, ("a sentence",)),
            Disconnected(),
        )
        assert agent.ended == [WORKER]


@in_loop
async def test_an_order_is_sent_after_the_hello_and_whenever_it_changes() -> None:
    with opened() as agent:
        agent.channel.send_order(WORKER, OrderMessage(1))
        line = agent.connect()
        order = {"type": "order", "version": 1, "open": False, "pause": False, "save": False, "ending": False}
        assert await line.receive() == order
        agent.channel.send_order(WORKER, OrderMessage(1))
        agent.channel.send_order(WORKER, OrderMessage(1, open=True))
        assert await line.receive() == {**order, "open": True}
        agent.channel.close()
        assert await line.receive() is None


@in_loop
async def test_requests_are_answered_in_any_order_and_not_after_the_end_of_the_connection() -> None:
    with opened() as agent:
        line = agent.connect()
        line.send({"request": 1, **TAKE}, {"request": 2, "type": "snapshot"}, {"request": 3, "type": "snapshot"})
        await agent.until(lambda: len(agent.requests) == 3)
        assert isinstance(agent.requests[0][1], Take)
        assert agent.requests[1][:2] == (WORKER, Snapshot())
        agent.requests[1][2](Answer(over=True))
        agent.requests[0][2](Answer(shard=4, begin=0, end=5, epoch=1))
        assert await line.receive() == {"answer": 2, "over": True}
        assert await line.receive() == {"answer": 1, "shard": 4, "begin": 0, "end": 5, "epoch": 1}
        line.socket.close()
        await agent.received(Disconnected())
        agent.requests[2][2](Answer())


@in_loop
async def test_an_invalid_request_is_answered_with_an_error_and_the_connection_stays() -> None:
    with opened() as agent:
        line = agent.connect()
        for request in (
            {"type": "nothing"},
            {**TAKE, "spec": {"size": -1, "shard": 5}},
            {**TAKE, "queue": "\n"},
            {"type": "used", "queue": "train", "shard": 0, "next": 2**80},
            {"type": "rollback", "state": {"version": 1, "queues": {"a": []}}},
        ):
            line.send({"request": 5, **request})
            answer = await line.receive()
            assert answer["answer"] == 5
            assert answer["error"].startswith("invalid request: ")


@in_loop
async def test_an_invalid_message_of_a_known_process_is_reported_once_and_the_connection_stays() -> None:
    with opened() as agent:
        agent.connect().send({"type": "step", "step": -5}, {"type": "sing"}, [1, 2], {"type": "step", "step": 4})
        await agent.received(Step(4))
        (note,) = [event for event in agent.of(WORKER) if isinstance(event, Note)]
        assert "step" in note.text


@pytest.mark.parametrize(
    "data",
    [
        b'{"type":"hello","token":"x","pid":1}\n',
        b'{"type":"ready"}\n',
        b'{"request":1,"type":"snapshot"}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * 60_000 + b"\n",
        b"\xff\xfe\n",
        b"\n",
        b"x" * (2 * MAX_LINE),
    ],
)
@in_loop
async def test_a_process_without_a_token_is_refused(data: bytes) -> None:
    with opened() as agent:
        line = agent.line()
        line.send_bytes(data)
        assert await line.receive() is None
        assert agent.events == agent.requests == []


@in_loop
async def test_another_user_is_refused_even_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as agent:
        monkeypatch.setattr(line_connection.os, "geteuid", lambda: os.getuid() + 1)
        assert await agent.connect().receive() is None
        assert agent.events == []


CHILD = """
import os, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect("\\0" + sys.argv[1][1:])
line.sendall(b'{"type":"hello","token":"%s","pid":1}\\n' % sys.argv[2].encode())
print(line.recv(100) == b"", flush=True)
"""


@in_loop
async def test_a_child_with_its_parents_token_does_not_take_over_the_connection() -> None:
    with opened() as agent:
        line = agent.connect()
        await agent.received(HELLO)
        argv = (sys.executable, "-c", CHILD, agent.channel.address, agent.tokens[WORKER])
        child = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
        out, _ = await asyncio.wait_for(child.communicate(), TIMEOUT)
        assert out == b"True\n"
        line.send({"type": "step", "step": 1})
        await agent.received(HELLO, Step(1))


@in_loop
async def test_the_latest_connection_of_a_process_is_used() -> None:
    with opened() as agent:
        first, second = agent.line(), agent.line()
        first.send(agent.hello(), {"type": "step", "step": 1})
        await agent.received(Step(1))
        first.send({"type": "step", "step": 2})
        second.send(agent.hello(), {"type": "step", "step": 3})
        await agent.received(HELLO, Step(1), Step(2), Disconnected(), HELLO, Step(3))
        assert await first.receive() is None


@in_loop
async def test_the_last_messages_of_a_process_are_read_before_it_is_removed() -> None:
    with opened() as agent:
        agent.channel.send_order(CHIEF, OrderMessage(1))
        # It exits without having read its order.
        line = agent.connect(CHIEF)
        line.send(*({"type": "step", "step": step} for step in range(900)))
        line.send({"type": "saved", "step": 900, "path": "/x"})
        line.socket.close()
        agent.channel.finish(CHIEF)
        assert agent.of(CHIEF) == [HELLO, *map(Step, range(900)), Saved(900, "/x"), Disconnected()]
        assert await agent.connect(CHIEF).receive() is None


@in_loop
async def test_the_connection_of_a_process_that_has_ended_is_closed_though_its_child_holds_it() -> None:
    with opened() as agent:
        held = agent.connect().socket.dup()
        agent.channel.finish(WORKER)
        assert agent.of(WORKER) == [HELLO, Disconnected()]
        held.close()


@in_loop
async def test_a_flood_of_one_process_does_not_delay_messages_of_the_others() -> None:
    with opened() as agent:
        flood, calm = agent.connect(WORKER), agent.line()
        flood.socket.setblocking(False)
        message = b'{"type":"step","step":1}\n'
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += flood.socket.send(message * 50_000)
        assert sent > 2 * MAX_LINE
        calm.send(agent.hello(CHIEF))
        await agent.received(HELLO, of=CHIEF)
        before = [task for task, _ in agent.events].index(CHIEF)
        assert before * len(message) <= 2 * MAX_LINE


@in_loop
async def test_a_process_that_never_reads_costs_the_agent_one_order_and_a_few_answers() -> None:
    with opened() as agent:
        line = agent.connect()
        await agent.received(HELLO)
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        for version in range(20_000):
            agent.channel.send_order(WORKER, OrderMessage(version))
        while (await line.receive())["version"] != 19_999:
            pass
        # Requests whose answers are never read end the connection eventually.
        line.socket.setblocking(False)
        for _ in range(100_000):
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                line.socket.send(b'{"request":1,"type":"sing' + b"x" * 1000 + b'"}\n')
            await asyncio.sleep(0)
            if agent.of(WORKER)[-1] == Disconnected():
                break
        await agent.received(Disconnected())


@in_loop
async def test_a_process_with_too_many_pending_requests_loses_its_connection() -> None:
    with opened() as agent:
        requests = ({"request": number, "type": "snapshot"} for number in range(MAX_PENDING_REQUESTS + 1))
        agent.connect().send(*requests)
        await agent.received(Disconnected())
        assert len(agent.requests) == MAX_PENDING_REQUESTS
        assert agent.ended == [WORKER]


@in_loop
async def test_a_line_that_is_too_long_ends_the_connection() -> None:
    with opened() as agent:
        line = agent.connect()
        await agent.received(HELLO)
        text = b'{"type":"note","text":"' + b"x" * (4 * MAX_LINE)
        await asyncio.get_running_loop().run_in_executor(None, line.send_bytes, text)
        await agent.received(Disconnected())


@in_loop
async def test_connections_without_a_hello_are_limited_and_block_no_process() -> None:
    with opened() as agent:
        agent.connect()
        strangers = [agent.line() for _ in range(4 * MAX_UNAUTHENTICATED)]
        await agent.received(HELLO)
        assert await strangers[0].receive() is None
        agent.connect().send({"type": "step", "step": 1})
        await agent.received(Step(1))


@in_loop
async def test_a_connection_without_a_hello_is_closed_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_listener, "HELLO_TIMEOUT", 0.05)
    with opened() as agent:
        assert await agent.line().receive() is None


@in_loop
async def test_connections_that_find_no_descriptor_are_accepted_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line_listener, "ACCEPT_PAUSE", 0.05)
    with opened() as agent:
        agent.connect()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            # As the event loop does when a process has connected.
            agent.channel._listener._accept()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert agent.events == []
        await agent.received(HELLO)


PIECES = [
    b'{"type":"step","step":1}\n',
    b'{"type":"note","text":"\\u0000\\u001b[31m"}\n',
    b'{"request":1,"type":"take","queue":"a","spec":{"size":1,"shard":1}}\n',
    b'{"request":9,"type":"rollback","state":{"version":1,"queues":{"a":{"spec":{"size":1,"shard":1},"next":1}}}}\n',
    b'{"type":"restored","step":1,"how":"fresh"}\n',
    b'{"request":true,"type":1e999}\n',
    b'{"type":"hello","token":"","pid":-1}\n',
    b"\x00\xff{[\n",
    b"[" * 2000 + b"\n",
    b'{"type":{"type":"say"}}\n',
    b'{"type":"step","step":1e5}\n',
]


@in_loop
async def test_any_data_of_any_process_leaves_the_channel_working() -> None:
    """Messages that are cut and joined at random, of a process with a token and of many without."""
    chance = random.Random(11)
    with opened() as agent:
        descriptors = open_descriptors()
        for _ in range(300):
            line = agent.line()
            data = b"".join(chance.choice(PIECES) for _ in range(chance.randrange(30)))
            if chance.random() < 0.5:
                line.send(agent.hello())
                cut = chance.randrange(len(data) + 1)
                data = data[:cut] + bytes(chance.randrange(256) for _ in range(chance.randrange(9))) + data[cut:]
            line.send_bytes(data)
            line.socket.close()
            await asyncio.sleep(0)
        calm = agent.connect(CHIEF)
        calm.send({"type": "step", "step": 5})
        await agent.received(HELLO, Step(5), of=CHIEF)
        agent.channel.finish(WORKER)
        counts = [sum(isinstance(event, kind) for event in agent.of(WORKER)) for kind in (ProcessHello, Disconnected)]
        assert counts[0] == counts[1] > 0
        calm.socket.close()
        await agent.received(Disconnected(), of=CHIEF)
        assert not open_descriptors() - descriptors


def test_messages_of_a_process_contain_no_terminal_control_characters() -> None:
    assert printable("\x1b[2Jgone\r\nand\x00 \x07back\u202e") == "[2Jgone and back"
    assert len(printable("x" * 10_000)) == MAX_TEXT


BOUNDS = ServerBounds(least=3, most=3, table="users", parts=3, refused=2)


@pytest.mark.parametrize(
    ("event", "printed"),
    [
        (Note("a line", server_bounds=BOUNDS), None),
        (Restored(7, "checkpoint", "/data/model.ckpt-7", ("one that was skipped",)), None),
        (Restored(-1, "fresh"), None),
        (Saved(7, "/data/model.ckpt-7"), None),
        (Step(7), None),
        (Ready(), None),
        (Saved(1, "/a  b\x1b[31m"), Saved(1, "/a b [31m")),
        # The path of a checkpoint is used as it is.
        (Restored(1, "fresh", "/a  b", ("x\x07",)), Restored(1, "fresh", "/a  b", ("x",))),
        (
            Note("\x1b[2J", server_bounds=ServerBounds(least=1, most=1, table="\x1b[2Jusers", parts=1)),
            Note("[2J", server_bounds=ServerBounds(least=1, most=1, table="[2Jusers", parts=1)),
        ),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_is_passed_on_with_all_its_fields_safe_for_a_terminal(event: Any, printed: Any) -> None:
    assert sanitize(event) == (printed or event)


@in_loop
async def test_events_are_passed_on_as_such() -> None:
    with opened() as agent:
        agent.connect().send({"type": "note", "text": "a\x1b[2Jb"})
        await agent.received(Note("a [2Jb"))
