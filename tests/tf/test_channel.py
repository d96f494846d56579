"""The agent's end of the channel: real sockets, and processes that say too much, nothing, or what is not theirs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import resource
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from dlrover_run.policies.parameter_servers.model import Role, ServerBounds, TaskKey
from tf_ps_runner.agent import channel as channel_module
from tf_ps_runner.agent import connection as connection_module
from tf_ps_runner.agent.channel import MAX_PENDING_REQUESTS, MAX_UNAUTHENTICATED, TaskChannel
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

WORKER, CHIEF = TaskKey(Role.WORKER, 3), TaskKey(Role.CHIEF, 0)
PATIENCE = 30.0
TAKE = {"type": "take", "queue": "train", "spec": {"size": 10, "shard": 5, "epochs": 1, "seed": 0, "shuffle": False}}


class Agent:
    """A channel, what was heard over it, and a clerk that answers when the test says so."""

    def __init__(self) -> None:
        self.events: list[tuple[TaskKey, TaskEvent]] = []
        self.asked: list[tuple[TaskKey, Request, Callable[[Answer], None]]] = []
        self.gone_to_clerk: list[TaskKey] = []
        self._more = asyncio.Event()
        self.channel = TaskChannel(self._hear, self)
        self.channel.open()

    def _hear(self, task: TaskKey, event: TaskEvent) -> None:
        self.events.append((task, event))
        self._more.set()

    def ask(self, task: TaskKey, ask: Request, reply: Callable[[Answer], None]) -> None:
        self.asked.append((task, ask, reply))
        self._more.set()

    def gone(self, task: TaskKey) -> None:
        self.gone_to_clerk.append(task)

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something that was heard makes it true."""
        while not true():
            await asyncio.wait_for(self._more.wait(), PATIENCE)
            self._more.clear()

    async def heard(self, *events: TaskEvent, of: TaskKey = WORKER) -> None:
        """Wait until the last that was heard of a task is this."""
        await self.until(lambda: [event for task, event in self.events if task == of][-len(events) :] == [*events])


