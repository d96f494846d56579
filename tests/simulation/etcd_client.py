"""The etcd client of a node: requests and watches over a network that delays, blocks, loses and repeats messages.

It guarantees only what `operations.Store` guarantees: all that the real client does not guarantee fails at random.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dlrover_run.store.operations import LeaseExpired, Range, StoreMisconfigured, StoreUnavailable, Txn, TxnResult
from simulation.etcd import EtcdCluster
from simulation.etcd_watch import DENIED, REQUEST_TIMEOUT, TO_ETCD, Watch
from simulation.loop import LoopProcess
from simulation.network import TO_NODE, Link, Weather
from simulation.timeline import Timeline

STRAY = 5.0
"""Maximum seconds after which a request that a member has delayed may still be carried out."""


class Parcel:
    """A message that arrives once: when it is due, and the link is not blocked."""

    def __init__(self, timeline: Timeline, link: Link, direction: int, arrive: Callable[[], None]) -> None:
        self._link = link
        self._direction = direction
        self._arrive = arrive
        self._timeline = timeline

    def send(self, due: float) -> None:
        self._timeline.at(due, self.pump)

    def pump(self) -> None:
        """Deliver the message now if the link is not blocked."""
        if self._link.free(self._direction):
            self._arrive()
        else:
            self._link.wait(self._direction, self)


class Client:
    """The client of one process. `burn` is called before each transaction is sent and after its answer has arrived;
    its effect on the process is immediate. If `denied`, etcd refuses every request."""

    def __init__(
        self, process: LoopProcess, link: Link, cluster: EtcdCluster, weather: Weather, burn: Callable[[], None]
    ) -> None:
        self.process = process
        self.link = link
        self.cluster = cluster
        self.weather = weather
        self._burn = burn
        self._random = process.timeline.random
        # In the order of their arrival, so that a seed replays exactly.
        self._pending: dict[asyncio.Future[Any], None] = {}
        self._watches: dict[Watch, None] = {}
        self._closed = False
        self._connected = False
        self.denied = False

    async def grant(self, seconds: int) -> int:
        lease: int = await self._call(lambda: self.cluster.grant(seconds, self.process))
        return lease

    async def renew(self, lease: int) -> bool:
        lives: bool = await self._call(lambda: self.cluster.renew(lease))
        return lives

    async def revoke(self, lease: int) -> None:
        await self._call(lambda: self.cluster.revoke(lease))

    async def commit(self, txn: Txn) -> TxnResult:
        await self._burn_one()
        outcome: TxnResult = await self._call(lambda: self.cluster.commit(txn, self.process))
        await self._burn_one()
        return outcome

    def watch(self, ranges: Sequence[Range]) -> Watch:
        return Watch(self, ranges)

    async def close(self) -> None:
        self._closed = True
        self.cut()
        for watch in list(self._watches):
            watch.end(StoreUnavailable("the client is closed"))

    def cut(self) -> None:
        """Break all connections: the result of a request is unknown, and watches resume where they stopped."""
        self._connected = False
        for answer in list(self._pending):
            _settle(answer, StoreUnavailable("the connection was broken off"))
        for watch in list(self._watches):
            watch.break_off()

    def vanish(self) -> None:
        """Deliver nothing more to the process, which has ended."""
        for watch in list(self._watches):
            watch.end(None)

    def delay(self) -> float:
        if self._random.random() < 0.8:
            return self._random.uniform(0.0002, 0.005)
        return self._random.uniform(0, self.weather.slowness)

    def lag(self) -> float:
        """Return the seconds that etcd takes to notify a watch of a change."""
        return self._random.uniform(0, self.weather.lag) if self._random.random() < 0.3 else 0.0

    def send(self, direction: int, arrive: Callable[[], None], due: float | None = None) -> None:
        parcel = Parcel(self.process.timeline, self.link, direction, arrive)
        parcel.send(self.process.timeline.now + self.delay() if due is None else due)

    def _over_connection(self, send: Callable[[], None]) -> None:
        """Send once there is a connection, which needs both directions of the link."""

        def connected() -> None:
            self._connected = True
            send()

        if self._connected:
            send()
        else:
            answer = partial(self.send, TO_NODE, lambda: self.process.run(connected))
            self.send(TO_ETCD, answer)

    async def _burn_one(self) -> None:
        self._burn()
        if not self.process.alive:
            # The rest of this step is not executed.
            await self.process.create_future()

    async def _call(self, act: Callable[[], Any]) -> Any:
        process = self.process
        answer = process.create_future()
        if self._closed or not process.alive:
            raise StoreUnavailable("the client is closed")
        self._pending[answer] = None

        def carry_out(is_answered: bool) -> None:
            if answer.done() and self._random.random() < 0.5:
                # The caller has given up, and has cancelled the request in time.
                return
            try:
                result = StoreMisconfigured(DENIED) if self.denied else self.cluster.answer(act)
            except (StoreUnavailable, LeaseExpired) as error:
                result = error
            if is_answered:
                self.send(TO_NODE, lambda: process.run(lambda: _settle(answer, result)))

        def send() -> None:
            if self._random.random() < self.weather.echo / 4:
                # A member does not answer, so the request goes to another member; the first one carries it out too.
                late = self._random.choice((4 * self.delay(), self._random.uniform(0, STRAY)))
                self.send(TO_ETCD, lambda: carry_out(False), process.timeline.now + late)
            self.send(TO_ETCD, lambda: carry_out(True))

        def give_up() -> None:
            if not answer.done():
                self._connected = False
                _settle(answer, StoreUnavailable(f"it did not answer within {REQUEST_TIMEOUT:g} s"))

        self._over_connection(send)
        timer = process.call_later(REQUEST_TIMEOUT, give_up)
        try:
            return await answer
        finally:
            timer.cancel()
            self._pending.pop(answer, None)


def _settle(answer: asyncio.Future[Any], result: Any) -> None:
    if answer.done():
        return
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)
