"""When a node reads the steps of its workers for the autoscaler, and what it reports of them. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from support.scripted_agent import rank_assignment
from support.virtual_loop import run_virtually

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import RankAssignment, RoundKey
from dlrover_run.features.autoscale.model import AutoscaleAssignment, AutoscaleNodeReport, AutoscaleState
from dlrover_run.features.autoscale.node import ThroughputReport
from dlrover_run.observe.page import Phase, Progress, StepSource
from dlrover_run.observe.tick import Tick

KEY, NEXT = RoundKey(5, 1), RoundKey(5, 2)
STEP = 0.5
BOOT = 10**12
"""The clock of the machine, in nanoseconds, when the loop begins."""
KNOWN = AutoscaleState(target=2)


class Node:
    """A node with rank 0 of four workers, whose workers make a step each half second from `began` on."""

    def __init__(self) -> None:
        self.reads: list[float] = []
        self.woken = 0
        self.began = 0.0
        self.running = KEY
        self.left: int | None = None
        self.tick = Tick(self.read, lambda name, error: None)
        self.throughput = ThroughputReport(
            self.tick, lambda key: key == self.running, self.wake, lambda: BOOT + int(self.now * 1e9)
        )

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wake(self) -> None:
        self.woken += 1

    def read(self) -> Mapping[str, Progress]:
        self.reads.append(self.now)
        steps = int((self.now - self.began) / STEP)
        at = BOOT + int((self.began + steps * STEP) * 1e9)
        done = Progress(steps, 8 * steps, 0.0, at, StepSource.REPORT, Phase.TRAINING, left=self.left)
        return {"rank 0": done} if steps else {}

    def follow(self, part: AutoscaleAssignment | None, key: RoundKey = KEY, shutting_down: bool = False) -> None:
        self.tick.follow(key, running=True)
        self.throughput.follow(
            Assignment(phase=PlanPhase.TRAINING, key=key, ranks=ranks(key), parts=() if part is None else (part,)),
            shutting_down,
        )

    def part(self, key: RoundKey = KEY) -> AutoscaleNodeReport | None:
        report = NodeReport(
            node_id="a", incarnation="1", host="a", address="a.net", port=1, workers=1, ranks=ranks(key)
        )
        return AutoscaleNodeReport.find(self.throughput.add_to_report(report).parts)


def ranks(key: RoundKey) -> RankAssignment:
    return rank_assignment(key=key, nodes=4, world_size=4, role_world_size=4, store_address="a.net", store_port=1)


def test_a_node_that_is_not_asked_reads_and_reports_nothing() -> None:
    async def run() -> None:
        node = Node()
        node.follow(None)
        node.follow(AutoscaleAssignment())
        await asyncio.sleep(100)
        assert (node.reads, node.woken, node.part()) == ([], 0, None)

    run_virtually(run())


def test_it_reports_steps_the_samples_of_all_workers_and_seconds_of_its_own() -> None:
    async def run() -> None:
        node = Node()
        node.follow(AutoscaleAssignment(5.0))
        await asyncio.sleep(5.2)
        assert node.part() == AutoscaleNodeReport(KEY, steps=10, samples=10 * 8 * 4)
        await asyncio.sleep(5)
        assert node.part() == AutoscaleNodeReport(KEY, steps=20, samples=20 * 8 * 4, seconds=5.0)
        assert node.woken == 2

    run_virtually(run())


def test_it_reports_what_is_left_as_the_worker_says_it() -> None:
    async def run() -> None:
        node = Node()
        node.left = 640
        node.follow(AutoscaleAssignment(5.0))
        await asyncio.sleep(5.2)
        assert node.part() == AutoscaleNodeReport(KEY, steps=10, samples=10 * 8 * 4, left=640)

    run_virtually(run())


def test_steps_of_an_earlier_round_are_not_reported() -> None:
    async def run() -> None:
        node = Node()
        node.follow(AutoscaleAssignment(5.0))
        await asyncio.sleep(5.2)
        node.follow(AutoscaleAssignment(5.0), NEXT)
        assert node.part(NEXT) is None
        await asyncio.sleep(10)
        # The workers of the last round still end.
        assert node.part(NEXT) is None
        node.running, node.began = NEXT, node.now
        await asyncio.sleep(10)
        part = node.part(NEXT)
        assert part is not None
        assert (part.key, part.seconds) == (NEXT, 5.0)

    run_virtually(run())


def test_what_is_to_be_kept_stays_until_something_else_is_to_be_kept() -> None:
    async def run() -> None:
        node = Node()
        node.follow(AutoscaleAssignment(known=KNOWN))
        assert node.part() == AutoscaleNodeReport(known=KNOWN)
        node.follow(None)
        assert node.part(NEXT) == AutoscaleNodeReport(known=KNOWN)
        node.follow(AutoscaleAssignment(5.0, AutoscaleState(target=3)))
        await asyncio.sleep(6)
        part = node.part()
        assert part is not None
        assert part.steps
        assert part.known == AutoscaleState(target=3)

    run_virtually(run())


def test_nothing_is_read_at_the_end() -> None:
    async def run() -> None:
        node = Node()
        node.follow(AutoscaleAssignment(5.0))
        node.follow(AutoscaleAssignment(5.0), shutting_down=True)
        await asyncio.sleep(100)
        node.follow(AutoscaleAssignment(5.0))
        node.throughput.close()
        await asyncio.sleep(100)
        assert node.reads == []

    run_virtually(run())
