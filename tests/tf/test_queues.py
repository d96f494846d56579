"""The agent that serves the data queues: on one machine, and over connections that break."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import pytest
from loops import in_loop

from tf_ps_runner.agent import queue_server
from tf_ps_runner.agent.channel import TaskChannel
from tf_ps_runner.agent.protocol import (
    Answer,
    Request,
    Rollback,
    Snapshot,
    Step,
    Take,
    TaskEvent,
    Used,
    answer_line,
    read_line,
)
from tf_ps_runner.agent.queue_server import Membership, QueueServer
from tf_ps_runner.agent.queue_service import Queues, QueueService
from tf_ps_runner.cluster.model import PlannedTask, Role, TaskKey
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.data.access import PROTOCOL, prove
from tf_ps_runner.data.queue import STATE_VERSION, QueueSpec, QueueState, SavedState
from tf_ps_runner.worker import queue_client
from tf_ps_runner.worker.queue_client import QueueClient

CHIEF, A, B = TaskKey(Role.CHIEF, 0), TaskKey(Role.WORKER, 0), TaskKey(Role.WORKER, 1)
SPEC = QueueSpec(size=20, shard=10)
TAKE = Take("train", SPEC)
TIMEOUT = 30.0
FIRST, SECOND = Answer(shard=0, begin=0, end=10, epoch=0), Answer(shard=1, begin=10, end=20, epoch=0)
OVER = Answer(over=True)


class Service:
    """A service or the queues of an agent, and all answers in order."""

    def __init__(self, queues: QueueService | Queues) -> None:
        self._queues = queues
        self.gone = queues.gone
        self.answers: list[tuple[TaskKey, Answer]] = []

    def __call__(self, task: TaskKey, ask: Request) -> Answer | None:
        """The immediate answer; None while the request waits."""
        before = len(self.answers)
        self._queues.ask(task, ask, lambda answer: self.answers.append((task, answer)))
        return next((answer for of, answer in self.answers[before:] if of == task), None)

    def refused(self, task: TaskKey, ask: Request) -> Answer:
        """The answer of a request that is refused."""
        answer = self(task, ask)
        assert answer is not None
        assert answer.lost or answer.error
        return answer


@pytest.fixture
def ask() -> Service:
    return Service(QueueService())


def test_a_task_without_a_part_waits_and_gets_those_of_a_dead_process(ask: Service) -> None:
    assert ask(A, TAKE) == FIRST
    assert ask(B, TAKE) == SECOND
    assert ask(CHIEF, TAKE) is None
    assert ask(B, Used("train", 1, 14)) == Answer()
    ask.gone(B)
    assert ask.answers[-1] == (CHIEF, Answer(shard=1, begin=14, end=20, epoch=0))
    assert ask(CHIEF, Used("train", 1, 20)) == Answer()
    assert ask(CHIEF, TAKE) is None, "A may still exit"
    assert ask(A, Used("train", 0, 10)) == Answer()
    assert ask.answers[-1] == (CHIEF, OVER)
    assert ask(A, TAKE) == OVER


def test_waiting_holders_of_the_last_parts_finish_except_one(ask: Service) -> None:
    assert ask(A, TAKE) == FIRST
    assert ask(CHIEF, TAKE) == SECOND
    assert ask(A, TAKE) is None
    assert ask(CHIEF, TAKE) is None
    assert ask.answers[-1] == (A, OVER), "the chief stays"
    ask.gone(A)
    assert ask.answers[-1] == (CHIEF, FIRST)
    assert ask(CHIEF, TAKE) == OVER, "no other task holds anything"


def test_a_waiting_task_that_ends_gets_nothing(ask: Service) -> None:
    assert ask(A, TAKE) == FIRST
    assert ask(A, TAKE) == SECOND
    assert ask(B, TAKE) is None
    assert ask(CHIEF, TAKE) is None
    ask.gone(B)
    ask.gone(A)
    assert [task for task, _ in ask.answers] == [A, A, CHIEF]


def test_a_rollback_takes_all_parts_back_and_hands_them_to_waiting_tasks(ask: Service) -> None:
    state = ask(CHIEF, Snapshot())
    assert state is not None
    ask(A, TAKE)
    ask(A, TAKE)
    assert ask(B, TAKE) is None
    assert ask(CHIEF, Rollback(state.state)) == Answer()
    assert ask.answers[-1] == (B, FIRST)
    refused = ask.refused(A, Used("train", 0, 10))
    assert refused.lost
    assert "no longer held" in refused.error


def test_another_spec_and_an_invalid_state_are_answered_with_an_error_message(ask: Service) -> None:
    ask(A, TAKE)
    refused = ask.refused(B, Take("train", QueueSpec(size=21, shard=10)))
    assert not refused.lost
    assert refused.error.startswith("queue train exists already and hands out 20 in parts of 10")
    wrong = ask.refused(CHIEF, Rollback(SavedState(STATE_VERSION, {"train": QueueState(SPEC, 3)})))
    assert wrong.error.startswith("the state of the queues cannot be restored: queue train: ")
    assert ask(B, TAKE) == SECOND


def test_an_answer_that_ends_its_connection_loses_nothing() -> None:
    service = QueueService()
    ask = Service(service)
    assert ask(A, TAKE) == FIRST
    assert ask(CHIEF, TAKE) == SECOND
    service.ask(B, TAKE, lambda answer: service.gone(B))
    other = TaskKey(Role.WORKER, 2)
    assert ask(other, TAKE) is None
    ask.gone(A)
    assert ask.answers[-1] == (other, FIRST)


def order(version: int, *tasks: TaskKey, queue_endpoint: str = "", queue_key: str = "") -> NodeOrder:
    """An order to run these tasks."""
    return NodeOrder(
        version=version,
        tasks=tuple(
            PlannedTask(key=key, rank=0, version=version, node_id="n", incarnation="i", host="h") for key in tasks
        ),
        queue_endpoint=queue_endpoint,
        queue_key=queue_key,
    )


def test_a_process_of_an_earlier_version_can_neither_take_nor_use() -> None:
    queues = Queues()
    ask = Service(queues)
    queues.follow(order(1, CHIEF, A))
    assert ask(A, TAKE) == FIRST
    queues.follow(order(2, TaskKey(Role.CHIEF, 1), B))
    for request in (TAKE, Used("train", 0, 10)):
        assert ask.refused(A, request).lost
    assert ask(B, TAKE) == FIRST, "batches that were not reported are not in the new model"


def test_a_worker_that_leaves_still_reports_its_used_batches() -> None:
    queues = Queues()
    ask = Service(queues)
    queues.follow(order(1, CHIEF, A))
    assert ask(A, TAKE) == FIRST
    queues.follow(order(1, CHIEF))
    queues.follow(order(0))
    assert ask(A, Used("train", 0, 10)) == Answer()


def test_only_the_chief_rolls_back() -> None:
    queues = Queues()
    ask = Service(queues)
    queues.follow(order(1, CHIEF, A))
    for request in (Snapshot(), Rollback(None)):
        assert ask.refused(A, request).error == "only the chief has to do with the state of the queues"
        assert ask(CHIEF, request) is not None


WORKER_CODE = """
import json, sys
from tf_ps_runner.worker.agent_connection import agent
from tf_ps_runner.worker.shards import AgentQueue, ShardSpec
queue = AgentQueue(agent(), "train", ShardSpec(size=20, shard=10))
while (part := queue.take()) is not None:
    print(json.dumps(part), flush=True)
    for offset in range(part.begin, part.end):
        if sys.stdin.readline() == "":
            sys.exit()
        queue.use(part.number, offset + 1)
        agent().report("step", step=offset)
