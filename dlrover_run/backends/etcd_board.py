"""Records that live in etcd: this node's status, the words for it, and its part in the election of who decides.

A node joins with three requests: a lease, a transaction that puts its status under it, and a watch on the leader's key
and on the words of its own bucket. Its status lives as long as the lease, so nobody has to judge whether it is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import replace

from dlrover_run.backends.board import Listener
from dlrover_run.backends.etcd_leadership import Leadership
from dlrover_run.backends.etcd_records import Keys, Word, bucket_of, pack, rules_of, unpack
from dlrover_run.backends.patience import ID_IN_USE_PATIENCE
from dlrover_run.backends.remote_board import RemoteBoard
from dlrover_run.coordination.coordinator import RETURN_GRACE
from dlrover_run.coordination.notice import differences
from dlrover_run.coordination.records import OVER, NodePhase, NodeStatus
from dlrover_run.coordination.rules import Rules
from dlrover_run.etcd.operations import (
    Absent,
    Away,
    Changed,
    Compacted,
    Delete,
    Get,
    KeyValue,
    LeaseGone,
    Mistake,
    Outcome,
    Put,
    Range,
    Store,
    Txn,
    Unfit,
    Watch,
)
from dlrover_run.nursery import Nursery
from dlrover_run.spec import JobSpec
from dlrover_run.wire.address import join_address
from dlrover_run.wire.messages import BadMessage
from dlrover_run.wire.own_address import Unknown, look_up, route_source

LEAST_LEASE = 2
"""Seconds of the shortest lease that etcd gives with its usual election time-out. A shorter one would be prolonged."""

LEASE_MARGIN = 2.0
"""Seconds after the end of a lease at which everybody knows of it: etcd looks for such leases every half a second."""

ELECTIONS_PER_SECOND = 500
"""Nodes that stand for election in a second, when the elected agent is gone: all of them see that in one moment."""


def lease_time(rules: Rules) -> int:
    """Seconds for which a node's lease runs: a node that is silent for so long is gone, as with a master."""
    return max(LEAST_LEASE, math.ceil(rules.silence_limit))


class Refused(Exception):
    """The node cannot take part while a key stands in etcd as it does. The message is a sentence."""

    def __init__(self, reason: str, there: KeyValue) -> None:
        super().__init__(reason)
        self.there = there


