"""The client of etcd: this node's lease and report, its assignment, and its part in the election of the leader.

A node joins with three requests: a lease, a transaction that puts its report under the lease, and a watch on the
leader's key and on the messages of its own bucket. The report lives as long as the lease, so etcd alone detects a
silent node.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import replace

from dlrover_run.coordination.coordinator import RETURN_GRACE
from dlrover_run.coordination.model import OVER, NodePhase, NodeReport
from dlrover_run.coordination.rules import JobRules
from dlrover_run.coordination.validation import config_mismatch, wrong_job_kind
from dlrover_run.etcd.operations import (
    Absent,
    Compacted,
    Delete,
    EtcdMisconfigured,
    EtcdUnavailable,
    Get,
    KeyValue,
    KeyValueStore,
    LeaseExpired,
    ModRevisionIs,
    Put,
    Range,
    RequestRejected,
    Txn,
    TxnResult,
    Watch,
)
from dlrover_run.rendezvous.client import OnChange
from dlrover_run.rendezvous.etcd_election import Election
from dlrover_run.rendezvous.etcd_records import BucketMessage, Keys, bucket_of, decode_record, encode_record, rules_of
from dlrover_run.rendezvous.reconnect import ID_IN_USE_TIMEOUT, RemoteClient
from dlrover_run.spec import JobSpec
from dlrover_run.transport.addresses import Address, UnresolvedHost, join_address, resolve, route_source
from dlrover_run.transport.messages import InvalidMessage

MIN_LEASE = 2
"""Seconds of the shortest lease that etcd grants with its default election timeout. It prolongs shorter ones."""

LEASE_MARGIN = 2.0
"""Seconds after the end of a lease at which all nodes know of it: etcd looks for expired leases every half a second."""


def lease_time(rules: JobRules) -> int:
    """Seconds of a node's lease: a node that is silent for that long is gone, as with a master."""
    return max(MIN_LEASE, math.ceil(rules.heartbeat_timeout))


def renewal_timeout(rules: JobRules) -> float:
    """Seconds in which a member must renew the lease before the next one is called. The pause before is at most a third
    of the lease, so two members that do not answer leave a sixth of it for one that does."""
    return lease_time(rules) / 4


class _Finished(Exception):
    """Raised in a task group whose main task is done, to cancel the others."""


class EntryRefused(Exception):
    """The node cannot take part as long as a key in etcd has its current value. The message is a sentence."""

    def __init__(self, reason: str, there: KeyValue) -> None:
        super().__init__(reason)
        self.there = there


