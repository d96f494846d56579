"""The leader of a job in a key-value store: the elected agent watches the reports of the nodes, decides, and
writes the assignments.

It decides with the same driver as a master. Each write of a decision has the condition that it is still elected, so an
agent that was replaced during a stall writes none. The answer to a request has the condition that the request is as
it was read.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dlrover_run.background import beside, wait_for_event
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.driver import Answer, Disconnected, Driver, Paused, Requested
from dlrover_run.coordination.records.plan import OVER
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.requests import OperatorRequest
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.rules import MAX_NODES, RESULT_RETENTION, JobRules
from dlrover_run.coordination.records.validation import wrong_job_kind
from dlrover_run.coordination.take_over import misfit
from dlrover_run.rendezvous.failure_detector import PauseDetector
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
from dlrover_run.store.operations import (
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
from dlrover_run.words.log_level import is_debug
from dlrover_run.words.reasons import render


@dataclass(eq=False, repr=False)
class MembershipWatch:
    """Turns the keys of the nodes' reports into events of a driver: reports, and nodes that are gone. `log` prints one
    line about a report that is ignored, once for each node.

    `mismatched` are nodes of another kind of job. They detect that by the job's rules, so those are written where such
    nodes read them. `has_left` is whether the node `own` has left the job.
    """

    keys: Keys
    own: NodeKey
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._nodes: dict[str, NodeKey] = {}
        self._rejected: set[str] = set()
        self.has_left = False
        self.mismatched: frozenset[str] = frozenset()

    def receive_all(self, driver: Driver, found: Iterable[KeyValue], now: float) -> None:
        reports = {current.key: current for current in found}
        lost = {self.keys.node(node_id) for node_id in self._nodes} - reports.keys()
        for key, current in [*((key, None) for key in lost), *reports.items()]:
            self.receive(driver, Change(key, current), now)

    def receive(self, driver: Driver, change: Change, now: float) -> bool:
        """Take the change of one key; return whether it is new to the driver."""
        node_id, current = change.key.removeprefix(self.keys.nodes), change.now
        if current is None:
            if node_id not in self._nodes:
                return False
            return driver.arrive(Disconnected(self._nodes.pop(node_id)), now)
        try:
            report = decode_record(current.value, NodeReport)
        except InvalidMessage as error:
            self._reject(node_id, current, str(error))
            return False
        if wrong_job_kind(driver.coordinator.rules, report) is not None:
            self.mismatched |= {node_id}
        problem = driver.problem_of(report)
        if report.node_id != node_id:
            problem = f"it is the report of {report.node_id}"
        elif len(self._nodes) >= MAX_NODES and node_id not in self._nodes:
            problem = f"one too many, because a job has at most {MAX_NODES} nodes"
        if problem is not None:
            self._reject(node_id, current, problem)
            return False
        self._nodes[node_id] = report.key
        self.has_left = self.has_left or (report.key == self.own and report.phase is NodePhase.LEFT)
        return driver.arrive(report, now)

    def _reject(self, node_id: str, current: KeyValue, problem: str) -> None:
        if node_id not in self._rejected:
            self._rejected.add(node_id)
            self.log(f"warning: the report in {self.keys.store} under {current.key} is ignored: {problem}")


class RequestKey(NamedTuple):
    """The key of a request, the revision at which it was put, and its lease, which is that of the answer too."""

    key: str
    changed: int
    lease: int


JOB_RETENTION = 24 * 3600
"""Seconds for which a job without nodes can be resumed; then etcd deletes it."""


@dataclass(eq=False, repr=False)
class StoreLeader:
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
        self._membership = MembershipWatch(self.keys, self.own, self.log)
        self._pauses = PauseDetector(self._loop.time())
        self._driver: Driver | None = None
        self._requests = Range(self.keys.requests, prefix=True)
        self._changes: list[Change] = []
        self._changed = asyncio.Event()
        self._lease = 0
        self._renew_at = 0.0
        self._readers: frozenset[NodeKey | str] = frozenset()
        self._done = False

    async def lead(self) -> None:
        """Decide for the job until it is over, or this node has left it, or another agent is elected.

        Raises StoreUnavailable; called again later it continues with its state, and the time between counts against no
        node.
        """
        try:
            was_away = self._driver is not None
            while not self._done:
                async with self.store.watch([Range(self.keys.nodes, prefix=True), self._requests]) as watch:
                    revision, driver = await self._read_all(was_away)
                    was_away = False
                    try:
                        async with beside(self._listen(watch, revision)) as watching:
                            watching.add_done_callback(lambda _: self._changed.set())
                            await self._decide(driver, watching)
                    except (Compacted, StaleWriteApplied):
                        # Unread events were compacted, or an older write was applied.
                        continue
                    except Exception:
                        # The watch may fail, in any way, when the last plan has been stored already: `beside` raises
                        # that after the last decision, and nothing is left to watch for.
                        if not self._done:
                            raise
        except NotElected:
            return

    async def _read_all(self, was_away: bool) -> tuple[int, Driver]:
        """Read all keys at one revision; `was_away`: etcd was unavailable before. Raises NotElected."""
        self._changes.clear()
        outcome = await self._writer.read(Range(self.keys.plan), Range(self.keys.nodes, prefix=True), self._requests)
        now = self._loop.time()
        driver = self._driver
        if driver is None:
            self._pauses = PauseDetector(now)
            coordinator = self._take_over(outcome.found.get(self.keys.plan), now)
            driver = self._driver = Driver(
                coordinator,
                self.log,
                kept_together=True,
                begin=self._begin,
                debug=is_debug(os.environ),
            )
        # After a time away the leases of other nodes may have expired; they take new ones.
        self._compensate_stall(driver, now, was_away)
        nodes = (current for key, current in outcome.found.items() if key.startswith(self.keys.nodes))
        self._membership.receive_all(driver, nodes, now)
        for key, current in outcome.found.items():
            if key.startswith(self.keys.requests):
                self._take_request(driver, current, now)
        driver.rewrite()
        return outcome.revision, driver

    def _take_over(self, stored: KeyValue | None, now: float) -> Coordinator:
        if stored is not None:
            try:
                record = decode_record(stored.value, StoredPlan)
                rules = decode_rules(record.rules)
                if (problem := misfit(rules, record.plan)) is not None:
                    raise InvalidMessage(problem)
                self.rules = rules
            except InvalidMessage as error:
                self.log(f"warning: {self.keys.plan} in {self.keys.store} is {error}; a new plan is made")
            else:
                epoch = max(self.leader.created, record.plan.epoch + 1)
                # One lease for the whole job, so that none is left for a day after its end.
                self._lease = stored.lease
                return Coordinator(self.rules, now, epoch, record.plan, self.return_grace)
        return self._begin(now)

    def _begin(self, now: float) -> Coordinator:
        """A coordinator without a predecessor's plan."""
        return Coordinator(self.rules, now, self._first_epoch)

    @property
    def _first_epoch(self) -> int:
        """The epoch of a coordinator without a predecessor's plan. It includes the time, as with a master: revisions
        start again at 1 if etcd has lost its data, and rounds before and after that must not have the same id."""
        return max(self.leader.created, time.time_ns() // 1_000_000)

    async def _listen(self, watch: Watch, revision: int) -> None:
        async for changes in watch.after(revision):
            self._changes += changes
            self._changed.set()

    async def _decide(self, driver: Driver, watching: asyncio.Future[None]) -> None:
        """Decide at each change. Raises NotElected, StaleWriteApplied, StoreUnavailable and Compacted."""
        while True:
            now = self._loop.time()
            self._compensate_stall(driver, now)
            changes, self._changes = self._changes, []
            for change in changes:
                if change.key.startswith(self.keys.requests):
                    self._take_request(driver, change.now, now)
                else:
                    self._membership.receive(driver, change, now)
            await self._renew_job_lease(driver, now)
            await self._step(driver)
            if driver.coordinator.plan.phase in OVER or self._membership.has_left:
                self._done = True
                return
            if watching.done():
                watching.result()
            if not self._changes:
                self._changed.clear()
                await wait_for_event(self._changed, self._wake_at(driver) - self._loop.time())

    def _take_request(self, driver: Driver, current: KeyValue | None, now: float) -> None:
        """Take a request of an operator, whose key holds the answer once the stored plan contains it."""
        if current is None:
            return
        try:
            request = decode_record(current.value, OperatorRequest)
        except InvalidMessage:
            # An answer, which its program deletes. Whatever else is written there ends with its lease.
            return
        if driver.arrive(Requested(RequestKey(current.key, current.changed, current.lease), request), now):
            self.log(str(request))

    async def _answer_requests(self, driver: Driver, answers: Mapping[Hashable, Answer]) -> None:
        for id, answer in answers.items():
            assert isinstance(id, RequestKey), "the ids of requests are made by `_take_request`"
            put = Put(id.key, encode_record(RequestAnswer(render(answer.answer), answer.refusal)), id.lease)
            await self.store.commit(Txn((ModRevisionIs(id.key, id.changed),), (put,)))
            driver.answered(id)

    def _wake_at(self, driver: Driver) -> float:
        times = (driver.wake_at(), self._renew_at, self._pauses.next_check)
        return min(time for time in times if time is not None)

    def _compensate_stall(self, driver: Driver, now: float, was_away: bool = False) -> None:
        """Do not count time in which this agent was stalled, or etcd unavailable, against any node."""
        stalled = self._pauses.paused_for(now)
        if stalled or was_away:
            driver.arrive(Paused(stalled, cut_off=was_away), now)

    async def _step(self, driver: Driver) -> None:
        """Decide for all reports and for the time that has passed, and write the result."""
        while True:
            now = self._loop.time()
            writes = driver.turn(now)
            readers: frozenset[NodeKey | str] = frozenset((*driver.coordinator.nodes, *self._membership.mismatched))
            # A new node that no decision concerns may read a bucket that has not been written yet. Until a plan is
            # recovered from the nodes' reports, each node keeps its assignment.
            is_new = not driver.coordinator.recovering and not readers <= self._readers
            if writes.plan is not None or writes.send or is_new:
                self._readers = readers
                await self._write(driver, now)
            if writes.plan is not None:
                driver.written(now)
                continue
            await self._answer_requests(driver, writes.answers)
            return

    async def _renew_job_lease(self, driver: Driver, now: float) -> None:
        """Renew the lease with which the keys of the job outlive its nodes."""
        if now >= self._renew_at:
            if not self._lease or not await self.store.renew(self._lease):
                self._lease = await self.store.grant(JOB_RETENTION)
                driver.rewrite()
            self._renew_at = now + JOB_RETENTION / 24

    async def _write(self, driver: Driver, now: float) -> None:
        """Store the plan, then the assignments: nothing is sent that is not stored. Raises NotElected,
        StaleWriteApplied."""
        plan, lease = driver.coordinator.plan, self._lease
        values = {self.keys.plan: encode_record(StoredPlan(encode_rules(self.rules), plan))}
        messages = messages_by_bucket(driver.coordinator, driver.waiting(now), self._membership.mismatched)
        values |= {self.keys.messages(bucket): encode_record(message) for bucket, message in messages.items()}
        if (wanted := wanted_value(plan)) is not None:
            values[self.keys.wanted] = wanted
        if plan.phase in OVER:
            if driver.has_absent:
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