class EtcdBoard(RemoteBoard):
    """Takes part in a job whose records are in `store`. `chance` returns a random number from 0 to 1."""

    def __init__(
        self,
        spec: JobSpec,
        listener: Listener,
        say: Callable[[str], None],
        store: Store,
        chance: Callable[[], float] = random.random,
    ) -> None:
        assert spec.etcd is not None, "the backend `etcd` comes with the place of one"
        self._endpoints = spec.etcd.endpoints
        self._keys = Keys(spec.etcd.prefix, spec.run_id)
        self._store = store
        self._chance = chance
        self._ttl = lease_time(spec.rules)
        self._rules = replace(spec.rules, unnoticed=self._ttl + LEASE_MARGIN)
        self._lease = 0
        self._put_at = 0
        self._leadership: Leadership | None = None
        self._leading: asyncio.Task[None] | None = None
        self._electing: asyncio.Task[None] | None = None
        place = f"etcd at {','.join(join_address(*endpoint) for endpoint in self._endpoints)}"
        super().__init__(spec, place, listener, say, chance)
        # A dead process with this node's id is in the way until its lease has run out.
        self._search.refusal_patience = max(ID_IN_USE_PATIENCE, 2.0 * self._ttl)

    async def close(self) -> None:
        """Let the last status be stored, if etcd can be reached now, and let go of the connection."""
        try:
            await super().close()
        finally:
            await self._store.close()

    async def _attempt(self) -> None:
        try:
            async with self._store.watch((Range(self._keys.leader), self._words)) as watch:
                await self._stay(*await self._enter(), watch)
        except Compacted:
            # What was missed is not kept any more, so it is read how things stand.
            return
        except Away as away:
            self._note_end(str(away), shown=True)
        except LeaseGone:
            self._lease = 0
            self._note_end("the lease of this node has run out, as it was not renewed in time", shown=True)
        except Mistake as mistake:
            if self._met and (self._trains or not isinstance(mistake, Unfit)):
                # It was right before, so somebody has changed something at etcd, and may change it back.
                self._note_end(str(mistake))
                self._tell_once(str(mistake))
            else:
                if self._lease:
                    # Else the others would wait for its end.
                    with contextlib.suppress(Away, Mistake):
                        await self._store.revoke(self._lease)
                self._give_up(str(mistake), mistaken=True)
        except Refused as refused:
            if self._trains:
                self._note_end(str(refused))
                self._tell_once(f"{refused}; the workers train on")
            else:
                self._note_refusal(str(refused), retry=True)
                await self._until_gone(refused)

    async def _enter(self) -> tuple[Outcome, NodeStatus | None]:
        """Have this node's status in etcd, and read who leads and what is wanted; also which status was put, None when
        one was there that may be older. Raises Refused."""
        await self._find_own_address()
        if not self._lease or not await self._store.renew(self._lease):
            self._lease = 0
            self._lease = await self._store.grant(self._ttl)
        status = self._own_status()
        own = self._keys.node(status.node_id)
        outcome = await self._store.commit(self._entry(status))
        over = outcome.found.get(self._keys.over)
        if over is not None and not status.epoch:
            reason = f"the job {self._spec.run_id!r} has just ended; its name is free again in a moment"
            raise Refused(reason, over)
        there = outcome.found.get(own)
        if there is not None and not there.lease:
            # No process that lives stands behind it, for that one would have put it under a lease.
            await self._store.commit(Txn((Changed(own, there.changed),), (Put(own, pack(status), self._lease),)))
            outcome = await self._store.commit(self._entry(status))
            there = outcome.found.get(own)
        if there is not None and there.lease != self._lease:
            raise Refused(_in_use(there), there)
        self._put_at = outcome.revision if outcome.succeeded else there.changed if there is not None else 0
        return outcome, status if outcome.succeeded else None

    def _entry(self, status: NodeStatus) -> Txn:
        own = self._keys.node(status.node_id)
        leader, over = Range(self._keys.leader), Range(self._keys.over)
        reads = (Get(leader), Get(self._words))
        stand = Txn((Absent(leader),), (Put(leader.key, status.node_id.encode(), self._lease),))
        join = (Put(own, pack(status), self._lease), stand, *reads)
        return Txn((Absent(Range(own)), Absent(over)), join, (Get(Range(own)), Get(over), *reads))

    async def _find_own_address(self) -> None:
        """The address from which this node reaches etcd; one that others can reach too if any member's is such. A
        member on this machine may have a name that stands for loopback here, as Debian sets up a machine's own."""
        if self._spec.local_addr is not None:
            return
        found = None
        for host, port in self._endpoints:
            try:
                address = (await look_up(host, port))[0]
            except Unknown:
                continue
            source = route_source(address)
            if source is not None and (found is None or not address.loopback):
                found = source
                if not address.loopback:
                    break
        self._own_address = found or self._own_address

    async def _stay(self, entry: Outcome, sent: NodeStatus | None, watch: Watch) -> None:
        """Take part until the lease or etcd is lost, or until `close` has been carried out."""
        nursery = Nursery()
        self._note_connected()
        try:
            nursery.start(self._renew())
            nursery.start(self._follow(nursery, entry, watch))
            await nursery.until_done(nursery.start(self._report(sent)))
            if self._leading is not None and self._own_status().phase is NodePhase.LEFT:
                # Whoever is elected next would first have to find out that this node is gone.
                await nursery.until_done(self._leading)
        finally:
            await nursery.close()
            self._leading = self._electing = None
        await self._depart()

    async def _renew(self) -> None:
        # A renewal that fails at one member must leave the time for another one.
        interval = min(self._spec.rules.keep_alive_interval, self._ttl / 3)
        while True:
            await asyncio.sleep(interval)
            if not await self._store.renew(self._lease):
                raise LeaseGone

    async def _report(self, sent: NodeStatus | None) -> None:
        """Put each change of the status, until there will be no further one."""
        while True:
            status = self._own_status()
            if self._closing and (status == sent or self.assignment.phase in OVER):
                return
            if status != sent:
                await self._put(status)
                sent = status
            else:
                await self._wait_for_change()

    async def _put(self, status: NodeStatus) -> None:
        """Put a status after the last one. What was sent may be carried out twice, or late, and must not bring an older
        status back. Raises LeaseGone."""
        key, data = self._keys.node(status.node_id), pack(status)
        while True:
            last = Changed(key, self._put_at) if self._put_at else Absent(Range(key))
            outcome = await self._store.commit(Txn((last,), (Put(key, data, self._lease),), (Get(Range(key)),)))
            there = outcome.found.get(key)
            if there is not None and there.lease != self._lease:
                raise LeaseGone
            self._put_at = outcome.revision if outcome.succeeded else there.changed if there is not None else 0
            if outcome.succeeded or (there is not None and there.value == data):
                return

    async def _follow(self, nursery: Nursery, entry: Outcome, watch: Watch) -> None:
        """Hear who leads and what is wanted, and stand for election when nobody leads."""
        self._mind(nursery, entry.found.get(self._keys.leader), RETURN_GRACE)
        if (word := entry.found.get(self._words.key)) is not None:
            self._read(word)
        async for changes in watch.after(entry.revision):
            for change in changes:
                if change.key == self._keys.leader:
                    self._mind(nursery, change.now, self._spec.rules.lost_after)
                elif change.now is not None:
                    self._read(change.now)
                elif self.assignment.phase not in OVER:
                    # By hand, and our status with it; or etcd has lost its data.
                    raise Away("the keys of the job have been deleted")

    def _mind(self, nursery: Nursery, leader: KeyValue | None, return_grace: float) -> None:
        """Somebody leads, or nobody does. `return_grace` is for the members of a plan that this agent takes over: who
        has watched all the time knows that the others could have renewed their leases too."""
        if self._electing is not None:
            self._electing.cancel()
            self._electing = None
        is_ours = leader is not None and leader.lease == self._lease
        fence = leader.created if leader is not None else None
        if self._leading is not None and not (is_ours and self._leadership and self._leadership.fence == fence):
            self._leading.cancel()
            self._leading = None
        if leader is None:
            if self.assignment.phase not in OVER and not self._closing:
                self._electing = nursery.start(self._stand_for_election(nursery))
        elif not leader.lease:
            nursery.start(self._remove(leader))
        elif is_ours and self._leading is None:
            if self._leadership is None or self._leadership.fence != leader.created:
                self._leadership = Leadership(
                    self._store,
                    self._keys,
                    self._rules,
                    self._own_status().key,
                    leader.created,
                    return_grace,
                    self._tell_once,
                )
            self._leading = nursery.start(self._leadership.lead())

    async def _stand_for_election(self, nursery: Nursery) -> None:
        seat = self.assignment.seat
        await asyncio.sleep(self._chance() * (seat.nodes if seat else 0) / ELECTIONS_PER_SECOND)
        leader = self._keys.leader
        put = Put(leader, self._own_status().node_id.encode(), self._lease)
        free = (Absent(Range(leader)), Absent(Range(self._keys.over)))
        outcome = await self._store.commit(Txn(free, (put, Get(Range(leader))), (Get(Range(leader)),)))
        if (elected := outcome.found.get(leader)) is not None:
            # Everybody hears of it by the watch, unless etcd has lost the data of before and with them its count.
            self._electing = None
            self._mind(nursery, elected, self._spec.rules.lost_after)

    async def _remove(self, leader: KeyValue) -> None:
        """Take away a leader's key that is under no lease, so that somebody is elected: nobody who lives stands behind
        it, for it was put by hand or copied from another etcd."""
        await self._store.commit(Txn((Changed(leader.key, leader.changed),), (Delete(Range(leader.key)),)))

    def _read(self, current: KeyValue) -> None:
        try:
            word = unpack(current.value, Word)
            rules = rules_of(word)
        except BadMessage as error:
            self._tell_once(f"warning: what stands in etcd under {current.key} does not count: it is {error}")
            return
        self._search.join_timeout = rules.join_timeout
        if notice := differences(rules, self._rules):
            self._tell_once(f"warning: {notice}")
        self._take(word.assignment(self._own_status().key))

    @property
    def _words(self) -> Range:
        return Range(self._keys.words(bucket_of(self._own_status().node_id)))

    async def _until_gone(self, refused: Refused) -> None:
        """Wait for the end of what is in the way, or until this node gives up."""

        async def see() -> None:
            there = Range(refused.there.key)
            async with self._store.watch([there]) as watch:
                now = await self._store.commit(Txn(then=(Get(there),)))
                if now.found.get(there.key) == refused.there:
                    await anext(watch.after(now.revision))

        if self._is_done:
            return
        seeing = asyncio.ensure_future(see())
        try:
            await asyncio.wait([seeing], timeout=self._search.refusal_patience)
            if seeing.done() and seeing.exception() is None:
                self._search.invited()
        finally:
            seeing.cancel()

    async def _depart(self) -> None:
        """Take this node's keys away; the last one to leave takes all that is left of the job along."""
        await self._store.revoke(self._lease)
        self._lease = 0
        anybody, plan = Absent(Range(self._keys.nodes, prefix=True)), Range(self._keys.plan)
        outcome = await self._store.commit(Txn((anybody,), (Get(plan), Delete(Range(self._keys.job, prefix=True)))))
        if (job := outcome.found.get(plan.key)) is not None:
            await self._store.revoke(job.lease)


def _in_use(there: KeyValue) -> str:
    try:
        status = unpack(there.value, NodeStatus)
    except BadMessage as error:
        return f"what stands in etcd under {there.key} is {error}"
    return f"node id {status.node_id} is in use by another process, on {status.host}, that is alive or died a moment ago"
