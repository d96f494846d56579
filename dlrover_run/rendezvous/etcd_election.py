"""Which agent decides for a job in etcd: the one that has created the leader's key, as long as its lease lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dlrover_run.coordination.model import OVER, NodeKey
from dlrover_run.coordination.rules import JobRules
from dlrover_run.etcd.operations import Absent, Delete, Get, KeyValue, KeyValueStore, ModRevisionIs, Put, Range, Txn
from dlrover_run.rendezvous.client import AssignmentTracker
from dlrover_run.rendezvous.etcd_leader import EtcdLeader
from dlrover_run.rendezvous.etcd_records import Keys

PER_SECOND = 500
"""Nodes that stand for election in a second after the elected agent has gone: all of them see that at once."""


class Election:
    """The part of one node in it. `rng` returns a random number from 0 to 1; `say` prints one line for the person at
    the console.

    What an agent knows that was elected outlives the loss of etcd: `begin` is called after each, with a group for the
    tasks and the lease that this node has now.
    """

    def __init__(
        self,
        store: KeyValueStore,
        keys: Keys,
        rules: JobRules,
        orders: AssignmentTracker,
        rng: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._store = store
        self._keys = keys
        self._rules = rules
        self._orders = orders
        self._rng = rng
        self._say = say
        self._retired = False
        self._leadership: EtcdLeader | None = None
        self._standing: asyncio.Task[None] | None = None
        self.leading: asyncio.Task[None] | None = None

    def begin(self, tasks: asyncio.TaskGroup, own: NodeKey, lease: int) -> None:
        """Take part, under this lease."""
        self._tasks = tasks
        self._own = own
        self._lease = lease
        self._standing = self.leading = None

    def retire(self) -> None:
        """Stand no more: this node leaves, and the key would go with it."""
        self._retired = True

    def stand(self, own: NodeKey, lease: int) -> Txn:
        """The transaction by which the leader's key is created where there is none, and read."""
        leader = Range(self._keys.leader)
        free = (Absent(leader), Absent(Range(self._keys.over)))
        return Txn(free, (Put(leader.key, own.node_id.encode(), lease), Get(leader)), (Get(leader),))

    def mind(self, leader: KeyValue | None, return_grace: float) -> None:
        """Somebody leads, or nobody does. `return_grace` is for the members of a plan that this agent takes over: who
        has watched all the time knows that the others could have renewed their leases too."""
        if self._standing is not None:
            self._standing.cancel()
            self._standing = None
        if leader is None or leader.lease != self._lease:
            self._resign()
        if leader is None:
            if self._orders.assignment.phase not in OVER and not self._retired:
                self._standing = self._tasks.create_task(self._stand_soon())
        elif not leader.lease:
            self._tasks.create_task(self._remove(leader))
        elif leader.lease == self._lease:
            self._lead(leader, return_grace)

    def _lead(self, leader: KeyValue, return_grace: float) -> None:
        if self._leadership is None or self._leadership.leader != leader:
            self._resign()
            self._leadership = EtcdLeader(
                self._store, self._keys, self._rules, self._own, leader, return_grace, self._say
            )
        if self.leading is None:
            self.leading = self._tasks.create_task(self._leadership.lead())

    def _resign(self) -> None:
        if self.leading is not None:
            self.leading.cancel()
            self.leading = None

    async def _stand_soon(self) -> None:
        seat, order = self._orders.assignment.ranks, self._orders.assignment.cluster
        # Of a parameter-server job a node knows how many processes there are, but not on how many nodes.
        most = seat.nodes if seat else len(order.servers) + len(order.workers) if order else 0
        await asyncio.sleep(self._rng() * most / PER_SECOND)
        outcome = await self._store.commit(self.stand(self._own, self._lease))
        if (elected := outcome.found.get(self._keys.leader)) is not None:
            # The watch reports it too, unless etcd has lost its data and with them its revision count.
            self._standing = None
            self.mind(elected, self._rules.lost_after)

    async def _remove(self, leader: KeyValue) -> None:
        """Take away a leader's key that is under no lease, so that somebody is elected: nobody who lives stands behind
        it, for it was put by hand or copied from another etcd."""
        await self._store.commit(Txn((ModRevisionIs(leader.key, leader.changed),), (Delete(Range(leader.key)),)))