print("over", flush=True)
"""


@contextlib.asynccontextmanager
async def worker_process(channel: TaskChannel, task: TaskKey) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {**os.environ, "TF_PS_AGENT": channel.address, "TF_PS_TASK_TOKEN": channel.expect(task)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER_CODE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def line_of(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    return await asyncio.wait_for(process.stdout.readline(), TIMEOUT)


@in_loop
async def test_the_rest_of_a_killed_process_part_goes_to_another_process() -> None:
    steps = asyncio.Queue[int]()

    def on_event(task: TaskKey, event: TaskEvent) -> None:
        if isinstance(event, Step):
            steps.put_nowait(event.step)

    queues = Queues()
    queues.follow(order(1, CHIEF, A, B))
    channel = TaskChannel(on_event, queues)
    channel.open()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(channel.close)
        first = await stack.enter_async_context(worker_process(channel, A))
        assert json.loads(await line_of(first))[:3] == [0, 0, 10]
        second = await stack.enter_async_context(worker_process(channel, B))
        assert json.loads(await line_of(second))[:3] == [1, 10, 20]
        assert first.stdin is not None
        assert second.stdin is not None
        first.stdin.write(b"\n\n\n")
        assert [await asyncio.wait_for(steps.get(), TIMEOUT) for _ in range(3)] == [0, 1, 2]
        first.send_signal(signal.SIGKILL)
        await first.wait()
        channel.finish(A)
        second.stdin.write(b"\n" * 10)
        assert json.loads(await line_of(second))[:3] == [0, 3, 10]
        second.stdin.write(b"\n" * 7)
        assert await line_of(second) == b"over\n"
        assert await second.wait() == 0


@in_loop
async def test_a_request_waits_until_the_address_of_the_queues_is_known() -> None:
    queues = Queues(Membership("job", "secret"))
    ask = Service(queues)
    queues.follow(order(1, A))
    assert ask(A, TAKE) is None
    assert ask(B, TAKE) is not None, "it is no task of this node"
    queues.gone(A)
    assert ask(A, TAKE) is None
    queues.follow(order(1, A, queue_endpoint="host:1", queue_key="k"))
    ((_, found),) = ask.answers[1:]
    assert found.queue is not None
    assert (found.queue.endpoint, found.queue.role, found.queue.id) == ("host:1", "worker", 0)
    assert "secret" not in found.queue.token


class Wire:
    """A connection between nodes that a test can break at any moment, with the data in flight."""

    def __init__(self) -> None:
        self.port = 0
        self.passed = 0
        self.cut_after: Callable[[], int | None] = lambda: None
        self.blocked = False
        self._target = 0
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Future[None]] = set()

    async def open(self, target: int) -> None:
        self._target = target
        self._server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.blocked:
            self._cut((writer,))
            return
        carrying = asyncio.ensure_future(self._carry(reader, writer))
        self._carrying.add(carrying)
        carrying.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # The agent behind it has closed its port, as at the end of a test.
            self._cut((writer,))
            return
        pair = (writer, far_writer)
        self._ends.update(pair)
        left = self.cut_after()

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            nonlocal left
            try:
                while data := await source.read(300):
                    if left is not None:
                        left -= len(data)
                        if left < 0:
                            self._cut(pair)
                            return
                    self.passed += len(data)
                    sink.write(data)
            except OSError:
                self._cut(pair)
            else:
                # The end of a stream is forwarded as such.
                for end in pair:
                    end.close()

        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        self._ends.difference_update(pair)

    def _cut(self, ends: tuple[asyncio.StreamWriter, ...]) -> None:
        for end in ends:
            # Broken, not closed: the other side gets a reset.
            with contextlib.suppress(OSError):
                end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.transport.abort()
            self._ends.discard(end)

    def cut(self) -> None:
        """Break all connections now."""
        self._cut(tuple(self._ends))

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        if self._carrying:
            await asyncio.wait(self._carrying)


class FarProcess:
    """A task of a node without the chief, with its real client."""

    def __init__(self, nodes: Nodes, task: TaskKey) -> None:
        self._nodes = nodes
        self._loop = asyncio.get_running_loop()
        self.task = task
        self.client = QueueClient(self)

    def request(self, what: str, **fields: Any) -> Mapping[str, Any]:
        """The answer of the agent of its own node; called in the client's threads."""
        asked = read_line(json.dumps({"request": 1, "type": what, **fields}).encode())
        assert isinstance(asked, tuple)
        found: Future[Answer] = Future()
        self._loop.call_soon_threadsafe(self._nodes.far.ask, self.task, asked[1], found.set_result)
        answered: dict[str, Any] = json.loads(answer_line(1, self._nodes.ended_by(found)))
        return answered

    async def ask(self, ask: Request) -> Answer:
        """The result of a request."""
        fields = msgspec.to_builtins(ask)
        what = fields.pop("type")
        found = await self._loop.run_in_executor(self._nodes.threads, lambda: self.client.request(what, **fields))
        return msgspec.convert(found, Answer)

    def end(self) -> None:
        """End as a process does: the kernel closes its connections."""
        connection = self.client._connection
        self.client = QueueClient(self)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.line.shutdown(socket.SHUT_RDWR)


