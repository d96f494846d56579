"""What the elected agent does for all nodes of a job in etcd: it hears their statuses, decides, writes what follows.

It decides as a master does, with the same coordinator. Whatever it writes is bound to the key of its election, so an
agent that was replaced while it slept writes nothing any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from dlrover_run.backends.etcd_records import BUCKETS, Keys, Stored, Word, bucket_of, pack, rules_of, unpack
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.pacing import Progress
from dlrover_run.coordination.plausible import implausible
from dlrover_run.coordination.punctuality import Punctuality
from dlrover_run.coordination.records import OVER, NodeKey, NodePhase, NodeStatus, Seat, assignment
from dlrover_run.coordination.rules import MOST_NODES, RESULT_KEPT, Rules
from dlrover_run.etcd.operations import (
    Absent,
    Change,
    Changed,
    Compacted,
    Created,
    Get,
    KeyValue,
    Put,
    Range,
    Store,
    Txn,
)
from dlrover_run.nursery import wait_until
from dlrover_run.wire.messages import BadMessage, rule_values

JOB_KEPT = 24 * 3600
"""Seconds for which a job of which no node is left can be taken up again; then etcd forgets it. While it has an elected
agent the time does not pass."""

LARGEST_WRITE = 1_000_000
"""Bytes of values in one transaction; etcd refuses a request of more than 1.5 MB by default."""


class Deposed(Exception):
    """This agent is elected no more."""


class Overtaken(Exception):
    """A write that was given up has been carried out all the same, so it has to be read again what stands in etcd."""


class Leadership:
    """One election's, of the agent of the node `own`. `fence` is the revision at which the leader's key was created;
    `return_grace` is how many seconds the members of a plan that is taken over have to come back. `say` prints one line
    for the person at the console.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        rules: Rules,
        own: NodeKey,
        fence: int,
        return_grace: float,
        say: Callable[[str], None],
    ) -> None:
        self.fence = fence
        self._own = own
        self._store = store
        self._keys = keys
        self._rules = rules
        self._return_grace = return_grace
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._coordinator: Coordinator | None = None
        self._punctuality = Punctuality(self._loop.time())
        self._nodes: dict[str, NodeKey] = {}
        self._heard: list[Change] = []
        self._news = asyncio.Event()
        self._lease = 0
        self._renew_at = 0.0
        self._written: dict[str, bytes] = {}
        self._last: Absent | Changed = Absent(Range(keys.turn))
        self._turns = 0
        self._owing = True
        self._over = False
        self._own_node_left = False
        self._unreadable: set[str] = set()

    async def lead(self) -> None:
        """Decide for the job until it is over, or this node has left it, or another agent is elected.

        Raises Away; called again later it goes on with what it knows, and the time between counts for nobody.
        """
        try:
            while not self._is_done:
                self._heard.clear()
                watching = asyncio.ensure_future(self._watch(await self._read_all()))
                watching.add_done_callback(lambda _: self._news.set())
                try:
                    await self._decide(watching)
                except (Compacted, Overtaken):
                    # Events that nobody has heard are not kept any more, or an older write stands there.
                    continue
                finally:
                    watching.cancel()
                    await asyncio.wait([watching])
        except Deposed:
            return

    async def _read_all(self) -> int:
        """Hear how everything stands at one revision, which is returned. Raises Deposed."""
        reads = (Get(Range(self._keys.plan)), Get(Range(self._keys.turn)), Get(Range(self._keys.nodes, prefix=True)))
        outcome = await self._store.commit(Txn((self._elected,), reads))
        if not outcome.succeeded:
            raise Deposed
        now = self._loop.time()
        found = dict(outcome.found)
        stored = found.pop(self._keys.plan, None)
        turn = found.pop(self._keys.turn, None)
        self._last = Absent(Range(self._keys.turn)) if turn is None else Changed(turn.key, turn.changed)
        # What was given up may stand there, or not.
        self._written.clear()
        if self._coordinator is None:
            self._coordinator = self._take_over(stored, now)
            self._progress = Progress(self._coordinator)
            self._punctuality = Punctuality(now)
        self._excuse(now)
        for node_id in self._nodes.keys() - {self._node_id(key) for key in found}:
            self._coordinator.disconnect(self._nodes.pop(node_id), now)
        for current in found.values():
            self._hear(current, now)
        self._owing = True
        return outcome.revision

    def _take_over(self, stored: KeyValue | None, now: float) -> Coordinator:
        if stored is not None:
            try:
                record = unpack(stored.value, Stored)
                self._rules = rules_of(record)
            except BadMessage as error:
                self._say(f"warning: the plan in etcd under {self._keys.plan} is {error}; it is made anew")
            else:
                epoch = max(self.fence, record.plan.epoch + 1)
                return Coordinator(self._rules, now, epoch, record.plan, self._return_grace)
        return Coordinator(self._rules, now, self._first_epoch)

    async def _watch(self, revision: int) -> None:
        async for changes in self._store.watch([Range(self._keys.nodes, prefix=True)], revision + 1):
            self._heard += changes
            self._news.set()

    async def _decide(self, watching: asyncio.Future[None]) -> None:
        """Settle whatever is heard. Raises Deposed, Away and Compacted."""
        while not self._is_done:
            now = self._loop.time()
            self._excuse(now)
            self._hear_changes(now)
            await self._keep_job(now)
            await self._settle()
            if watching.done():
                watching.result()
            if not self._heard and not self._is_done:
                self._news.clear()
                await wait_until(self._news, self._wake_at() - self._loop.time())

    def _wake_at(self) -> float:
        assert self._coordinator is not None, "it is there since the first reading"
        times = (self._coordinator.wake_at(), self._progress.due, self._renew_at, self._punctuality.next_beat)
        return min(time for time in times if time is not None)

    async def _settle(self) -> None:
        """Decide on all that was heard and on the time that has passed, and write what follows."""
        assert self._coordinator is not None, "it is there since the first reading"
        while not self._over:
            now = self._loop.time()
            advanced = self._coordinator.advance(now)
            if self._coordinator.superseded:
                self._begin_anew(now)
                continue
            told = self._progress.renew(now, len(self._coordinator.present), at_once=advanced)
            self._owing = self._owing or advanced or told
            # Until a plan is rebuilt from what nodes say, each of them keeps what it was told.
            if self._owing and not self._coordinator.adopting:
                await self._write(self._coordinator, now)
                self._owing = False
            if not advanced:
                return

    def _begin_anew(self, now: float) -> None:
        """A node obeys a later coordinator, whose plan is not in this store: what was stored here is worth nothing, and
        the plan is rebuilt from what the nodes say."""
        assert self._coordinator is not None, "it is there since the first reading"
        statuses = [p.status for p in self._coordinator.present.values() if p.connected]
        self._coordinator = Coordinator(self._rules, now, self._first_epoch)
        self._progress = Progress(self._coordinator)
        for status in statuses:
            self._coordinator.hear(status, now)

    def _excuse(self, now: float) -> None:
        """Time in which this agent was stopped, or etcd away, counts for nobody."""
        if self._coordinator is not None and (late := self._punctuality.late(now)):
            self._coordinator.excuse(late, now)

    def _hear_changes(self, now: float) -> None:
        assert self._coordinator is not None, "it is there since the first reading"
        changes, self._heard = self._heard, []
        for change in changes:
            if change.now is not None:
                self._hear(change.now, now)
            elif (key := self._nodes.pop(self._node_id(change.key), None)) is not None:
                self._coordinator.disconnect(key, now)
                self._progress.outdated = True

    def _hear(self, current: KeyValue, now: float) -> None:
        assert self._coordinator is not None, "it is there since the first reading"
        node_id = self._node_id(current.key)
        try:
            status = unpack(current.value, NodeStatus)
            problem = implausible(status, self._coordinator.plan)
            if status.node_id != node_id:
                problem = f"that of {status.node_id}"
        except BadMessage as error:
            problem = str(error)
        if problem is None and len(self._nodes) >= MOST_NODES and node_id not in self._nodes:
            problem = f"one too many, for a job has at most {MOST_NODES} nodes"
        if problem is not None:
            if node_id not in self._unreadable:
                self._unreadable.add(node_id)
                self._say(f"warning: the status in etcd under {current.key} does not count: it is {problem}")
            return
        self._nodes[node_id] = status.key
        if status.key == self._own and status.phase is NodePhase.LEFT:
            self._own_node_left = True
        if self._coordinator.hear(status, now):
            self._progress.outdated = True

    @property
    def _is_done(self) -> bool:
        return self._over or self._own_node_left

    def _node_id(self, key: str) -> str:
        return key.removeprefix(self._keys.nodes)

    @property
    def _first_epoch(self) -> int:
        """The epoch of a coordinator without a predecessor's plan. Revisions begin anew where etcd has lost its data,
        and rounds of before and after that must not have one name; so time counts too, as with a master."""
        return max(self.fence, time.time_ns() // 1_000_000)

    @property
    def _elected(self) -> Created:
        return Created(self._keys.leader, self.fence)

    async def _keep_job(self, now: float) -> None:
        """Have a lease under which the job outlives its nodes for a while."""
        if now < self._renew_at:
            return
        if not self._lease or not await self._store.renew(self._lease):
            self._lease = await self._store.grant(JOB_KEPT)
            self._written.clear()
            self._owing = True
        self._renew_at = now + JOB_KEPT / 24

    async def _write(self, coordinator: Coordinator, now: float) -> None:
        """Store the plan, and then the words: nobody is told what is not stored. Raises Deposed."""
        plan, lease = coordinator.plan, self._lease
        values = {self._keys.plan: pack(Stored(rule_values(self._rules), plan)), **self._words(coordinator, now)}
        if plan.phase in OVER:
            # From now on etcd cleans up by itself.
            lease = await self._store.grant(int(RESULT_KEPT))
            values[self._keys.over] = plan.phase.value.encode()
            self._written.clear()
        puts = [Put(key, value, lease) for key, value in values.items() if self._written.get(key) != value]
        for batch in _batches(puts):
            await self._put(batch, lease)
            self._written.update((put.key, put.value) for put in batch)
        self._over = plan.phase in OVER

    async def _put(self, batch: list[Put], lease: int) -> None:
        """Write after the last write, once. The key of the election says who may write, not in which order what was
        sent is carried out: a write may come twice, and one that was given up after its successor. Raises Deposed and
        Overtaken."""
        self._turns += 1
        number = f"{self.fence}.{self._turns}".encode()
        reads = (Get(Range(self._keys.leader)), Get(Range(self._keys.turn)))
        turn = Put(self._keys.turn, number, lease)
        outcome = await self._store.commit(Txn((self._elected, self._last), (*batch, turn), reads))
        revision = outcome.revision
        if not outcome.succeeded:
            leader, last = outcome.found.get(self._keys.leader), outcome.found.get(self._keys.turn)
            if leader is None or leader.created != self.fence:
                raise Deposed
            if last is None or last.value != number:
                raise Overtaken
            revision = last.changed
        self._last = Changed(self._keys.turn, revision)

    def _words(self, coordinator: Coordinator, now: float) -> dict[str, bytes]:
        plan = coordinator.plan
        known = {*coordinator.present, *(member.key for member in plan.members)}
        # Who was lost long ago may be back just in time to learn that the job is over.
        buckets = range(BUCKETS) if plan.phase in OVER else {bucket_of(key.node_id) for key in known}
        seats: dict[int, list[tuple[str, str, Seat]]] = {bucket: [] for bucket in buckets}
        waiting: set[int] = set()
        for key in known:
            seat = coordinator.seat(key)
            if seat is None:
                waiting.add(bucket_of(key.node_id))
            else:
                seats[bucket_of(key.node_id)].append((*key, seat))
        told = None if plan.phase in OVER else self._progress.told(now)
        rules, wanted = rule_values(self._rules), assignment(plan, None)
        words = {
            bucket: Word(rules, wanted, told if bucket in waiting else None, tuple(sorted(seated, key=_rank)))
            for bucket, seated in seats.items()
        }
        return {self._keys.words(bucket): pack(word) for bucket, word in sorted(words.items())}


def _rank(seated: tuple[str, str, Seat]) -> int:
    return seated[2].node_rank


def _batches(puts: Sequence[Put]) -> Iterator[list[Put]]:
    """The same in the same order, in parts that etcd takes in one transaction."""
    total = 0

    def number(put: Put) -> int:
        nonlocal total
        total += len(put.value)
        return total // LARGEST_WRITE

    for _, batch in groupby(puts, number):
        yield list(batch)