class Line:
    """A process's end, in this process."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        self.socket.connect("\0" + address[1:])
        self._read = b""

    def say(self, *messages: Any) -> None:
        self.socket.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    async def hear(self) -> Any:
        """The next line; None at the end."""
        loop = asyncio.get_running_loop()
        self.socket.setblocking(False)
        while b"\n" not in self._read:
            try:
                data = await asyncio.wait_for(loop.sock_recv(self.socket, 65536), PATIENCE)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)


@contextlib.contextmanager
def agent_of_one(**order: Any) -> Iterator[tuple[Agent, Line]]:
    """An agent, and the line of a worker that it expects and that has greeted."""
    agent = Agent()
    token = agent.channel.expect(WORKER)
    line = Line(agent.channel.address)
    try:
        line.say({"type": "hello", "token": token, "pid": os.getpid()})
        yield agent, line
    finally:
        line.socket.close()
        agent.channel.close()


def running(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """A test that runs in a loop, in which nothing may go wrong unheard."""

    def run() -> None:
        troubles: list[Any] = []

        async def watched() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: troubles.append(context))
            await test()
            gc.collect()

        asyncio.run(watched())
        assert not troubles

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@running
async def test_a_process_is_known_by_its_token_and_by_the_pid_from_the_kernel() -> None:
    agent = Agent()
    token = agent.channel.expect(WORKER)
    line = Line(agent.channel.address)
    line.say({"type": "hello", "token": token, "pid": 1})
    await agent.heard(ProcessHello("", os.getpid()))
    line.say({"type": "ready"}, {"type": "step", "step": 7}, {"type": "note", "text": "a word"})
    line.say({"type": "saved", "step": 8, "path": "/x/model.ckpt-8"})
    line.say({"type": "restored", "step": 9, "path": None, "how": "live", "skipped": ["a sentence"]})
    line.socket.close()
    await agent.heard(
        ProcessHello("", os.getpid()),
        Ready(),
        Step(7),
        Note("a word"),
        Saved(8, "/x/model.ckpt-8"),
        Restored(9, "live", None, ("a sentence",)),
        Disconnected(),
    )
    assert agent.gone_to_clerk == [WORKER]
    agent.channel.close()


@running
async def test_an_order_is_sent_after_the_greeting_and_whenever_it_changes() -> None:
    agent = Agent()
    token = agent.channel.expect(WORKER)
    agent.channel.send_order(WORKER, OrderMessage(1))
    line = Line(agent.channel.address)
    line.say({"type": "hello", "token": token, "pid": 1})
    told = {"type": "order", "version": 1, "open": False, "pause": False, "save": False, "ending": False}
    assert await line.hear() == told
    agent.channel.send_order(WORKER, OrderMessage(1))
    agent.channel.send_order(WORKER, OrderMessage(1, open=True))
    assert await line.hear() == {**told, "open": True}
    agent.channel.close()
    assert await line.hear() is None


@running
async def test_requests_are_answered_when_the_answer_is_known_in_whatever_order() -> None:
    with agent_of_one() as (agent, line):
        line.say({"request": 1, **TAKE}, {"request": 2, "type": "snapshot"})
        await agent.until(lambda: len(agent.asked) == 2)
        assert isinstance(agent.asked[0][1], Take)
        assert agent.asked[1][:2] == (WORKER, Snapshot())
        agent.asked[1][2](Answer(over=True))
        agent.asked[0][2](Answer(shard=4, begin=0, end=5, epoch=1))
        assert await line.hear() == {"answer": 2, "over": True}
        assert await line.hear() == {"answer": 1, "shard": 4, "begin": 0, "end": 5, "epoch": 1}
        line.say({"request": 3, "type": "used", "queue": "train", "shard": 4, "next": 5})
        await agent.until(lambda: len(agent.asked) == 3)
        agent.asked[2][2](Answer())
        assert await line.hear() == {"answer": 3}
        line.say({"request": 4, "type": "snapshot"})
        await agent.until(lambda: len(agent.asked) == 4)
        line.socket.close()
        await agent.heard(Disconnected())
        agent.asked[3][2](Answer())


@running
async def test_what_cannot_be_asked_is_answered_with_a_sentence_and_the_line_goes_on() -> None:
    with agent_of_one() as (_, line):
        for request in (
            {"type": "nothing"},
            {**TAKE, "spec": {"size": -1, "shard": 5}},
            {**TAKE, "queue": "\n"},
            {"type": "used", "queue": "train", "shard": 0, "next": 2**80},
            {"type": "rollback", "state": {"version": 1, "queues": {"a": []}}},
        ):
            line.say({"request": 5, **request})
            answer = await line.hear()
            assert answer["answer"] == 5
            assert answer["error"].startswith("invalid request: ")


@running
async def test_an_invalid_message_of_a_known_process_is_reported_once_and_does_not_end_its_connection() -> None:
    with agent_of_one() as (agent, line):
        line.say({"type": "step", "step": -5}, {"type": "sing"}, [1, 2], {"type": "step", "step": 4})
        await agent.heard(Step(4))
        notes = [event for _, event in agent.events if isinstance(event, Note)]
        assert len(notes) == 1
        assert "step" in notes[0].text


@pytest.mark.parametrize(
    "word",
    [
        b'{"type":"hello","token":"x","pid":1}\n',
        b'{"type":"ready"}\n',
        b'{"request":1,"type":"snapshot"}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\n",
        b"[" * 60_000 + b"\n",
        b"\xff\xfe\n",
        b"\n",
        b"x" * (2 * MAX_LINE),
    ],
)
def test_a_process_without_a_token_is_refused(word: bytes) -> None:
    async def test() -> None:
        agent = Agent()
        agent.channel.expect(WORKER)
        line = Line(agent.channel.address)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            line.socket.sendall(word)
        assert await line.hear() is None
        assert agent.events == []
        assert agent.asked == []
        agent.channel.close()

    running(test)()


@running
async def test_another_user_is_refused_even_with_the_token() -> None:
    agent = Agent()
    token = agent.channel.expect(WORKER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_module.os, "geteuid", lambda: os.getuid() + 1)
        line = Line(agent.channel.address)
        line.say({"type": "hello", "token": token, "pid": 1})
        assert await line.hear() is None
    assert agent.events == []
    agent.channel.close()


CHILD = """
import os, socket, sys, time
line = socket.socket(socket.AF_UNIX)
line.connect("\\0" + sys.argv[1][1:])
line.sendall(b'{"type":"hello","token":"%s","pid":1}\\n' % sys.argv[2].encode())
print(line.recv(100) == b"", flush=True)
"""


async def child(*argv: str) -> str:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", *argv, stdout=subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    return out.decode().strip()


@running
async def test_a_child_with_its_parents_token_does_not_take_over_the_line() -> None:
    agent = Agent()
    token = agent.channel.expect(WORKER)
    line = Line(agent.channel.address)
    line.say({"type": "hello", "token": token, "pid": 1})
    await agent.heard(ProcessHello("", os.getpid()))
    assert await child(CHILD, agent.channel.address, token) == "True"
    line.say({"type": "step", "step": 1})
    await agent.heard(ProcessHello("", os.getpid()), Step(1))
    agent.channel.close()


@running
async def test_the_latest_connection_of_a_process_wins() -> None:
    agent = Agent()
    token = agent.channel.expect(WORKER)
    hello = {"type": "hello", "token": token, "pid": 1}
    first, second = Line(agent.channel.address), Line(agent.channel.address)
    first.say(hello, {"type": "step", "step": 1})
    await agent.heard(Step(1))
    first.say({"type": "step", "step": 2})
    second.say(hello, {"type": "step", "step": 3})
    pid = os.getpid()
    await agent.heard(ProcessHello("", pid), Step(1), Step(2), Disconnected(), ProcessHello("", pid), Step(3))
    assert await first.hear() is None
    agent.channel.close()


@running
async def test_the_last_messages_of_a_process_are_received_before_it_is_forgotten() -> None:
    agent = Agent()
    token = agent.channel.expect(CHIEF)
    agent.channel.send_order(CHIEF, OrderMessage(1))
    line = Line(agent.channel.address)
    # It leaves without having read what it was told.
    line.say({"type": "hello", "token": token, "pid": 1}, *({"type": "step", "step": step} for step in range(900)))
    line.say({"type": "saved", "step": 900, "path": "/x"})
    line.socket.close()
    agent.channel.finish(CHIEF)
    events = [event for _, event in agent.events]
    assert events == [ProcessHello("", os.getpid()), *map(Step, range(900)), Saved(900, "/x"), Disconnected()]
    late = Line(agent.channel.address)
    late.say({"type": "hello", "token": token, "pid": 1})
    assert await late.hear() is None
    agent.channel.close()


@running
async def test_a_process_that_has_ended_is_let_go_though_its_child_holds_the_line() -> None:
    with agent_of_one() as (agent, line):
        held = line.socket.dup()
        agent.channel.finish(WORKER)
        assert [event for _, event in agent.events] == [ProcessHello("", os.getpid()), Disconnected()]
        held.close()


@running
async def test_a_flood_of_one_process_does_not_delay_messages_of_the_others() -> None:
    agent = Agent()
    tokens = {task: agent.channel.expect(task) for task in (WORKER, CHIEF)}
    flood, calm = Line(agent.channel.address), Line(agent.channel.address)
    flood.say({"type": "hello", "token": tokens[WORKER], "pid": 1})
    flood.socket.setblocking(False)
    line = b'{"type":"step","step":1}\n'
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += flood.socket.send(line * 50_000)
    assert sent > 2 * MAX_LINE
    calm.say({"type": "hello", "token": tokens[CHIEF], "pid": 1})
    await agent.heard(ProcessHello("", os.getpid()), of=CHIEF)
    before = [task for task, _ in agent.events].index(CHIEF)
    assert before * len(line) <= 2 * MAX_LINE
    agent.channel.close()


@running
async def test_a_process_that_never_listens_costs_the_agent_one_order_and_a_few_answers() -> None:
    with agent_of_one() as (agent, line):
        await agent.heard(ProcessHello("", os.getpid()))
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        for version in range(20_000):
            agent.channel.send_order(WORKER, OrderMessage(version))
        latest = None
        while latest is None or latest["version"] != 19_999:
            latest = await line.hear()
        # Requests whose answers are never read end the line at last.
        await flood_with_requests(agent, line)
        await agent.heard(Disconnected())


async def flood_with_requests(agent: Agent, line: Line) -> None:
    asked = 0
    line.socket.setblocking(False)
    while not isinstance(agent.events[-1][1], Disconnected):
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            line.socket.send(b'{"request":1,"type":"sing' + b"x" * 1000 + b'"}\n')
        asked += 1
        assert asked < 100_000
        await asyncio.sleep(0)


@running
async def test_a_process_that_asks_and_asks_loses_its_line() -> None:
    with agent_of_one() as (agent, line):
        line.say(*({"request": number, "type": "snapshot"} for number in range(MAX_PENDING_REQUESTS + 1)))
        await agent.heard(Disconnected())
        assert len(agent.asked) == MAX_PENDING_REQUESTS
        assert agent.gone_to_clerk == [WORKER]


@running
async def test_a_line_without_an_end_is_ended_at_its_bound() -> None:
    with agent_of_one() as (agent, line):
        await agent.heard(ProcessHello("", os.getpid()))
        line.socket.sendall(b'{"type":"note","text":"')
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            line.socket.setblocking(True)
            await asyncio.get_running_loop().run_in_executor(None, line.socket.sendall, b"x" * (4 * MAX_LINE))
        await agent.heard(Disconnected())


@running
async def test_strangers_are_bounded_and_do_not_keep_a_process_out() -> None:
    agent = Agent()
    token = agent.channel.expect(WORKER)
    first = Line(agent.channel.address)
    first.say({"type": "hello", "token": token, "pid": 1})
    strangers = [Line(agent.channel.address) for _ in range(4 * MAX_UNAUTHENTICATED)]
    await agent.heard(ProcessHello("", os.getpid()))
    assert await strangers[0].hear() is None
    last = Line(agent.channel.address)
    last.say({"type": "hello", "token": token, "pid": 1}, {"type": "step", "step": 1})
    await agent.heard(Step(1))
    for line in strangers:
        line.socket.close()
    agent.channel.close()


@running
async def test_a_stranger_that_says_nothing_is_shown_the_door() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel_module, "HELLO_TIMEOUT", 0.05)
        agent = Agent()
        assert await Line(agent.channel.address).hear() is None
        agent.channel.close()


@running
async def test_connections_that_find_no_descriptor_are_accepted_when_there_is_one() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel_module, "ACCEPT_PAUSE", 0.05)
        agent = Agent()
        token = agent.channel.expect(WORKER)
        line = Line(agent.channel.address)
        line.say({"type": "hello", "token": token, "pid": 1})
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            # As the loop does it when somebody has connected.
            agent.channel._accept()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert agent.events == []
        await agent.heard(ProcessHello("", os.getpid()))
        agent.channel.close()


@running
async def test_any_message_of_any_process_leaves_the_channel_as_it_was() -> None:
    """Random words, cut up and put together, of one with a token and of many without."""
    chance = random.Random(11)
    pieces = [
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
    agent = Agent()
    tokens = {task: agent.channel.expect(task) for task in (WORKER, CHIEF)}
    descriptors = set(os.listdir("/proc/self/fd"))
    for _ in range(300):
        line = Line(agent.channel.address)
        words = b"".join(chance.choice(pieces) for _ in range(chance.randrange(30)))
        if chance.random() < 0.5:
            line.say({"type": "hello", "token": tokens[WORKER], "pid": 1})
            cut = chance.randrange(len(words) + 1)
            words = words[:cut] + bytes(chance.randrange(256) for _ in range(chance.randrange(9))) + words[cut:]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            line.socket.sendall(words)
        line.socket.close()
        await asyncio.sleep(0)
    calm = Line(agent.channel.address)
    calm.say({"type": "hello", "token": tokens[CHIEF], "pid": 1}, {"type": "step", "step": 5})
    await agent.heard(ProcessHello("", os.getpid()), Step(5), of=CHIEF)
    agent.channel.finish(WORKER)
    told = [event for task, event in agent.events if task == WORKER]
    assert (
        sum(isinstance(event, ProcessHello) for event in told)
        == sum(isinstance(event, Disconnected) for event in told)
        > 0
    )
    calm.socket.close()
    await agent.heard(Disconnected(), of=CHIEF)
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    agent.channel.close()


@running
async def test_what_is_reported_is_safe_on_a_terminal() -> None:
    with agent_of_one() as (agent, line):
        line.say({"type": "saved", "step": 1, "path": "/a  b\x1b[31m"}, {"type": "note", "text": "a\x1b[2Jb"})
        line.say({"type": "restored", "step": 1, "how": "fresh", "path": "/a  b", "skipped": ["x\x07"]})
        await agent.heard(Saved(1, "/a b [31m"), Note("a [2Jb"), Restored(1, "fresh", "/a  b", ("x",)))


def test_what_a_process_says_can_do_nothing_to_a_terminal() -> None:
    assert printable("\x1b[2Jgone\r\nand\x00 \x07back\u202e") == "[2Jgone and back"
    assert len(printable("x" * 10_000)) == MAX_TEXT


BOUNDS = ServerBounds(least=3, most=3, table="users", parts=3, refused=2)


@pytest.mark.parametrize(
    "said",
    [
        Note("a line", server_bounds=BOUNDS),
        Restored(7, "checkpoint", "/data/model.ckpt-7", ("one that was skipped",)),
        Restored(-1, "fresh"),
        Saved(7, "/data/model.ckpt-7"),
        Step(7),
        Ready(),
    ],
    ids=lambda said: type(said).__name__,
)
def test_what_may_stand_on_a_terminal_is_passed_on_with_each_of_its_fields(said: Any) -> None:
    assert sanitize(said) == said


def test_the_name_of_a_table_does_not_steer_a_terminal() -> None:
    said = sanitize(Note("\x1b[2J", server_bounds=ServerBounds(least=1, most=1, table="\x1b[2Jusers", parts=1)))
    assert isinstance(said, Note)
    assert said.server_bounds is not None
    assert (said.text, said.server_bounds.table) == ("[2J", "[2Jusers")
