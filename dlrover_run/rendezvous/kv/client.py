"""The client of a key-value store: the lease and report of this node, its assignment, and its part in the
election.

A node joins with three requests: a lease, a transaction that puts its report under the lease, and a watch on the
leader's key and on the messages of its own bucket. etcd deletes the report with the lease, so it detects a silent node.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlrover_run.background import Group, TimeLimit
from dlrover_run.coordination.coordinator import RETURN_GRACE
from dlrover_run.coordination.programs import describe_mixed_programs, describe_other_program, differs
from dlrover_run.coordination.records.plan import OVER
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.requests import OperatorRequest
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.records.validation import config_mismatch, wrong_job_kind
from dlrover_run.rendezvous import cut_off, kinds
from dlrover_run.rendezvous.client import OnChange
from dlrover_run.rendezvous.kv.election import Election
from dlrover_run.rendezvous.kv.records import BucketMessage, Keys, bucket_of, decode_record, encode_record
from dlrover_run.rendezvous.reconnect import ID_IN_USE_TIMEOUT, Reaches, RemoteClient
from dlrover_run.spec import JobSpec
from dlrover_run.store.operations import (
    Absent,
    Compacted,
    Delete,
    Get,
    KeyValue,
    KeyValueStore,
    LeaseExpired,
    ModRevisionIs,
    Put,
    Range,
    RequestRejected,
    StoreMisconfigured,
    StoreUnavailable,
    Txn,
    TxnResult,
    Watch,
)
from dlrover_run.transport.addresses import Address, UnresolvedHost, resolve, route_source
from dlrover_run.transport.messages import InvalidMessage, decode_rules
from dlrover_run.words.text import join_address

if TYPE_CHECKING:
    from dlrover_run.job_status.questions import StackQuery
    from dlrover_run.job_status.stacks import JobStacks
    from dlrover_run.job_status.status import JobStatus


MIN_LEASE = 2
"""Seconds of the shortest lease that etcd grants with its default election timeout. It prolongs shorter ones."""

LEASE_MARGIN = 2.0
"""Seconds from the end of a lease until all nodes know of it: etcd checks for expired leases every half second."""


def lease_time(rules: JobRules) -> int:
    """Seconds of a node's lease: the heartbeat timeout, as with a master."""
    return max(MIN_LEASE, math.ceil(rules.heartbeat_timeout))


def renewal_timeout(rules: JobRules) -> float:
    """Seconds in which a member must renew the lease before the next member is called. The pause before is at most a
    third of the lease, so after two members that do not answer a sixth of it is left for a third one."""
    return lease_time(rules) / 4


class _Finished(Exception):
    """Raised in a task group whose main task is done, to cancel its other tasks."""


class JoinRefused(Exception):
    """The node cannot take part as long as `current` stays the value of its key. The message is a sentence."""

    def __init__(self, reason: str, current: KeyValue) -> None:
        super().__init__(reason)
        self.current = current


class OtherLeaseTime(Exception):
    """The job's rules, which are those of its first node, say another length of a lease than this node's. Else the loss
    of this node would become known later than the others expect, and be charged to one of them."""


class JobGone(Exception):
    """The job has ended without this node: another process had its node id, or it followed a coordinator whose records
    etcd has lost. The message is a sentence."""


