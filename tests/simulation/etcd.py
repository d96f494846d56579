"""An etcd cluster as its clients see it: one store with a single order of changes, in the time of the run.

Where the behaviour of etcd is not determined, the choice is random. A request that etcd refuses, and that the product
should never send, fails the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlrover_run.store.operations import (
    Absent,
    Change,
    Compacted,
    CreateRevisionIs,
    Delete,
    Get,
    KeyValue,
    LeaseExpired,
    LeaseIs,
    ModRevisionIs,
    Put,
    Range,
    StoreUnavailable,
    Txn,
    TxnResult,
)
from simulation.timeline import Process, Timeline, demand

EXPIRY_TICK = 0.5
"""Seconds between two checks of etcd for expired leases."""

LEAST_TTL = 2
"""The minimum TTL of a lease in etcd in seconds, with its default election timeout."""

MAX_OPERATIONS = 128
"""The default limit of etcd for the operations in one branch of a transaction, and for its conditions."""

Notify = Callable[[int, list[Change]], None]
"""Receives the changes of one revision, and that revision."""


@dataclass
class Lease:
    """`ends` is when it expires unless it is renewed; its keys are deleted a moment later. `owner` is the process to
    which it was granted."""

    seconds: int
    ends: float
    owner: Process
    keys: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Follower:
    """A watcher that receives each change in a range."""

    range: Range
    notify: Notify


class EtcdCluster:
    """The store. `on_change` is called after each change of keys with the process that made it (None: etcd itself),
    and with the former keys. If `away`, no member answers.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.away = False
        self.keys: dict[str, KeyValue] = {}
        self.leases: dict[int, Lease] = {}
        self.revision = 1
        self.compacted = 0
        self.on_change: Callable[[Process | None, dict[str, KeyValue]], None] = lambda owner, before: None
        self._history: list[tuple[int, list[Change]]] = []
        self._followers: list[Follower] = []

    def grant(self, seconds: int, owner: Process) -> int:
        lease = self.timeline.random.getrandbits(62)
        seconds = max(seconds, LEAST_TTL)
        self.leases[lease] = Lease(seconds, self.timeline.now + seconds, owner)
        self._expire_later(lease)
        return lease

    def renew(self, lease: int) -> bool:
        """Restart the TTL of a lease, unless it has expired (even if its keys still exist)."""
        known = self.leases.get(lease)
        if known is None or known.ends <= self.timeline.now:
            return False
        known.ends = self.timeline.now + known.seconds
        return True

    def revoke(self, lease: int) -> None:
        known = self.leases.pop(lease, None)
        if known is not None and known.keys:
            before = dict(self.keys)
            self._note([self._drop(key) for key in sorted(known.keys)])
            self.on_change(None, before)

    def commit(self, txn: Txn, owner: Process) -> TxnResult:
        """Carry out a transaction. Raises LeaseExpired."""
        _check(txn)
        self._check_leases(txn)
        before = dict(self.keys)
        changes: dict[str, Change] = {}
        found: dict[str, KeyValue] = {}
        succeeded = self._carry_out(txn, changes, found)
        if changes:
            self._note(list(changes.values()))
            self.on_change(owner, before)
        return TxnResult(succeeded, self.revision, found)

    def follow(self, range: Range, revision: int, notify: Notify) -> Follower:
        """Notify of the changes from that revision on, past changes at once. Raises Compacted."""
        if revision < self.compacted:
            raise Compacted
        for number, changes in self._history:
            if number >= revision:
                _notify(range, number, changes, notify)
        # Nothing is sent for a future revision before it exists.
        follower = Follower(range, lambda number, changes: notify(number, changes) if number >= revision else None)
        self._followers.append(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        if follower in self._followers:
            self._followers.remove(follower)

    def compact(self) -> None:
        """Discard the changes up to a revision that is at most the current one."""
        self.compacted = self.timeline.random.randint(self.compacted, self.revision)
        self._history = [entry for entry in self._history if entry[0] >= self.compacted]
        self.note(f"is compacted at {self.compacted}")

    def change_leader(self) -> None:
        """Elect another leader, which restarts the TTL of each lease."""
        self.note("has another leader")
        for lease in self.leases.values():
            lease.ends = self.timeline.now + lease.seconds

    def lose_everything(self) -> None:
        """Replace the cluster by an empty one: revisions start from the beginning, and no client is notified."""
        self.note("has lost its data")
        before = dict(self.keys)
        self.keys.clear()
        self.leases.clear()
        self._history.clear()
        self._followers.clear()
        self.revision = 1
        self.compacted = 0
        self.on_change(None, before)

    def come_back(self) -> None:
        """Let the members answer again, with all their data, and with another leader."""
        self.note("is back")
        self.away = False
        self.change_leader()

    def note(self, what: str) -> None:
        self.timeline.note("etcd", what)

    def _carry_out(self, txn: Txn, changes: dict[str, Change], found: dict[str, KeyValue]) -> bool:
        holds = all(self._holds(condition) for condition in txn.conditions)
        for operation in txn.then if holds else txn.otherwise:
            if isinstance(operation, Get):
                found.update({key: self.keys[key] for key in self._in(operation.range)})
            elif isinstance(operation, Put):
                changes[operation.key] = self._put(operation)
            elif isinstance(operation, Delete):
                changes.update({key: self._drop(key) for key in self._in(operation.range)})
            else:
                self._carry_out(operation, changes, found)
        return holds

    def _holds(self, condition: Absent | CreateRevisionIs | ModRevisionIs | LeaseIs) -> bool:
        if isinstance(condition, Absent):
            return not self._in(condition.range)
        known = self.keys.get(condition.key)
        if known is None:
            return False
        if isinstance(condition, LeaseIs):
            return known.lease == condition.lease
        return (known.created if isinstance(condition, CreateRevisionIs) else known.changed) == condition.revision

    def _in(self, range: Range) -> list[str]:
        return sorted(key for key in self.keys if range.has(key))

    def _put(self, put: Put) -> Change:
        known = self.keys.get(put.key)
        if known is not None and known.lease:
            self.leases[known.lease].keys.discard(put.key)
        if put.lease:
            self.leases[put.lease].keys.add(put.key)
        number = self.revision + 1
        now = KeyValue(put.key, put.value, known.created if known else number, number, put.lease)
        self.keys[put.key] = now
        return Change(put.key, now)

    def _drop(self, key: str) -> Change:
        known = self.keys.pop(key)
        if known.lease in self.leases:
            self.leases[known.lease].keys.discard(key)
        return Change(key, None)

    def _note(self, changes: list[Change]) -> None:
        self.revision += 1
        self._history.append((self.revision, changes))
        for follower in list(self._followers):
            _notify(follower.range, self.revision, changes, follower.notify)

    def _check_leases(self, txn: Txn) -> None:
        for operation in txn.then if all(self._holds(condition) for condition in txn.conditions) else txn.otherwise:
            if isinstance(operation, Txn):
                self._check_leases(operation)
            elif isinstance(operation, Put) and operation.lease and operation.lease not in self.leases:
                raise LeaseExpired

    def _expire_later(self, lease: int) -> None:
        known = self.leases[lease]

        def look() -> None:
            # All data may have been lost since, so that this lease no longer exists.
            if self.leases.get(lease) is not known:
                return
            if known.ends > self.timeline.now or self.away:
                # Without a leader no lease expires, and the next leader restarts the TTL of all of them.
                self._expire_later(lease)
                return
            self.note(f"a lease of {known.owner.name} has run out")
            self.revoke(lease)

        late = self.timeline.random.uniform(0, EXPIRY_TICK)
        self.timeline.at(max(known.ends, self.timeline.now) + late, look)

    def answer(self, act: Callable[[], Any]) -> Any:
        """Return the result of a request that has arrived. Raises Away, and the errors of `act`."""
        if self.away:
            raise StoreUnavailable("no member has a leader")
        return act()


def _notify(range: Range, revision: int, changes: Sequence[Change], notify: Notify) -> None:
    own = [change for change in changes if range.has(change.key)]
    if own:
        notify(revision, own)


def _check(txn: Txn) -> None:
    """Fail the run for transactions that etcd refuses: too many operations, and keys that are written twice."""
    for branch in (txn.then, txn.otherwise):
        demand(max(len(branch), len(txn.conditions)) <= MAX_OPERATIONS, "etcd takes a transaction of that size")
        _written(branch)
        for operation in branch:
            if isinstance(operation, Txn):
                _check(operation)


def _written(branch: Iterable[Get | Put | Delete | Txn]) -> list[str]:
    """Return the keys that a branch puts, also in nested transactions: each once, and none that the branch deletes."""
    puts: list[str] = []
    for operation in branch:
        if isinstance(operation, Put):
            puts.append(operation.key)
        elif isinstance(operation, Txn):
            # Only one of the two branches is executed, so they may put the same key.
            puts += sorted({*_written(operation.then), *_written(operation.otherwise)})
    demand(len(set(puts)) == len(puts), "no transaction puts a key twice")
    deleted = [operation.range for operation in branch if isinstance(operation, Delete)]
    demand(not any(range.has(key) for range in deleted for key in puts), "no transaction puts a key that it deletes")
    return puts
