"""The leader of a job in etcd: the elected agent watches the nodes' reports, decides, and writes the assignments.

It decides as a master does, with the same coordinator. Each of its writes has the condition that it is still elected,
so an agent that was replaced during a stall writes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.model import OVER, NodeKey, NodePhase, NodeReport, Plan
from dlrover_run.coordination.rules import MAX_NODES, RESULT_RETENTION, JobRules
from dlrover_run.coordination.validation import validate_report, wrong_job_kind
from dlrover_run.coordination.waiting_throttle import WaitingThrottle
from dlrover_run.etcd.fenced_writer import FencedWriter, NotElected, StaleWriteApplied
from dlrover_run.etcd.operations import Change, Compacted, KeyValue, KeyValueStore, LeaseExpired, Range, Watch
from dlrover_run.rendezvous.etcd_records import (
    Keys,
    StoredPlan,
    decode_record,
    encode_record,
    messages_by_bucket,
    rules_of,
)
from dlrover_run.rendezvous.failure_detector import StallDetector
from dlrover_run.rendezvous.reconnect import wait_for_event
from dlrover_run.transport.messages import InvalidMessage, encode_rules


class MembershipWatch:
    """Turns the keys of the nodes' reports into events of a coordinator: reports, and nodes that are gone. `say` prints
    one line about a report that is ignored, once for each node.

    `strangers` are nodes of another kind of job. They learn that from the job's rules, so these are written where such
    nodes read them.
    """

    def __init__(self, keys: Keys, say: Callable[[str], None]) -> None:
        self._keys = keys
        self._say = say
        self._nodes: dict[str, NodeKey] = {}
        self._unreadable: set[str] = set()
        self._left: set[NodeKey] = set()
        self.strangers: frozenset[str] = frozenset()

    def has_left(self, key: NodeKey) -> bool:
        """Whether that node has reported that it left."""
        return key in self._left

    def awaits(self, plan: Plan) -> bool:
        """Whether a member of the plan is away, and may come back to learn how the job ended."""
        here = {*self._nodes.values(), *self._left}
        return any(not member.done and member.key not in here for member in plan.members)

    def hear_all(self, coordinator: Coordinator, found: Iterable[KeyValue], now: float) -> None:
        """Take all reports at one revision."""
        there = {self._node_id(current.key): current for current in found}
        for node_id in self._nodes.keys() - there.keys():
            self._lose(coordinator, node_id, now)
        for node_id, current in there.items():
            self._hear(coordinator, node_id, current, now)

    def hear(self, coordinator: Coordinator, change: Change, now: float) -> bool:
        """Take the change of one key; return whether it is new to the coordinator."""
        node_id = self._node_id(change.key)
        if change.now is not None:
            return self._hear(coordinator, node_id, change.now, now)
        if node_id not in self._nodes:
            return False
        self._lose(coordinator, node_id, now)
        return True

    def _hear(self, coordinator: Coordinator, node_id: str, current: KeyValue, now: float) -> bool:
        try:
            status = decode_record(current.value, NodeReport)
        except InvalidMessage as error:
            self._reject(node_id, current, str(error))
            return False
        problem = wrong_job_kind(coordinator.rules, status)
        if problem is not None:
            self.strangers |= {node_id}
        problem = problem or validate_report(status, coordinator.plan, coordinator.ranks(status.key))
        if status.node_id != node_id:
            problem = f"that of {status.node_id}"
        elif len(self._nodes) >= MAX_NODES and node_id not in self._nodes:
            problem = f"one too many, for a job has at most {MAX_NODES} nodes"
        if problem is not None:
            self._reject(node_id, current, problem)
            return False
        self._nodes[node_id] = status.key
        if status.phase is NodePhase.LEFT:
            self._left.add(status.key)
        return coordinator.receive(status, now)

    def _lose(self, coordinator: Coordinator, node_id: str, now: float) -> None:
        key = self._nodes.pop(node_id)
        coordinator.disconnect(key, now)

    def _reject(self, node_id: str, current: KeyValue, problem: str) -> None:
        if node_id not in self._unreadable:
            self._unreadable.add(node_id)
            self._say(f"warning: the status in etcd under {current.key} does not count: {problem}")

    def _node_id(self, key: str) -> str:
        return key.removeprefix(self._keys.nodes)


JOB_KEPT = 24 * 3600
"""Seconds for which a job without nodes can be resumed; then etcd deletes it. While it has an elected agent the time
does not pass."""


class EtcdLeader:
    """The leader of one election, the agent of the node `own`. `leader` is the leader's key as it was created in it;
    `return_grace` is how many seconds the members of a recovered plan have to come back. `say` prints one line to the
    console.
    """

    def __init__(
        self,
        store: KeyValueStore,
        keys: Keys,
        rules: JobRules,
        own: NodeKey,
        leader: KeyValue,
        return_grace: float,
        say: Callable[[str], None],
    ) -> None:
        self.leader = leader
        self._own = own
        self._store = store
        self._keys = keys
        self._rules = rules
        self._return_grace = return_grace
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._writing = FencedWriter(store, keys, leader)
        self._attendance = MembershipWatch(keys, say)
        self._stalls = StallDetector(self._loop.time())
        self._coordinator: Coordinator | None = None
        self._heard: list[Change] = []
        self._news = asyncio.Event()
        self._lease = 0
        self._renew_at = 0.0
        self._owing = True
        self._addressed: frozenset[NodeKey | str] = frozenset()
        self._done = False

    async def lead(self) -> None:
        """Decide for the job until it is over, or this node has left it, or another agent is elected.

        Raises Away; called again later it goes on with what it knows, and the time between counts for nobody.
        """
        try:
            was_away = self._coordinator is not None
            while not self._done:
                async with self._store.watch([Range(self._keys.nodes, prefix=True)]) as watch:
                    revision, coordinator = await self._read_all(was_away)
                    was_away = False
                    watching = asyncio.ensure_future(self._listen(watch, revision))
                    watching.add_done_callback(lambda _: self._news.set())
                    try:
                        await self._decide(coordinator, watching)
                    except (Compacted, StaleWriteApplied):
                        # Unread events were compacted, or an older write was applied.
                        continue
                    finally:
                        watching.cancel()
                        await asyncio.gather(watching, return_exceptions=True)
        except NotElected:
            return

    async def _read_all(self, was_away: bool) -> tuple[int, Coordinator]:
        """Read all keys at one revision; `was_away` after a time without etcd. Raises NotElected."""
        self._heard.clear()
        outcome = await self._writing.read(Range(self._keys.plan), Range(self._keys.nodes, prefix=True))
        now = self._loop.time()
        coordinator = self._coordinator
        if coordinator is None:
            self._stalls = StallDetector(now)
            coordinator = self._begin(self._take_over(outcome.found.get(self._keys.plan), now))
        self._excuse(coordinator, now)
        if was_away:
            # The leases of other nodes may have expired meanwhile; they take new ones.
            coordinator.extend_grace(now)
        nodes = (current for key, current in outcome.found.items() if key.startswith(self._keys.nodes))
        self._attendance.hear_all(coordinator, nodes, now)
        self._owing = self._progress.outdated = True
        return outcome.revision, coordinator

    def _take_over(self, stored: KeyValue | None, now: float) -> Coordinator:
        if stored is not None:
            try:
                record = decode_record(stored.value, StoredPlan)
                self._rules = rules_of(record)
            except InvalidMessage as error:
                self._say(f"warning: the plan in etcd under {self._keys.plan} is {error}; it is made anew")
            else:
                epoch = max(self.leader.created, record.plan.epoch + 1)
                # One lease for the whole job, so that none is left for a day after it.
                self._lease = stored.lease
                return Coordinator(self._rules, now, epoch, record.plan, self._return_grace)
        return Coordinator(self._rules, now, self._first_epoch)

    def _begin(self, coordinator: Coordinator) -> Coordinator:
        self._coordinator = coordinator
        self._progress = WaitingThrottle(coordinator)
        return coordinator

    @property
    def _first_epoch(self) -> int:
        """The epoch of a coordinator without a predecessor's plan. Revisions begin again at 1 if etcd has lost its
        data, and rounds before and after that must not have the same id. So it includes the time, as with a master."""
        return max(self.leader.created, time.time_ns() // 1_000_000)

    async def _listen(self, watch: Watch, revision: int) -> None:
        async for changes in watch.after(revision):
            self._heard += changes
            self._news.set()

    async def _decide(self, coordinator: Coordinator, watching: asyncio.Future[None]) -> None:
        """Decide whenever something changes. Raises NotElected, StaleWriteApplied, Away and Compacted."""
        while True:
            now = self._loop.time()
            self._excuse(coordinator, now)
            changes, self._heard = self._heard, []
            for change in changes:
                if self._attendance.hear(coordinator, change, now):
                    self._progress.outdated = True
            await self._keep_job(now)
            coordinator = await self._settle(coordinator)
            if coordinator.plan.phase in OVER or self._attendance.has_left(self._own):
                self._done = True
                return
            if watching.done():
                watching.result()
            if not self._heard:
                self._news.clear()
                await wait_for_event(self._news, self._wake_at(coordinator) - self._loop.time())

    def _wake_at(self, coordinator: Coordinator) -> float:
        times = (coordinator.wake_at(), self._progress.due, self._renew_at, self._stalls.next_check)
        return min(time for time in times if time is not None)

    def _excuse(self, coordinator: Coordinator, now: float) -> None:
        """Time in which this agent was stalled, or etcd unavailable, counts against no node."""
        if late := self._stalls.stalled_for(now):
            coordinator.compensate_stall(late)

    async def _settle(self, coordinator: Coordinator) -> Coordinator:
        """Decide for all reports and for the time that has passed, and write the result. Return the coordinator that
        decides from then on."""
        while True:
            now = self._loop.time()
            advanced = coordinator.advance(now)
            if coordinator.superseded:
                coordinator = self._begin(self._anew(coordinator, now))
                continue
            told = self._progress.renew(now, len(coordinator.members), at_once=advanced)
            readers: frozenset[NodeKey | str] = frozenset((*coordinator.members, *self._attendance.strangers))
            # A newcomer that no decision concerns reads messages that all other nodes may have read long ago.
            self._owing = self._owing or advanced or told or not readers <= self._addressed
            # Until a plan is recovered from the nodes' reports, each node keeps its assignment.
            if self._owing and not coordinator.recovering:
                self._addressed = readers
                await self._write(coordinator, now)
                self._owing = False
                for line in coordinator.take_log_lines():
                    self._say(line)
            if not advanced:
                return coordinator

    def _anew(self, before: Coordinator, now: float) -> Coordinator:
        """A node obeys a later coordinator, whose plan is not in this store. The stored plan is outdated, and a new one
        is recovered from the nodes' reports."""
        coordinator = Coordinator(self._rules, now, self._first_epoch)
        for presence in before.members.values():
            if presence.connected:
                coordinator.receive(presence.report, now)
        return coordinator

    async def _keep_job(self, now: float) -> None:
        """Keep a lease with which the job outlives its nodes for a while."""
        if now >= self._renew_at:
            if not self._lease or not await self._store.renew(self._lease):
                self._lease = await self._store.grant(JOB_KEPT)
                self._owing = True
            self._renew_at = now + JOB_KEPT / 24

    async def _write(self, coordinator: Coordinator, now: float) -> None:
        """Store the plan, then the assignments: nothing is sent that is not stored. Raises NotElected,
        StaleWriteApplied."""
        plan, lease = coordinator.plan, self._lease
        values = {self._keys.plan: encode_record(StoredPlan(encode_rules(self._rules), plan))}
        for bucket, word in messages_by_bucket(
            coordinator, self._progress.message(now), self._attendance.strangers
        ).items():
            values[self._keys.words(bucket)] = encode_record(word)
        if plan.phase in OVER:
            if self._attendance.awaits(plan):
                values[self._keys.unaware] = b""
            values[self._keys.over] = plan.phase.value.encode()
            # From now on etcd deletes the keys by itself.
            lease = await self._store.grant(int(RESULT_RETENTION))
        try:
            await self._writing.write(values, lease)
        except LeaseExpired:
            # Not this node's lease but the job's, which was revoked from outside. Its keys are gone, so all are written
            # again.
            if lease == self._lease:
                self._lease, self._renew_at = 0, 0.0
            raise StaleWriteApplied from None
        if lease != self._lease:
            await self._store.revoke(self._lease)