class EtcdClient(RemoteClient):
    """Takes part in a job whose records are in `store`. `rng` returns a random number from 0 to 1."""

    def __init__(
        self,
        spec: JobSpec,
        listener: OnChange,
        say: Callable[[str], None],
        store: KeyValueStore,
        rng: Callable[[], float] = random.random,
    ) -> None:
        assert spec.etcd is not None, "the backend `etcd` comes with the place of one"
        self._endpoints = spec.etcd.endpoints
        self._keys = Keys(spec.etcd.prefix, spec.run_id)
        self._store = store
        self._ttl = lease_time(spec.rules)
        self._rules = replace(spec.rules, detection_delay=self._ttl + LEASE_MARGIN)
        self._lease = self._result_lease = 0
        place = f"etcd at {','.join(join_address(*endpoint) for endpoint in self._endpoints)}"
        # A dead process with this node's id blocks the id until its lease has expired.
        super().__init__(spec, place, listener, say, rng, max(ID_IN_USE_TIMEOUT, 2.0 * self._ttl))
        self._election = Election(store, self._keys, self._rules, self._assignments, rng, self._say_once)

    async def close(self) -> None:
        """Let the last status be stored, if etcd can be reached now, and disconnect."""
        self._election.retire()
        try:
            await super().close()
        finally:
            await self._store.close()

    async def _attempt(self) -> None:
        try:
            async with self._store.watch((Range(self._keys.leader), self._words)) as watch:
                await self._stay(await self._enter(), watch)
        except Compacted:
            # Missed changes were compacted, so the current values are read.
            return
        except EtcdUnavailable as away:
            self._note_end(str(away), show_reason=True)
        except LeaseExpired:
            self._lease = 0
            self._note_end("the lease of this node has run out, as it was not renewed in time", show_reason=True)
        except EtcdMisconfigured as mistake:
            if self._ever_connected and (self._is_training or not isinstance(mistake, RequestRejected)):
                # It worked before, so the settings of etcd were changed, and may be changed back.
                self._note_end(str(mistake))
                self._say_once(str(mistake))
            else:
                if self._lease:
                    # Otherwise the other nodes would wait for its end.
                    with contextlib.suppress(EtcdUnavailable, EtcdMisconfigured):
                        await self._store.revoke(self._lease)
                self._give_up(str(mistake), is_user_error=True)
        except EntryRefused as refused:
            if self._is_visitor:
                await self._store.revoke(self._lease)
                self._give_up(str(refused), is_user_error=True)
            elif self._is_training:
                self._note_end(str(refused))
                self._say_once(f"{refused}; the workers train on")
            else:
                self._note_refusal(str(refused), retry=True)
                await self._until_gone(refused)

    async def _enter(self) -> TxnResult:
        """Put this node's status into etcd, and read it, the leader and the assignment. Raises EntryRefused."""
        await self._find_own_address()
        if not self._lease or not await self._store.renew(self._lease):
            self._lease = 0
            self._lease = await self._store.grant(self._ttl)
        status = self._own_status()
        if self._is_visitor:
            self._election.retire()
        own = self._keys.node(status.node_id)
        outcome = await self._store.commit(self._entry(own, status))
        over, there = outcome.found.get(self._keys.over), outcome.found.get(own)
        if over is not None and not status.epoch:
            reason = f"the job {self._spec.run_id!r} has just ended; its name is free again in a moment"
            raise EntryRefused(reason, over)
        if there is not None and not there.lease:
            # No living process owns it: that process would have attached it to a lease.
            await self._store.commit(
                Txn((ModRevisionIs(own, there.changed),), (Put(own, encode_record(status), self._lease),))
            )
            outcome = await self._store.commit(self._entry(own, status))
            there = outcome.found.get(own)
        if there is not None and there.lease != self._lease:
            raise EntryRefused(_in_use(there), there)
        if self._is_visitor and there is not None and self._keys.leader not in outcome.found:
            await self._find_others(there)
        return outcome

    async def _find_others(self, own: KeyValue) -> None:
        """Check that another node can be elected, because this one cannot. Raises EntryRefused."""
        nodes = await self._store.commit(Txn(then=(Get(Range(self._keys.nodes, prefix=True)),)))
        if not nodes.found.keys() - {own.key}:
            raise EntryRefused(f"no node of a job {self._spec.run_id!r} is in {self._place}", own)

    def _entry(self, own: str, status: NodeReport) -> Txn:
        over, reads = Range(self._keys.over), (Get(Range(own)), Get(self._words))
        stand = Get(Range(self._keys.leader)) if self._is_visitor else self._election.stand(status.key, self._lease)
        join = (Put(own, encode_record(status), self._lease), stand, *reads)
        return Txn((Absent(Range(own)), Absent(over)), join, (Get(over), Get(Range(self._keys.leader)), *reads))

    async def _find_own_address(self) -> None:
        """Find the address from which this node reaches etcd; not loopback if any member allows that. The name of a
        member on this machine may resolve to loopback here, as Debian sets up a machine's own name."""
        if self._own_address is not None:
            return
        asked = await asyncio.gather(*(resolve(*endpoint) for endpoint in self._endpoints), return_exceptions=True)
        found: list[Address] = []
        for answer in asked:
            if isinstance(answer, BaseException):
                if not isinstance(answer, UnresolvedHost):
                    raise answer
            else:
                found.append(answer[0])
        for address in sorted(found, key=lambda address: address.loopback):
            if (source := route_source(address)) is not None:
                self._own_address = source
                return

    async def _stay(self, entry: TxnResult, watch: Watch) -> None:
        """Take part until the lease or etcd is lost, or until `close` is carried out."""
        own = self._own_status().key
        self._note_connected()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._election.begin(tasks, own, self._lease)
                tasks.create_task(self._renew())
                tasks.create_task(self._follow(entry, watch))
                await asyncio.wait([tasks.create_task(self._report(entry.found.get(self._keys.node(own.node_id))))])
                leaves = self.assignment.phase in OVER or self._own_status().phase is NodePhase.LEFT
                if self._election.leading is not None and leaves:
                    # It ends by itself. An agent elected next would first have to find out that this node is gone.
                    await asyncio.wait([self._election.leading])
                raise _Finished
        except ExceptionGroup as group:
            # Of several failures the first one decides what follows.
            for error in group.exceptions:
                if not isinstance(error, _Finished):
                    raise error from None
        await self._depart()

    async def _renew(self) -> None:
        # A renewal that fails at one member must leave the time for another one.
        interval = min(self._spec.rules.keep_alive_interval, self._ttl / 3)
        while True:
            await asyncio.sleep(interval)
            if not await self._store.renew(self._lease):
                raise LeaseExpired
            if self._result_lease:
                # A node that stops its workers slowly must not meet another job of this name.
                await self._store.renew(self._result_lease)

    async def _report(self, there: KeyValue | None) -> None:
        """Write each change of the status over the previous one, until there will be no further change."""
        key = self._keys.node(self._own_status().node_id)
        while True:
            status = encode_record(self._own_status())
            stands = there is not None and there.value == status
            if self._closing and (stands or self.assignment.phase in OVER):
                return
            if stands:
                await self._wait_for_change()
            else:
                there = await self._put(key, there, status)

    async def _put(self, key: str, there: KeyValue | None, status: bytes) -> KeyValue | None:
        """Write a status after the last one; return the key as it is then. A request may be carried out twice, or late,
        and must not bring an older status back. Raises LeaseExpired."""
        last = Absent(Range(key)) if there is None else ModRevisionIs(key, there.changed)
        read = Get(Range(key))
        outcome = await self._store.commit(Txn((last,), (Put(key, status, self._lease), read), (read,)))
        now = outcome.found.get(key)
        if now is not None and now.lease not in (0, self._lease):
            # Another process has taken the id, after the key was deleted by hand.
            await self._store.revoke(self._lease)
            raise LeaseExpired
        return now

    async def _follow(self, entry: TxnResult, watch: Watch) -> None:
        """Follow the leader's key and the assignment."""
        self._election.mind(entry.found.get(self._keys.leader), RETURN_GRACE)
        if (word := entry.found.get(self._words.key)) is not None:
            self._read(word)
        async for changes in watch.after(entry.revision):
            for change in changes:
                if change.key == self._keys.leader:
                    self._election.mind(change.now, self._rules.lost_after)
                elif change.now is not None:
                    self._read(change.now)
                elif self.assignment.phase not in OVER:
                    # Deleted by hand, and our status too; or etcd has lost its data.
                    raise EtcdUnavailable("the keys of the job have been deleted")

    def _read(self, current: KeyValue) -> None:
        try:
            word = decode_record(current.value, BucketMessage)
            rules = rules_of(word)
        except InvalidMessage as error:
            self._say_once(f"warning: what stands in etcd under {current.key} does not count: it is {error}")
            return
        self._backoff.join_timeout = rules.join_timeout
        if problem := wrong_job_kind(rules, self._own_status()):
            self._give_up(f"this node cannot take part in the job {self._spec.run_id!r}: {problem}", is_user_error=True)
            return
        if not self._is_visitor and (notice := config_mismatch(rules, self._rules)):
            self._say_once(f"warning: {notice}")
        self._result_lease = current.lease if word.wanted.phase in OVER else 0
        self._take(word.assignment(self._own_status().key))

    @property
    def _words(self) -> Range:
        return Range(self._keys.words(bucket_of(self._own_status().node_id)))

    async def _until_gone(self, refused: EntryRefused) -> None:
        """Wait until the refusing key changes, or until this node gives up."""

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
            await asyncio.wait([seeing], timeout=self._backoff.refusal_timeout)
            if seeing.done() and seeing.exception() is None:
                self._backoff.retry_now()
        finally:
            seeing.cancel()
            await asyncio.gather(seeing, return_exceptions=True)

    async def _depart(self) -> None:
        """Delete this node's keys. The last node to leave also deletes the rest of the job, unless it was only a
        visitor, or a member that is away may come back to learn how the job ended."""
        await self._store.revoke(self._lease)
        self._lease = 0
        if self._is_visitor:
            return
        keys, plan = self._keys, Range(self._keys.plan)
        # By name, because other keys below this prefix may be those of another job whose prefix contains this one's
        # name.
        rest = (plan, *map(Range, (keys.leader, keys.over, keys.turn)), Range(keys.all_words, prefix=True))
        nobody = (Absent(Range(keys.nodes, prefix=True)), Absent(Range(keys.unaware)))
        outcome = await self._store.commit(Txn(nobody, (Get(plan), *map(Delete, rest))))
        if (job := outcome.found.get(plan.key)) is not None:
            await self._store.revoke(job.lease)


def _in_use(there: KeyValue) -> str:
    try:
        status = decode_record(there.value, NodeReport)
    except InvalidMessage as error:
        return f"what stands in etcd under {there.key} is {error}"
    return f"node id {status.node_id} is in use by another process, on {status.host}, that is alive or just died"
