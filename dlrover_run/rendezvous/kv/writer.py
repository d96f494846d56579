"""Writes of the leader: only while it is elected, in order, and only changed values.

The leader's key decides which agent may write, but not in which order requests are applied. A request may be applied
twice, if the member that received it dies before it answers, and a request that timed out may be applied after the next
one. So each write has the condition that the previous write was the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dlrover_run.rendezvous.kv.records import Keys
from dlrover_run.store.operations import (
    Absent,
    CreateRevisionIs,
    Get,
    KeyValue,
    KeyValueStore,
    LeaseIs,
    ModRevisionIs,
    Put,
    Range,
    Txn,
    TxnResult,
)

MAX_TXN_BYTES = 1_000_000
"""Bytes of values in one transaction; etcd refuses a request of more than 1.5 MB by default."""


class NotElected(Exception):
    """This agent is no longer elected."""


class StaleWriteApplied(Exception):
    """A write that timed out has been applied after all, so the current values must be read again."""


class FencedWriter:
    """The writes of one election. `leader` is the leader's key as it was created in that election.

    Its create revision distinguishes two elections, and its lease two nodes: an etcd that has lost its data may give
    the same revision again.
    """

    def __init__(self, store: KeyValueStore, keys: Keys, leader: KeyValue) -> None:
        self._store = store
        self._leader = Range(keys.leader)
        self._last_write = Range(keys.last_write)
        self._elected = (CreateRevisionIs(leader.key, leader.created), LeaseIs(leader.key, leader.lease))
        self._election = leader.created, leader.lease
        self._last: Absent | ModRevisionIs = Absent(self._last_write)
        self._count = 0
        self._written: dict[str, bytes] = {}
        self._lease = 0

    async def read(self, *ranges: Range) -> TxnResult:
        """Read these ranges; the next write follows this read. Raises NotElected."""
        outcome = await self._store.commit(Txn(self._elected, tuple(map(Get, (self._last_write, *ranges)))))
        if not outcome.succeeded:
            raise NotElected
        last_write = outcome.found.get(self._last_write.key)
        self._last = (
            Absent(self._last_write) if last_write is None else ModRevisionIs(last_write.key, last_write.changed)
        )
        # A write that timed out may have been applied, or not.
        self._written.clear()
        return outcome

    async def write(self, values: Mapping[str, bytes], lease: int) -> None:
        """Write these values in their order, attached to that lease. Raises NotElected and StaleWriteApplied."""
        if lease != self._lease:
            self._lease = lease
            self._written.clear()
        puts = [Put(key, value, lease) for key, value in values.items() if self._written.get(key) != value]
        for batch in _batches(puts):
            await self._commit(batch)
            self._written.update((put.key, put.value) for put in batch)

    async def _commit(self, batch: Sequence[Put]) -> None:
        self._count += 1
        number = f"{self._election[0]}.{self._election[1]:x}.{self._count}".encode()
        puts = (*batch, Put(self._last_write.key, number, self._lease))
        outcome = await self._store.commit(
            Txn((*self._elected, self._last), puts, (Get(self._leader), Get(self._last_write)))
        )
        revision = outcome.revision
        if not outcome.succeeded:
            leader, last_write = outcome.found.get(self._leader.key), outcome.found.get(self._last_write.key)
            if leader is None or (leader.created, leader.lease) != self._election:
                raise NotElected
            if last_write is None or last_write.value != number:
                raise StaleWriteApplied
            # The request was applied twice, and this is the second time.
            revision = last_write.changed
        self._last = ModRevisionIs(self._last_write.key, revision)


def _batches(puts: Sequence[Put]) -> Iterator[list[Put]]:
    """The same puts in the same order, in batches that fit into one transaction."""
    batch: list[Put] = []
    size = 0
    for put in puts:
        if batch and size + len(put.value) > MAX_TXN_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(put)
        size += len(put.value)
    if batch:
        yield batch