class NodesGone(ConnectionError):
    """The exception after the loss of the agent."""


class Nodes:
    """The node of the chief and another one, with a wire between them."""

    def __init__(self, token: str = "secret", other_token: str | None = None, key: str | None = None) -> None:
        self.near = Queues(Membership("job", token))
        self.far = Queues(Membership("job", token if other_token is None else other_token))
        self.key = self.near.key if key is None else key
        self.wire = Wire()
        self.threads = ThreadPoolExecutor(32)
        self._over = threading.Event()
        self._processes: list[FarProcess] = []

    def process(self, task: TaskKey) -> FarProcess:
        """A task of the far node."""
        self._processes.append(FarProcess(self, task))
        return self._processes[-1]

    def ended_by(self, found: Future[Answer]) -> Answer:
        """Return a result of the event loop to a thread."""
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                return found.result(0.1)
        raise NodesGone

    @contextlib.asynccontextmanager
    async def up(self, far_tasks: tuple[TaskKey, ...] = (A, B)) -> AsyncIterator[Nodes]:
        await self.near.listen()
        await self.wire.open(self.near.port)
        self.place = f"127.0.0.1:{self.wire.port}"
        self.near.follow(order(1, CHIEF, queue_endpoint=self.place, queue_key=self.key))
        self.far.follow(order(1, *far_tasks, queue_endpoint=self.place, queue_key=self.key))
        try:
            yield self
        finally:
            self._over.set()
            await self.near.close()
            await self.wire.close()
            for process in self._processes:
                process.end()
            await asyncio.to_thread(self.threads.shutdown)


