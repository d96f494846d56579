"""The election of the agent that decides for a job in a key-value store: the agent that has created the leader's
key leads as long as its lease lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from dlrover_run.coordination.driver import ERROR_RETRY
from dlrover_run.coordination.records.plan import OVER
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.rendezvous.client import AssignmentTracker
from dlrover_run.rendezvous.kv.leader import StoreLeader
from dlrover_run.rendezvous.kv.records import Keys
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
    StoreMisconfigured,
    StoreUnavailable,
    Txn,
)
from dlrover_run.words.log_level import internal_error, log_frames

PER_SECOND = 500
"""Nodes that campaign in a second after the leader has gone: all of them detect that at the same time."""


@dataclass(eq=False, repr=False)
class Election:
    """The part of one node in the election. `rng` returns a random number from 0 to 1; `log` prints one line to the
    console.

    A leader keeps its state when the connection to etcd is lost: `begin` is called after each connection, with a group
    for the tasks and the lease that this node has now.
    """

    store: KeyValueStore
    keys: Keys
    rules: JobRules
    assignments: AssignmentTracker
    rng: Callable[[], float]
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._retired = False
        self._leader: StoreLeader | None = None
        self._campaigning: asyncio.Task[None] | None = None
        self.leading: asyncio.Task[None] | None = None

    def begin(self, tasks: asyncio.TaskGroup, own: NodeKey, lease: int) -> None:
        self._tasks = tasks
        self._own = own
        self._lease = lease
        self._campaigning = self.leading = None

    def retire(self) -> None:
        """Do not campaign any more: this node leaves, and the leader's key would be deleted with its lease."""
        self._retired = True

    def candidacy(self, own: NodeKey, lease: int) -> Txn:
        """The transaction that creates the leader's key if there is none, and reads it."""
        leader = Range(self.keys.leader)
        free = (Absent(leader), Absent(Range(self.keys.over)))
        return Txn(free, (Put(leader.key, own.node_id.encode(), lease), Get(leader)), (Get(leader),))

    def on_leader_change(self, leader: KeyValue | None, return_grace: float) -> None:
        """Take the leader's key as it is now, None if there is no leader. `return_grace` is for the members of a plan
        that this agent takes over: an agent that has watched all the time knows that the others could have renewed
        their leases too."""
        if self._campaigning is not None:
            self._campaigning.cancel()
            self._campaigning = None
        if leader is None or leader.lease != self._lease:
            self._resign()
        if leader is None:
            if self.assignments.assignment.phase not in OVER and not self._retired:
                self._campaigning = self._tasks.create_task(self._campaign())
        elif not leader.lease:
            self._tasks.create_task(self._remove(leader))
        elif leader.lease == self._lease:
            self._lead(leader, return_grace)

    def _lead(self, leader: KeyValue, return_grace: float) -> None:
        if self._leader is None or self._leader.leader != leader:
            self._resign()
            self._leader = StoreLeader(self.store, self.keys, self.rules, self._own, leader, return_grace, self.log)
        if self.leading is None:
            self.leading = self._tasks.create_task(self._keep_leading(self._leader))

    async def _keep_leading(self, leader: StoreLeader) -> None:
        """Lead, also after an internal error: it must not end this node, nor, by the next election, all others. Raises
        the errors of etcd, after which the node connects again."""
        while True:
            try:
                return await leader.lead()
            except (StoreUnavailable, StoreMisconfigured, LeaseExpired, Compacted):
                raise
            except Exception as error:
                # The line is the same at each attempt, and is logged once.
                self.log(f"warning: {internal_error(error, ' of the leader')}")
                log_frames(self.log, error)
                await asyncio.sleep(ERROR_RETRY)

    def _resign(self) -> None:
        if self.leading is not None:
            self.leading.cancel()
            self.leading = None

    async def _campaign(self) -> None:
        assignment = self.assignments.assignment
        # Without ranks a node may know the number of processes, but not of nodes.
        processes = max((part.job_processes for part in assignment.parts), default=0)
        nodes = assignment.ranks.nodes if assignment.ranks else processes
        await asyncio.sleep(self.rng() * nodes / PER_SECOND)
        outcome = await self.store.commit(self.candidacy(self._own, self._lease))
        if (elected := outcome.found.get(self.keys.leader)) is not None:
            # The watch reports it too, unless etcd has lost its data and with it its revision count.
            self._campaigning = None
            self.on_leader_change(elected, self.rules.lost_after)

    async def _remove(self, leader: KeyValue) -> None:
        """Delete a leader's key without a lease, so that an agent can be elected. No agent owns it: it was put by hand
        or copied from another etcd."""
        await self.store.commit(Txn((ModRevisionIs(leader.key, leader.changed),), (Delete(Range(leader.key)),)))
