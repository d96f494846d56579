"""What an agent does with workers that may outlive their round: real lines in virtual time, workers that are not."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from support.virtual_loop import run_virtually

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import RankAssignment, RoundKey
from dlrover_run.features.survivors.model import Formation, Store, SurvivorsAssignment, SurvivorsReport
from dlrover_run.features.survivors.survivors import Survivors
from dlrover_run.training.agent_line import LINE_VARIABLE, TOKEN_VARIABLE

STORE = Store("a", "1", "127.0.0.1", 7000)
STOP = (signal.SIGTERM, 30.0, None)
REPORT = NodeReport(node_id="a", incarnation="1", host="a", address="", port=0, workers=2)


@dataclass
class Worker:
    """A worker that runs, and the signal by which it was stopped."""

    local_rank: int
    stopped_with: signal.Signals | None = None
    code: int = 1

    @property
    def spec(self) -> Any:
        return SimpleNamespace(name=f"rank {self.local_rank}", rank=self.local_rank, local_rank=self.local_rank)

    def stop(self, number: signal.Signals, grace: float, delivered_at: float | None = None) -> None:
        self.stopped_with = number


@dataclass
class Node:
    """A node of two workers. `failed` are those that were killed as a failure of their round."""

    survivors: Survivors
    formed: list[int]
    lines: list[str]
    workers: list[Worker] = field(default_factory=lambda: [Worker(0), Worker(1)])
    failed: list[int] = field(default_factory=list)
    sockets: dict[int, socket.socket] = field(default_factory=dict)
    round: int = 1
    has_failed: bool = False

    # What is used of a WorkerRound.

    @property
    def key(self) -> RoundKey:
        return RoundKey(5, self.round)

    @property
    def group(self) -> Any:
        return SimpleNamespace(running=self.workers, ended=[])

    def kill(self, ranks: list[int], why: str, lost_peer: bool) -> None:
        self.failed += ranks

    # What happens.

    def assign(
        self, number: int, formation: Formation | None = None, store: Store | None = STORE, port: int = 0
    ) -> RankAssignment:
        """The node has ranks in that round."""
        counts = ("restart_count", "node_rank", "first_rank", "role_first_rank")
        ranks = RankAssignment(
            key=RoundKey(5, number), nodes=1, workers=2, world_size=2, role_world_size=2,
            store_address="", store_port=port, **dict.fromkeys(counts, 0),
        )  # fmt: skip
        part = SurvivorsAssignment(ranks.key, store, formation, 10.0, 600.0)
        self.survivors.follow(Assignment(parts=() if part is None else (part,)), ranks)
        return ranks

    def start(self, local_rank: int) -> None:
        """A worker starts in the round of the node, and connects."""
        variables = self.survivors.variables(self.key, local_rank)
        connected = self.sockets[local_rank] = socket.socket(socket.AF_UNIX)
        connected.connect("\0" + variables[LINE_VARIABLE][1:])
        self.send(local_rank, type="hello", token=variables[TOKEN_VARIABLE], pid=1, able=True, torch="2.15.0")

    def send(self, local_rank: int, **message: Any) -> None:
        self.sockets[local_rank].sendall(json.dumps(message).encode() + b"\n")

    async def choose(self, ranks: RankAssignment) -> bool:
        """What the agent does after all messages so far."""
        for _ in range(5):
            await asyncio.sleep(0)
        kept = self.survivors.advance(self, ranks)  # type: ignore[arg-type]
        for worker in [] if kept is None else self.workers:
            if worker.spec.local_rank not in kept and worker.stopped_with is None:
                worker.stop(*STOP)
        return kept is not None

    async def form(self, number: int, *local_ranks: int) -> RankAssignment:
        """Let these workers offer handles for a round, and join its group."""
        ranks = self.assign(number)
        await self.choose(ranks)
        for local_rank in local_ranks:
            self.send(local_rank, type="offer", round=[5, number], handle=f"h{local_rank} of {number}")
        await self.choose(ranks)
        self.round = number
        self.assign(number, Formation(ranks.key, 7, ("x", "y")))
        await self.choose(ranks)
        for local_rank in local_ranks:
            self.send(local_rank, type="formed", round=[5, number])
        await self.choose(ranks)
        return ranks


@asynccontextmanager
async def node() -> AsyncIterator[Node]:
    """A node whose two workers train in round 1."""
    formed: list[int] = []
    lines: list[str] = []
    found = Node(Survivors(formed.append, lambda: None, lines.append), formed, lines)
    found.assign(1)
    try:
        for local_rank in (0, 1):
            found.start(local_rank)
        await found.form(1, 0, 1)
        yield found
    finally:
        for connected in found.sockets.values():
            connected.close()
        await found.survivors.close()


def stopped(node: Node) -> list[signal.Signals | None]:
    return [worker.stopped_with for worker in node.workers]


def test_workers_that_have_a_line_and_the_store_of_the_next_round_keep_their_processes() -> None:
    async def run() -> None:
        async with node() as here:
            assert here.formed == [0, 1]
            ranks = here.assign(2)
            assert await here.choose(ranks)
            assert stopped(here) == [None, None]
            part = SurvivorsReport.find(here.survivors.add_to_report(REPORT).parts)
            assert part is not None
            assert (part.key, part.handles, part.store) == (RoundKey(5, 2), (), STORE)
            here.send(1, type="offer", round=[5, 2], handle="b")
            here.send(0, type="offer", round=[5, 2], handle="a")
            await here.choose(ranks)
            part = SurvivorsReport.find(here.survivors.add_to_report(REPORT).parts)
            assert part is not None
            assert (part.handles, part.kept) == (("a", "b"), 2)

    run_virtually(run())


@pytest.mark.parametrize("store", [None, replace(STORE, port=7001)])
def test_with_another_store_or_none_they_end_with_their_round(store: Store | None) -> None:
    async def run() -> None:
        async with node() as here:
            assert not await here.choose(here.assign(2, store=store))
            # As in any other job, by `reconcile`.
            assert stopped(here) == [None, None]

    run_virtually(run())


def test_a_worker_that_has_ended_its_line_is_replaced_and_the_other_one_stays() -> None:
    async def run() -> None:
        async with node() as here:
            here.sockets[1].close()
            await asyncio.sleep(0)
            assert await here.choose(here.assign(2))
            assert stopped(here) == [None, signal.SIGTERM]

    run_virtually(run())


def test_a_worker_that_has_left_its_block_is_not_stopped_in_its_round() -> None:
    async def run() -> None:
        async with node() as here:
            here.sockets[1].close()
            assert not await here.choose(here.assign(1))
            assert stopped(here) == [None, None]

    run_virtually(run())


def test_a_worker_that_does_not_answer_is_killed_at_the_limit() -> None:
    async def run() -> None:
        async with node() as here:
            ranks = here.assign(2)
            await here.choose(ranks)
            here.send(0, type="offer", round=[5, 2], handle="a")
            await asyncio.sleep(9.9)
            await here.choose(ranks)
            assert stopped(here) == [None, None]
            await asyncio.sleep(0.1)
            assert await here.choose(ranks)
            assert stopped(here) == [None, signal.SIGKILL]
            assert here.failed == []

    run_virtually(run())


def test_a_survivor_that_succeeds_before_its_next_group_is_replaced() -> None:
    async def run() -> None:
        async with node() as here:
            here.round = 2
            here.assign(2)
            worker = here.workers[1]
            worker.code = 0
            here.survivors.note_end(worker)
            assert worker.stopped_with is signal.SIGTERM, "it is no success of the round"

    run_virtually(run())


def test_a_new_worker_that_does_not_answer_fails_its_round() -> None:
    async def run() -> None:
        async with node() as here:
            here.survivors.note_end(here.workers[1])
            here.round = 2
            ranks = here.assign(2)
            here.start(1)
            await here.choose(ranks)
            here.send(0, type="offer", round=[5, 2], handle="a")
            await asyncio.sleep(10)
            await here.choose(ranks)
            assert here.failed == [1]

    run_virtually(run())


def test_a_stall_of_the_agent_gives_the_workers_that_time_too() -> None:
    async def run() -> None:
        async with node() as here:
            ranks = here.assign(2)
            await here.choose(ranks)
            loop: Any = asyncio.get_running_loop()
            # The machine was suspended, so the workers had no time either.
            loop._virtual.now += 100
            await here.choose(ranks)
            await asyncio.sleep(0)
            assert stopped(here) == [None, None]
            await asyncio.sleep(10)
            await here.choose(ranks)
            assert stopped(here) == [signal.SIGKILL, signal.SIGKILL]

    run_virtually(run())


def test_what_is_no_message_ends_the_line_of_a_worker() -> None:
    async def run() -> None:
        async with node() as here:
            here.send(0, type="offer", round=[5, -1], handle="a")
            assert await here.choose(here.assign(2))
            assert len(here.lines) == 1
            assert stopped(here) == [signal.SIGTERM, None]

    run_virtually(run())


# A worker without a block, at the store of the round.


def unable(node: Node) -> tuple[str, ...]:
    """The codes of what this node reports against a group that is formed in place."""
    part = SurvivorsReport.find(node.survivors.add_to_report(REPORT).parts)
    return () if part is None else tuple(reason.code for reason in part.unable)


def test_a_client_of_the_store_of_the_round_is_a_worker_without_a_block() -> None:
    async def run() -> None:
        async with node() as here:
            ranks = here.assign(2)
            await here.choose(ranks)
            here.survivors.note_store_client(RoundKey(5, 1), "10.0.0.1")
            await here.choose(ranks)
            assert unable(here) == (), "it was a client of another round's store"
            here.survivors.note_store_client(ranks.key, "10.0.0.1")
            await here.choose(ranks)
            assert unable(here) == ("survivors.no_block",)
            here.assign(2, Formation(ranks.key))
            await here.choose(ranks)
            assert unable(here) == ("survivors.no_block",)
            here.assign(3)
            assert unable(here) == (), "another round may have no such worker"

    run_virtually(run())


def test_a_client_of_the_store_after_the_group_has_formed_changes_nothing() -> None:
    async def run() -> None:
        async with node() as here:
            ranks = await here.form(2, 0, 1)
            here.survivors.note_store_client(ranks.key, "10.0.0.1")
            await here.choose(ranks)
            assert unable(here) == ()

    run_virtually(run())