async def answer(queues: Queues, task: TaskKey, ask: Request) -> Answer:
    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    queues.ask(task, ask, answered.set_result)
    return await asyncio.wait_for(answered, TIMEOUT)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Short pauses between attempts to connect. A connection that was closed, not broken, is not waited for."""
    monkeypatch.setattr(queue_client, "BACKOFF_FIRST", 0.001)
    monkeypatch.setattr(queue_client, "BACKOFF_MAX", 0.01)
    monkeypatch.setattr(queue_server, "ENDED_GRACE", 0.0)
    return monkeypatch


remote = pytest.mark.usefixtures("hurried")
"""For tests of two nodes."""


async def use_up(
    ask: Callable[[Request], Awaitable[Answer]],
    take: Take,
    used: Counter[tuple[int, int]],
    leave: Callable[[], bool] = lambda: False,
) -> int:
    """Use parts in batches of five until there are no more. Return how many batches were not reported, because the part
    was lost or the process left.
    """
    lost = 0
    while not (part := await ask(take)).over:
        assert part.shard is not None
        assert part.begin is not None
        assert part.end is not None
        for offset in range(part.begin, part.end, 5):
            used.update((part.epoch or 0, block) for block in range(offset, offset + 5))
            answered = Answer(lost=True) if leave() else await ask(Used("train", part.shard, offset + 5))
            if answered.lost:
                lost += 1
                break
            assert answered == Answer()
    return lost


@remote
@in_loop
async def test_the_tasks_of_another_node_take_from_the_same_queues() -> None:
    async with Nodes().up() as nodes:
        a, b = nodes.process(A), nodes.process(B)
        assert await a.ask(TAKE) == FIRST
        assert await answer(nodes.near, CHIEF, TAKE) == SECOND
        waiting = asyncio.ensure_future(b.ask(TAKE))
        assert await answer(nodes.near, CHIEF, Used("train", 1, 12)) == Answer()
        assert await a.ask(Used("train", 0, 10)) == Answer()
        assert not waiting.done()
        nodes.near.gone(CHIEF)
        assert await waiting == Answer(shard=1, begin=12, end=20, epoch=0)
        b.end()
        assert await a.ask(TAKE) == Answer(shard=1, begin=12, end=20, epoch=0)
        assert (await a.ask(Used("train", 0, 10))).lost
        assert "exists already" in (await a.ask(Take("train", QueueSpec(size=1, shard=1)))).error
        assert "only the chief" in (await a.ask(Snapshot())).error


@remote
@in_loop
async def test_a_connection_that_breaks_at_any_point_neither_loses_nor_repeats_a_batch() -> None:
    chance = random.Random(5)
    take = Take("train", QueueSpec(size=200, shard=10))
    for _ in range(8):
        used = Counter[tuple[int, int]]()
        async with Nodes().up() as nodes:
            nodes.wire.cut_after = lambda: chance.randrange(3000) if chance.random() < 0.9 else None
            # Two threads of one process share its connection, and the chief is on the node of the queues.
            a, b, near = nodes.process(A), nodes.process(B), partial(answer, nodes.near, CHIEF)
            lost = await asyncio.gather(*(use_up(ask, take, used) for ask in (a.ask, a.ask, b.ask, near)))
            assert nodes.wire.passed
        assert sum(lost) == 0
        assert used == Counter(dict.fromkeys(((0, block) for block in range(200)), 1))


@remote
@pytest.mark.parametrize("seed", range(8))
@in_loop
async def test_tasks_that_exit_and_nodes_that_stay_unreachable_repeat_at_most_a_batch_and_lose_nothing(
    seed: int, hurried: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    hurried.setattr(queue_server, "BROKEN_GRACE", chance.choice([0.004, 60.0]))
    tasks = tuple(TaskKey(Role.WORKER, number) for number in range(4))
    take = Take("train", QueueSpec(size=100, shard=10, shuffle=True, epochs=2))
    used = Counter[tuple[int, int]]()

    def leaves(process: FarProcess) -> bool:
        if chance.random() < 0.02:
            process.end()
            return True
        return False

    async with Nodes().up(tasks) as nodes:
        nodes.wire.cut_after = lambda: chance.randrange(1500, 6000)
        processes = [nodes.process(task) for task in tasks]
        lost = await asyncio.gather(*(use_up(each.ask, take, used, partial(leaves, each)) for each in processes))
    assert set(used) == {(epoch, block) for epoch in range(2) for block in range(100)}
    assert sum(used.values()) - len(used) <= 5 * sum(lost)


@remote
@in_loop
async def test_the_parts_of_a_process_that_stays_unreachable_are_returned(hurried: pytest.MonkeyPatch) -> None:
    hurried.setattr(queue_server, "BROKEN_GRACE", 0.05)
    async with Nodes().up() as nodes:
        a = nodes.process(A)
        assert await a.ask(TAKE) == FIRST
        assert await answer(nodes.near, CHIEF, TAKE) == SECOND
        nodes.wire.blocked = True
        nodes.wire.cut()
        assert await answer(nodes.near, CHIEF, TAKE) == FIRST
        nodes.wire.blocked = False
        assert (await a.ask(Used("train", 0, 10))).lost


@remote
@in_loop
async def test_a_broken_connection_has_longer_to_reconnect_than_a_closed_one() -> None:
    async with Nodes().up() as nodes:
        a, b = nodes.process(A), nodes.process(B)
        assert await a.ask(TAKE) == FIRST
        assert await b.ask(TAKE) == SECOND
        waiting = asyncio.ensure_future(answer(nodes.near, CHIEF, TAKE))
        nodes.wire.cut()
        assert await b.ask(Used("train", 1, 15)) == Answer()
        b.end()
        assert await waiting == Answer(shard=1, begin=15, end=20, epoch=0)
        assert await a.ask(Used("train", 0, 10)) == Answer()


@remote
@in_loop
async def test_the_parts_of_a_replaced_process_are_returned() -> None:
    async with Nodes().up() as nodes:
        a = nodes.process(A)
        assert await a.ask(TAKE) == FIRST
        assert await a.ask(Used("train", 0, 5)) == Answer()
        nodes.wire.cut()
        assert await nodes.process(A).ask(TAKE) == Answer(shard=0, begin=5, end=10, epoch=0)


@remote
@in_loop
async def test_a_process_of_a_later_version_waits_until_the_chief_knows_the_version() -> None:
    async with Nodes().up() as nodes:
        a = nodes.process(A)
        assert await a.ask(TAKE) == FIRST
        later = TaskKey(Role.WORKER, 9)
        nodes.far.follow(order(2, later, queue_endpoint=nodes.place, queue_key=nodes.key))
        waiting = asyncio.ensure_future(nodes.process(later).ask(TAKE))
        assert await answer(nodes.near, CHIEF, TAKE) == SECOND
        nodes.near.follow(order(2, TaskKey(Role.CHIEF, 1), queue_endpoint=nodes.place))
        assert await waiting == FIRST
        assert (await a.ask(Used("train", 0, 10))).lost


@remote
@pytest.mark.parametrize(
    ("token", "other", "key"),
    [
        ("secret", "another", None),
        ("secret", "", None),
        ("", "secret", None),
        ("secret", "secret", "0" * 64),
        ("", "", ""),
    ],
)
@in_loop
async def test_a_process_with_another_token_or_without_the_key_gets_no_part(
    token: str, other: str, key: str | None, hurried: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    warned = asyncio.Event()
    loop = asyncio.get_running_loop()

    def note(sentence: str) -> None:
        warnings.append(sentence)
        loop.call_soon_threadsafe(warned.set)

    hurried.setattr(queue_client, "note", note)
    async with Nodes(token, other, key).up() as nodes:
        waiting = asyncio.ensure_future(nodes.process(A).ask(TAKE))
        await asyncio.wait_for(warned.wait(), TIMEOUT)
        (warning,) = warnings
        assert "token" in warning
        assert "secret" not in warning
        assert not waiting.done()
        assert await answer(nodes.near, CHIEF, TAKE) == FIRST, "no part was taken before"
    with pytest.raises(NodesGone):
        await waiting


@remote
@in_loop
async def test_without_a_token_the_key_is_sufficient() -> None:
    async with Nodes("").up() as nodes:
        assert await nodes.process(A).ask(TAKE) == FIRST


HELLO = {"type": "queue", "protocol": PROTOCOL, "job": "job", "session": "a" * 64, "nonce": "b" * 64}


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


@remote
@in_loop
async def test_the_token_of_one_task_is_refused_for_another() -> None:
    async with Nodes().up() as nodes:
        token = Membership("job", "secret").token_of(A, 1, nodes.key)
        for role, number, version in (("worker", 0, 1), ("worker", 1, 1), ("chief", 0, 1), ("worker", 0, 2)):
            reader, writer = await asyncio.open_connection("127.0.0.1", nodes.near.port)
            writer.write(line(**HELLO, version=version, role=role, id=number))
            nonce = json.loads(await reader.readline())["nonce"]
            writer.write(line(type="proof", mac=prove(token, "process", "b" * 64, nonce)))
            answered = json.loads(await reader.readline())["type"]
            assert answered == ("welcome" if (role, number, version) == ("worker", 0, 1) else "refused")
            writer.close()


@remote
@in_loop
async def test_unauthenticated_peers_get_no_answer_and_are_disconnected() -> None:
    chance = random.Random(3)
    opening = line(**HELLO, version=1, role="worker", id=0)
    proof = line(type="proof", mac="0" * 64)
    pieces = [
        opening,
        proof,
        line(request=1, **msgspec.to_builtins(TAKE)),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\xff\n",
        b"[" * 3000 + b"\n",
        b"x" * 200_000,
        b"\n",
    ]
    async with Nodes().up() as nodes:
        a = nodes.process(A)
        assert await a.ask(TAKE) == FIRST
        for _ in range(100):
            reader, writer = await asyncio.open_connection("127.0.0.1", nodes.near.port)
            writer.write(b"".join(chance.choices(pieces, k=chance.randrange(1, 4))) + opening + proof)
            with contextlib.suppress(OSError):
                while received := await asyncio.wait_for(reader.readline(), TIMEOUT):
                    assert b"welcome" not in received
                    assert b"answer" not in received
            writer.close()
        silent = [await asyncio.open_connection("127.0.0.1", nodes.near.port) for _ in range(200)]
        assert await nodes.process(B).ask(TAKE) == SECOND
        nodes.wire.cut()
        assert await a.ask(Used("train", 0, 10)) == Answer()
        for _, writer in silent:
            writer.close()


@in_loop
async def test_unauthenticated_connections_that_come_at_once_are_limited() -> None:
    server = QueueServer(lambda *_: None, lambda _: None, Membership("job", "secret"))
    port = await server.listen()
    strangers = [await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port)) for _ in range(200)]
    while len(server._connections._serving) < queue_server.MAX_UNAUTHENTICATED:
        await asyncio.sleep(0)
    assert 0 < len(server._unauthenticated) <= queue_server.MAX_UNAUTHENTICATED
    for stranger in strangers:
        stranger.close()
    server.close()


def test_the_token_is_not_printed() -> None:
    assert "secret" not in repr(Membership("job", "secret"))
