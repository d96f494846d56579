"""The leader of a job in etcd: the elected agent watches the nodes' reports, decides, and writes the assignments.

It decides with the same coordinator as a master. Each of its writes has the condition that it is still elected, so an
agent that was replaced during a stall writes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.model import OVER, NodeKey, NodePhase, NodeReport, Plan
from dlrover_run.coordination.requests import JUST_BEGUN, OperatorRequest, RequestFailed
from dlrover_run.coordination.rules import MAX_NODES, RESULT_RETENTION, JobRules
from dlrover_run.coordination.take_over import misfit
from dlrover_run.coordination.validation import validate_report, wrong_job_kind
from dlrover_run.coordination.waiting import WaitingThrottle
from dlrover_run.rendezvous.failure_detector import StallDetector
from dlrover_run.rendezvous.kv.records import (
    Keys,
    RequestAnswer,
    StoredPlan,
    decode_record,
    encode_record,
    messages_by_bucket,
    wanted_value,
)
from dlrover_run.rendezvous.kv.writer import FencedWriter, NotElected, StaleWriteApplied
from dlrover_run.rendezvous.reconnect import wait_for_event
from dlrover_run.store.etcd.operations import (
    Change,
    Compacted,
    KeyValue,
    KeyValueStore,
    LeaseExpired,
    ModRevisionIs,
    Put,
    Range,
    Txn,
    Watch,
)
from dlrover_run.transport.messages import InvalidMessage, decode_rules, encode_rules
from dlrover_run.words.reasons import render


@dataclass(eq=False, repr=False)
class MembershipWatch:
    """Turns the keys of the nodes' reports into events of a coordinator: reports, and nodes that are gone. `log` prints
    one line about a report that is ignored, once for each node.

    `mismatched` are nodes of another kind of job. They detect that by the job's rules, so those are written where such
    nodes read them.
    """

    keys: Keys
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._nodes: dict[str, NodeKey] = {}
        self._rejected: set[str] = set()
        self._left: set[NodeKey] = set()
        self.mismatched: frozenset[str] = frozenset()

    def has_left(self, key: NodeKey) -> bool:
        return key in self._left

    def has_absent_member(self, plan: Plan) -> bool:
        """Whether a member of the plan is disconnected, and may come back to learn how the job ended."""
        known = {*self._nodes.values(), *self._left}
        return any(not member.done and member.key not in known for member in plan.members)

    def receive_all(self, coordinator: Coordinator, found: Iterable[KeyValue], now: float) -> None:
        reports = {current.key: current for current in found}
        lost = {self.keys.node(node_id) for node_id in self._nodes} - reports.keys()
        for key, current in [*((key, None) for key in lost), *reports.items()]:
            self.receive(coordinator, Change(key, current), now)

    def receive(self, coordinator: Coordinator, change: Change, now: float) -> bool:
        """Take the change of one key; return whether it is new to the coordinator."""
        node_id, current = change.key.removeprefix(self.keys.nodes), change.now
        if current is None:
            if node_id not in self._nodes:
                return False
            coordinator.disconnect(self._nodes.pop(node_id), now)
            return True
        try:
            report = decode_record(current.value, NodeReport)
        except InvalidMessage as error:
            self._reject(node_id, current, str(error))
            return False
        problem = wrong_job_kind(coordinator.rules, report)
        if problem is not None:
            self.mismatched |= {node_id}
        problem = problem or validate_report(report, coordinator.plan, coordinator.ranks(report.key))
        if report.node_id != node_id:
            problem = f"it is the report of {report.node_id}"
        elif len(self._nodes) >= MAX_NODES and node_id not in self._nodes:
            problem = f"one too many, because a job has at most {MAX_NODES} nodes"
        if problem is not None:
            self._reject(node_id, current, problem)
            return False
        self._nodes[node_id] = report.key
        if report.phase is NodePhase.LEFT:
            self._left.add(report.key)
        return coordinator.receive(report, now)

    def _reject(self, node_id: str, current: KeyValue, problem: str) -> None:
        if node_id not in self._rejected:
            self._rejected.add(node_id)
            self.log(f"warning: the report in etcd under {current.key} is ignored: {problem}")


JOB_RETENTION = 24 * 3600
"""Seconds for which a job without nodes can be resumed; then etcd deletes it."""


@dataclass(eq=False, repr=False)
class EtcdLeader:
    """The leader of one election, the agent of the node `own`. `leader` is the leader's key as it was created in that
    election; `return_grace` is how many seconds the members of a recovered plan have to come back. `log` prints one
    line to the console.
    """

    store: KeyValueStore
    keys: Keys
    rules: JobRules
    own: NodeKey
    leader: KeyValue
    return_grace: float
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._writer = FencedWriter(self.store, self.keys, self.leader)
        self._membership = MembershipWatch(self.keys, self.log)
        self._stalls = StallDetector(self._loop.time())
        self._coordinator: Coordinator | None = None
        self._requests = Range(self.keys.requests, prefix=True)
        # The requests that were taken, with what is written in their place.
        self._answers: list[tuple[KeyValue, RequestAnswer]] = []
        # Those whose answer is not written yet, so that a second reading of the keys does not carry them out twice.
        self._taken: set[tuple[str, int]] = set()
        self._changes: list[Change] = []
        self._changed = asyncio.Event()
        self._lease = 0
        self._renew_at = 0.0
        self._write_due = True
        self._readers: frozenset[NodeKey | str] = frozenset()
        self._done = False

    async def lead(self) -> None:
        """Decide for the job until it is over, or this node has left it, or another agent is elected.

        Raises EtcdUnavailable; called again later it continues with its state, and the time between counts against no
        node.
        """
        try:
            was_away = self._coordinator is not None
            while not self._done:
                async with self.store.watch([Range(self.keys.nodes, prefix=True), self._requests]) as watch:
                    revision, coordinator = await self._read_all(was_away)
                    was_away = False
                    watching = asyncio.ensure_future(self._listen(watch, revision))
                    watching.add_done_callback(lambda _: self._changed.set())
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
        """Read all keys at one revision; `was_away`: etcd was unavailable before. Raises NotElected."""
        self._changes.clear()
        outcome = await self._writer.read(Range(self.keys.plan), Range(self.keys.nodes, prefix=True), self._requests)
        now = self._loop.time()
        coordinator = self._coordinator
        if coordinator is None:
            self._stalls = StallDetector(now)
            coordinator = self._set_coordinator(self._take_over(outcome.found.get(self.keys.plan), now))
        self._compensate_stall(coordinator, now)
        if was_away:
            # The leases of other nodes may have expired meanwhile; they take new ones.
            coordinator.extend_grace(now)
        nodes = (current for key, current in outcome.found.items() if key.startswith(self.keys.nodes))
        self._membership.receive_all(coordinator, nodes, now)
        for key, current in outcome.found.items():
            if key.startswith(self.keys.requests):
                self._take_request(coordinator, current, now)
        self._write_due = self._progress.outdated = True
        return outcome.revision, coordinator

    def _take_over(self, stored: KeyValue | None, now: float) -> Coordinator:
        if stored is not None:
            try:
                record = decode_record(stored.value, StoredPlan)
                rules = decode_rules(record.rules)
                if (problem := misfit(rules, record.plan)) is not None:
                    raise InvalidMessage(problem)
                self.rules = rules
            except InvalidMessage as error:
                self.log(f"warning: {self.keys.plan} in etcd is {error}; a new plan is made")
            else:
                epoch = max(self.leader.created, record.plan.epoch + 1)
                # One lease for the whole job, so that none is left for a day after its end.
                self._lease = stored.lease
                return Coordinator(self.rules, now, epoch, record.plan, self.return_grace)
        return Coordinator(self.rules, now, self._first_epoch)

    def _set_coordinator(self, coordinator: Coordinator) -> Coordinator:
        self._coordinator = coordinator
        self._progress = WaitingThrottle(coordinator)
        return coordinator

    @property
    def _first_epoch(self) -> int:
        """The epoch of a coordinator without a predecessor's plan. It includes the time, as with a master: revisions
        start again at 1 if etcd has lost its data, and rounds before and after that must not have the same id."""
        return max(self.leader.created, time.time_ns() // 1_000_000)

    async def _listen(self, watch: Watch, revision: int) -> None:
        async for changes in watch.after(revision):
            self._changes += changes
            self._changed.set()

    async def _decide(self, coordinator: Coordinator, watching: asyncio.Future[None]) -> None:
        """Decide at each change. Raises NotElected, StaleWriteApplied, EtcdUnavailable and Compacted."""
        while True:
            now = self._loop.time()
            self._compensate_stall(coordinator, now)
            changes, self._changes = self._changes, []
            for change in changes:
                if change.key.startswith(self.keys.requests):
                    self._take_request(coordinator, change.now, now)
                elif self._membership.receive(coordinator, change, now):
                    self._progress.outdated = True
            await self._renew_job_lease(now)
            before, coordinator = coordinator, await self._step(coordinator)
            if coordinator is not before:
                # It has not taken them.
                just_begun = RequestAnswer(refusal=JUST_BEGUN)
                self._answers = [(request, just_begun) for request, _ in self._answers]
            await self._answer_requests()
            if coordinator.plan.phase in OVER or self._membership.has_left(self.own):
                self._done = True
                return
            if watching.done():
                watching.result()
            if not self._changes:
                self._changed.clear()
                await wait_for_event(self._changed, self._wake_at(coordinator) - self._loop.time())

    def _take_request(self, coordinator: Coordinator, current: KeyValue | None, now: float) -> None:
        """Take a request of an operator, whose key holds the answer once the stored plan contains it."""
        if current is None or (current.key, current.changed) in self._taken:
            return
        try:
            request = decode_record(current.value, OperatorRequest)
        except InvalidMessage:
            # An answer, which its program deletes. Whatever else is written there ends with its lease.
            return
        self._taken.add((current.key, current.changed))
        try:
            self._answers.append((current, RequestAnswer(render(coordinator.request(request, now)))))
            self.log(str(request))
        except RequestFailed as failed:
            self._answers.append((current, RequestAnswer(refusal=str(failed))))

    async def _answer_requests(self) -> None:
        while self._answers:
            request, answer = self._answers[0]
            put = Put(request.key, encode_record(answer), request.lease)
            await self.store.commit(Txn((ModRevisionIs(request.key, request.changed),), (put,)))
            self._answers.pop(0)
            self._taken.discard((request.key, request.changed))

    def _wake_at(self, coordinator: Coordinator) -> float:
        times = (coordinator.wake_at(), self._progress.due, self._renew_at, self._stalls.next_check)
        return min(time for time in times if time is not None)

    def _compensate_stall(self, coordinator: Coordinator, now: float) -> None:
        """Do not count time in which this agent was stalled, or etcd unavailable, against any node."""
        if stalled := self._stalls.stalled_for(now):
            coordinator.compensate_stall(stalled)

    async def _step(self, coordinator: Coordinator) -> Coordinator:
        """Decide for all reports and for the time that has passed, and write the result. Return the coordinator that
        decides from then on."""
        while True:
            now = self._loop.time()
            advanced = coordinator.advance(now)
            while (line := coordinator.take_error()) is not None:
                self.log(line)
            if coordinator.superseded:
                coordinator = self._set_coordinator(self._restart(coordinator, now))
                continue
            renewed = self._progress.renew(now, len(coordinator.members), at_once=advanced)
            readers: frozenset[NodeKey | str] = frozenset((*coordinator.members, *self._membership.mismatched))
            # A new node that no decision concerns may read a bucket that has not been written yet.
            self._write_due = self._write_due or advanced or renewed or not readers <= self._readers
            # Until a plan is recovered from the nodes' reports, each node keeps its assignment.
            if self._write_due and not coordinator.recovering:
                self._readers = readers
                await self._write(coordinator, now)
                self._write_due = False
                for line in coordinator.take_log_lines():
                    self.log(line)
            if not advanced:
                return coordinator

    def _restart(self, before: Coordinator, now: float) -> Coordinator:
        """A new coordinator, because a node follows a later one, whose plan is not in this store. The stored plan is
        outdated, and the new coordinator recovers one from the nodes' reports."""
        coordinator = Coordinator(self.rules, now, self._first_epoch)
        for member in before.members.values():
            if member.connected:
                coordinator.receive(member.report, now)
        return coordinator

    async def _renew_job_lease(self, now: float) -> None:
        """Renew the lease with which the keys of the job outlive its nodes."""
        if now >= self._renew_at:
            if not self._lease or not await self.store.renew(self._lease):
                self._lease = await self.store.grant(JOB_RETENTION)
                self._write_due = True
            self._renew_at = now + JOB_RETENTION / 24

    async def _write(self, coordinator: Coordinator, now: float) -> None:
        """Store the plan, then the assignments: nothing is sent that is not stored. Raises NotElected,
        StaleWriteApplied."""
        plan, lease = coordinator.plan, self._lease
        values = {self.keys.plan: encode_record(StoredPlan(encode_rules(self.rules), plan))}
        messages = messages_by_bucket(coordinator, self._progress.message(now), self._membership.mismatched)
        values |= {self.keys.messages(bucket): encode_record(message) for bucket, message in messages.items()}
        if (wanted := wanted_value(plan)) is not None:
            values[self.keys.wanted] = wanted
        if plan.phase in OVER:
            if self._membership.has_absent_member(plan):
                values[self.keys.unaware] = b""
            values[self.keys.over] = plan.phase.value.encode()
            # From now on etcd deletes the keys by itself.
            lease = await self.store.grant(int(RESULT_RETENTION))
        try:
            await self._writer.write(values, lease)
        except LeaseExpired:
            # The job's lease, not this node's, was revoked by another program. All keys are written again.
            if lease == self._lease:
                self._lease, self._renew_at = 0, 0.0
            raise StaleWriteApplied from None
        if lease != self._lease:
            await self.store.revoke(self._lease)