class StoreClient(RemoteClient):
    """Takes part in a job whose records are in `store`. `rng` returns a random number from 0 to 1."""

    def __init__(
        self,
        spec: JobSpec,
        on_change: OnChange,
        log: Callable[[str], None],
        store: KeyValueStore,
        rng: Callable[[], float] = random.random,
        reaches: Reaches = cut_off.reaches,
    ) -> None:
        place = spec.rendezvous
        assert isinstance(place, kinds.Store), "the job is in a store"
        self._endpoints = place.endpoints
        self._keys = Keys(place.prefix, spec.run_id, place.backend)
        self._store = store
        self._ttl = lease_time(spec.rules)
        self._interval = spec.rules.keep_alive_interval
        self._rules = replace(spec.rules, detection_delay=self._ttl + LEASE_MARGIN)
        self._lease = self._result_lease = 0
        self._is_displaced = False
        server = f"{place.backend} at {','.join(join_address(*endpoint) for endpoint in self._endpoints)}"
        # A dead process with this node's id blocks the id until its lease has expired.
        super().__init__(spec, server, on_change, log, rng, max(ID_IN_USE_TIMEOUT, 2.0 * self._ttl), reaches)
        self._election = Election(store, self._keys, self._rules, self._assignments, rng, self._log_once)

    async def ask(self, request: OperatorRequest | None = None) -> JobStatus:
        from dlrover_run.rendezvous.kv.requests import ask_store

        return await ask_store(self._store, self._keys, self._spec.run_id, request)

    async def ask_stacks(self, query: StackQuery) -> JobStacks:
        from dlrover_run.rendezvous.kv.stacks import ask_store_for_stacks

        return await ask_store_for_stacks(self._store, self._keys, self._spec.run_id, query)

    async def close(self) -> None:
        """Wait until the last report is stored, if etcd can be reached now, and disconnect."""
        self._election.retire()
        try:
            await super().close()
        finally:
            await self._store.close()

    async def _attempt(self) -> None:
        try:
            async with self._store.watch((Range(self._keys.leader), self._message_key)) as watch:
                await self._stay(await self._join(), watch)
        except OtherLeaseTime:
            await self._revoke_lease()
            self._lease = 0
            self._backoff.retry_now()
        except Compacted:
            # Missed changes were compacted, so the next attempt reads the current values.
            return
        except StoreUnavailable as error:
            self._note_end(str(error), show_reason=True)
        except LeaseExpired:
            self._lease = 0
            self._note_end("this node's lease has expired because it was not renewed in time", show_reason=True)
        except StoreMisconfigured as error:
            if self._ever_connected and (self._is_training or not isinstance(error, RequestRejected)):
                # It worked before, so the settings of etcd were changed, and may be changed back.
                self._note_end(str(error))
                self._log_once(str(error))
            else:
                await self._revoke_lease()
                self._give_up(str(error), is_user_error=True)
        except JobGone as gone:
            await self._revoke_lease()
            self._give_up(str(gone))
        except JoinRefused as refused:
            if self._is_training:
                self._note_end(str(refused))
                self._log_once(f"{refused}; running workers do not need it")
            else:
                self._note_refusal(str(refused), retry=True)
                await self._wait_until_changed(refused)

    async def _revoke_lease(self) -> None:
        """Revoke the lease of a node that gives up; otherwise the other nodes would wait for its expiry."""
        if self._lease:
            with contextlib.suppress(StoreUnavailable, StoreMisconfigured):
                await self._store.revoke(self._lease)

    async def _join(self) -> TxnResult:
        """Put this node's report into etcd; read that, the leader and the assignment. Raises JoinRefused, JobGone."""
        await self._resolve_own_address()
        if not self._lease or not await self._store.renew(self._lease):
            self._lease = 0
            self._lease = await self._store.grant(self._ttl)
        report = self._own_report()
        own = self._keys.node(report.node_id)
        outcome = await self._store.commit(self._join_txn(own, report))
        over, current = outcome.found.get(self._keys.over), outcome.found.get(own)
        if over is not None and not report.epoch:
            reason = f"the job {self._spec.run_id!r} has just ended; its name is free again in a moment"
            raise JoinRefused(reason, over)
        if current is not None and not current.lease:
            # No living process owns it: its owner would have attached it to a lease.
            await self._store.commit(
                Txn((ModRevisionIs(own, current.changed),), (Put(own, encode_record(report), self._lease),))
            )
            outcome = await self._store.commit(self._join_txn(own, report))
            current = outcome.found.get(own)
        if current is not None and current.lease != self._lease:
            self._is_displaced = report.epoch > 0
            raise JoinRefused(_describe_owner(current, self._keys.store), current)
        if self._is_displaced and self._message_key.key not in outcome.found:
            # Else it would begin the job again, with the tasks that it has.
            raise JobGone(f"the job {self._spec.run_id!r} has ended while another process had the id of this node")
        self._is_displaced = False
        return outcome

    def _join_txn(self, own: str, report: NodeReport) -> Txn:
        over, reads = Range(self._keys.over), (Get(Range(own)), Get(self._message_key))
        join = (Put(own, encode_record(report), self._lease), self._election.candidacy(report.key, self._lease), *reads)
        return Txn((Absent(Range(own)), Absent(over)), join, (Get(over), Get(Range(self._keys.leader)), *reads))

    async def _resolve_own_address(self) -> None:
        """Resolve the address from which this node reaches etcd; not loopback if any member allows that. The name of a
        member on this machine may resolve to loopback here: Debian sets up a machine's own name like that."""

        async def first_address(host: str, port: int) -> list[Address]:
            with contextlib.suppress(UnresolvedHost):
                return (await resolve(host, port))[:1]
            return []

        if self._own_address is None:
            resolved = await asyncio.gather(*(first_address(*endpoint) for endpoint in self._endpoints))
            found = sorted(itertools.chain(*resolved), key=lambda address: address.loopback)
            self._own_address = next(filter(None, map(route_source, found)), None)

    async def _stay(self, entry: TxnResult, watch: Watch) -> None:
        """Take part until the lease or etcd is lost, or until `close` has finished."""
        own = self._own_report().key
        self._note_connected()
        try:
            async with Group() as tasks:
                self._election.begin(tasks, own, self._lease)
                tasks.create_task(self._renew())
                tasks.create_task(self._follow(entry, watch))
                if self.stack_source is not None:
                    from dlrover_run.rendezvous.kv.stacks import answer_stack_requests

                    answers = answer_stack_requests(
                        self._store, self._keys, own.node_id, self.stack_source, self._log_once
                    )
                    tasks.create_task(answers)
                await asyncio.wait([tasks.create_task(self._report(entry.found.get(self._keys.node(own.node_id))))])
                leaves = self.assignment.phase in OVER or self._own_report().phase is NodePhase.LEFT
                if self._election.leading is not None and leaves:
                    # It ends by itself. The next leader would first have to detect that this node is gone.
                    await asyncio.wait([self._election.leading])
                raise _Finished
        except _Finished:
            await self._leave()

    async def _renew(self) -> None:
        # A renewal that fails at one member must leave time for another one.
        interval = min(self._interval, self._ttl / 3)
        while True:
            await asyncio.sleep(interval)
            if not await self._store.renew(self._lease):
                raise LeaseExpired
            if self._result_lease:
                # Another job of this name must not start while this node still stops its workers.
                await self._store.renew(self._result_lease)

    async def _report(self, stored: KeyValue | None) -> None:
        """Store each new report, until `close` is called and the last one is stored."""
        key = self._keys.node(self._own_report().node_id)
        while True:
            report = encode_record(self._own_report())
            is_stored = stored is not None and stored.value == report
            if self._closing and (is_stored or self.assignment.phase in OVER):
                return
            if is_stored:
                await self._wait_for_change()
            else:
                stored = await self._put(key, stored, report)

    async def _put(self, key: str, before: KeyValue | None, report: bytes) -> KeyValue | None:
        """Replace the report that was read before; return the key as it is then. A request may be applied twice, or
        late, and must not restore an older report. Raises LeaseExpired."""
        last = Absent(Range(key)) if before is None else ModRevisionIs(key, before.changed)
        read = Get(Range(key))
        outcome = await self._store.commit(Txn((last,), (Put(key, report, self._lease), read), (read,)))
        now = outcome.found.get(key)
        if now is not None and now.lease not in (0, self._lease):
            # The key was deleted by hand, and another process has taken the id.
            await self._store.revoke(self._lease)
            raise LeaseExpired
        return now

    async def _follow(self, entry: TxnResult, watch: Watch) -> None:
        self._election.on_leader_change(entry.found.get(self._keys.leader), RETURN_GRACE)
        if (message := entry.found.get(self._message_key.key)) is not None:
            self._read(message)
        async for changes in watch.after(entry.revision):
            for change in changes:
                if change.key == self._keys.leader:
                    self._election.on_leader_change(change.now, self._rules.lost_after)
                elif change.now is not None:
                    self._read(change.now)
                elif self.assignment.phase not in OVER:
                    # Deleted by hand, together with this node's report; or etcd has lost its data.
                    raise StoreUnavailable("the keys of the job have been deleted")

    def _read(self, current: KeyValue) -> None:
        try:
            message = decode_record(current.value, BucketMessage)
            rules = decode_rules(message.rules)
        except InvalidMessage as error:
            self._log_once(f"warning: {current.key} in {self._keys.store} is ignored: it is {error}")
            return
        self._follow_rules(rules)
        self._interval = rules.keep_alive_interval
        if problem := wrong_job_kind(rules, self._own_report()):
            self._give_up(f"this node cannot take part in the job {self._spec.run_id!r}: {problem}", is_user_error=True)
            return
        own = self._own_report()
        if not own.epoch and differs(message.program, own.program):
            if message.full:
                self._give_up(describe_other_program(self._spec.run_id, message.program, own.program))
                return
            self._log_once(f"warning: {describe_mixed_programs(message.program, own.program)}")
        if notice := config_mismatch(rules, self._rules):
            self._log_once(f"warning: {notice}")
        if message.common.phase in OVER and message.common.epoch < self.assignment.epoch:
            # etcd has lost its data since, and the clock of a later leader is behind. No leader comes after the end, so
            # this node would wait for one for ever, and keep the name of the job by renewing the lease of the result.
            raise JobGone(f"the job {self._spec.run_id!r} has ended while this node was not connected to it")
        self._result_lease = current.lease if message.common.phase in OVER else 0
        if message.common.phase not in OVER and lease_time(rules) != self._ttl:
            self._ttl = lease_time(rules)
            raise OtherLeaseTime
        self._take(message.assignment(self._own_report().key))

    @property
    def _message_key(self) -> Range:
        return Range(self._keys.messages(bucket_of(self._own_report().node_id)))

    async def _wait_until_changed(self, refused: JoinRefused) -> None:
        """Wait until the refusing key changes, or until this node gives up."""
        if self._is_done:
            return
        key = Range(refused.current.key)
        with contextlib.suppress(TimeoutError, StoreUnavailable, StoreMisconfigured, Compacted):
            async with TimeLimit(self._backoff.refusal_timeout), self._store.watch([key]) as watch:
                now = await self._store.commit(Txn(then=(Get(key),)))
                if now.found.get(key.key) == refused.current:
                    await anext(watch.after(now.revision))
            self._backoff.retry_now()

    async def _leave(self) -> None:
        """Delete this node's keys. The last node to leave also deletes the rest of the job, unless a disconnected
        member may come back to learn how the job ended."""
        await self._store.revoke(self._lease)
        self._lease = 0
        keys, plan = self._keys, Range(self._keys.plan)
        # By name, because other keys below this prefix may belong to a job whose prefix contains this job's name.
        rest = (plan, *map(Range, (keys.leader, keys.over, keys.last_write)), Range(keys.all_messages, prefix=True))
        is_last = (Absent(Range(keys.nodes, prefix=True)), Absent(Range(keys.unaware)))
        outcome = await self._store.commit(Txn(is_last, (Get(plan), *map(Delete, rest))))
        if (job := outcome.found.get(plan.key)) is not None:
            await self._store.revoke(job.lease)


def _describe_owner(current: KeyValue, store: str) -> str:
    try:
        report = decode_record(current.value, NodeReport)
    except InvalidMessage as error:
        return f"{current.key} in {store} is {error}"
    return f"node id {report.node_id} is in use by another process, on {report.host}, that is alive or just died"
