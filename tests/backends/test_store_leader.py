"""A leader over a store in memory whose watch breaks: while the job runs, and when it has just ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest
from support.memory_store import MemoryStore, Shelf
from support.scripted_agent import rank_assignment
from support.virtual_loop import run_virtually
from support.virtual_torch import rules

from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.rendezvous.kv.leader import StoreLeader
from dlrover_run.rendezvous.kv.records import Keys, StoredPlan, decode_record, encode_record
from dlrover_run.store.operations import (
    Change,
    Put,
    Range,
    StoreMisconfigured,
    StoreUnavailable,
    Txn,
    TxnResult,
    Watch,
)

KEYS = Keys("/dlrover-run", "job")
NODE = NodeReport(node_id="a", incarnation="1", host="a", address="a.net", port=1, workers=1, phase=NodePhase.WAITING)
ONE = rules(1, 1, last_call_timeout=1.0, lost_after=1.0)


class BreakingStore(MemoryStore):
    """A store whose watches end with an error once it is set, and whose commits leave them the time for it."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.breaks_at_the_end: Exception | None = None

    async def commit(self, txn: Txn) -> TxnResult:
        result = await super().commit(txn)
        if self.breaks_at_the_end is not None and KEYS.over in self._shelf.keys and not self.broken.done():
            self.broken.set_exception(self.breaks_at_the_end)
            for _ in range(5):
                await asyncio.sleep(0)
        return result

    @asynccontextmanager
    async def watch(self, ranges: Sequence[Range]) -> AsyncIterator[Watch]:
        async with super().watch(ranges) as watch:
            yield _BreakingWatch(watch, self.broken)


class _BreakingWatch:
    def __init__(self, watch: Watch, broken: asyncio.Future[None]) -> None:
        self._watch = watch
        self._broken = broken

    async def after(self, revision: int) -> AsyncIterator[Sequence[Change]]:
        changes = aiter(self._watch.after(revision))
        while True:
            following = asyncio.ensure_future(anext(changes))
            await asyncio.wait([following, self._broken], return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                following.cancel()
                self._broken.result()
            yield await following


class Bed:
    """The leader of a job of one node, whose report the test writes."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.shelf.clock = asyncio.get_running_loop().time
        self.store = BreakingStore(self.shelf)
        self.lines: list[str] = []

    async def begin(self) -> None:
        await self.store.commit(Txn((), (Put(KEYS.leader, b"a"),)))
        await self.report()
        leader = self.shelf.keys[KEYS.leader]
        self.leader = StoreLeader(self.store, KEYS, ONE, NODE.key, leader, 1.0, self.lines.append)

    async def report(self, **changes: object) -> None:
        epoch = self.plan.epoch if KEYS.plan in self.shelf.keys else 0
        report = msgspec.structs.replace(NODE, epoch=epoch, **changes)
        await self.store.commit(Txn((), (Put(KEYS.node("a"), encode_record(report)),)))

    @property
    def plan(self) -> Plan:
        return decode_record(self.shelf.keys[KEYS.plan].value, StoredPlan).plan

    async def formed(self) -> None:
        async with asyncio.timeout(60):
            while KEYS.plan not in self.shelf.keys:
                await asyncio.sleep(0.1)
            # A node of which the coordinator knows that it obeys it.
            await self.report()
            while not self.plan.key.number:
                await asyncio.sleep(0.1)

    async def succeed(self) -> None:
        await self.report(
            phase=NodePhase.SUCCEEDED, known_round=self.plan.key, ranks=rank_assignment(key=self.plan.key)
        )


def test_a_watch_that_breaks_while_the_job_runs_ends_the_leading_which_goes_on_when_it_is_called_again() -> None:
    async def job() -> None:
        bed = Bed()
        await bed.begin()
        leading = asyncio.ensure_future(bed.leader.lead())
        await bed.formed()
        bed.store.broken.set_exception(StoreUnavailable("the connection has ended"))
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(leading, 60)
        before = bed.plan.key
        bed.store.broken = asyncio.get_running_loop().create_future()
        again = asyncio.ensure_future(bed.leader.lead())
        await asyncio.sleep(5)
        assert (bed.plan.key, again.done()) == (before, False)
        await bed.report(phase=NodePhase.LEFT, known_round=before)
        await asyncio.wait_for(again, 60)

    run_virtually(job())


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), StoreMisconfigured("password"), ZeroDivisionError("ours")])
def test_a_watch_that_breaks_when_the_end_of_the_job_is_stored_is_no_error(error: Exception) -> None:
    async def job() -> None:
        bed = Bed()
        await bed.begin()
        leading = asyncio.ensure_future(bed.leader.lead())
        await bed.formed()
        bed.store.breaks_at_the_end = error
        await bed.succeed()
        await asyncio.wait_for(leading, 60)
        assert bed.store.broken.done()
        assert KEYS.over in bed.shelf.keys

    run_virtually(job())
