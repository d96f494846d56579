"""The key-value store with leases that a job can use for its records: five operations, with etcd's meanings.

Keys are text, values are bytes. A *revision* is the store's count of changes, the same on all its members. To add a
store: write a class with these operations, and its row in `rendezvous/backends.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class StoreUnavailable(Exception):
    """No member answers now; the message is the reason, a clause. The same request may succeed a moment later."""


class StoreMisconfigured(Exception):
    """The user's settings cannot work: a wrong password, certificate or permission. The message is a sentence for the
    user."""


class RequestRejected(StoreMisconfigured):
    """The store is configured so that it rejects requests like this one, now and later."""


class LeaseExpired(Exception):
    """The lease has expired, and with it all keys that were attached to it."""


class Compacted(Exception):
    """The revision at which a watch should start has been compacted; the current values must be read again."""


class KeyValue(NamedTuple):
    """A key as it is at one revision. `created` and `changed` are the revisions of its first and its last put; `lease`
    is 0 for none."""

    key: str
    value: bytes
    created: int
    changed: int
    lease: int


class Range(NamedTuple):
    """One key, or with `prefix` all keys that start with it."""

    key: str
    prefix: bool = False

    def has(self, key: str) -> bool:
        return key.startswith(self.key) if self.prefix else key == self.key


class Absent(NamedTuple):
    """The condition that no key of the range exists."""

    range: Range


class CreateRevisionIs(NamedTuple):
    """The condition that a key exists and was created at that revision. It fences a writer: a key that was deleted and
    created again has another revision."""

    key: str
    revision: int


class LeaseIs(NamedTuple):
    """The condition that a key exists and is attached to that lease."""

    key: str
    lease: int


class ModRevisionIs(NamedTuple):
    """The condition that a key exists and was last put at that revision."""

    key: str
    revision: int


class Get(NamedTuple):
    """Read a range."""

    range: Range


class Put(NamedTuple):
    """Write a key, attached to a lease unless that is 0."""

    key: str
    value: bytes
    lease: int = 0


class Delete(NamedTuple):
    """Delete a range."""

    range: Range


@dataclass(frozen=True)
class Txn:
    """A transaction: `then` is applied in order if all conditions hold, else `otherwise`; both see their own writes."""

    conditions: tuple[Absent | CreateRevisionIs | ModRevisionIs | LeaseIs, ...] = ()
    then: tuple[Get | Put | Delete | Txn, ...] = ()
    otherwise: tuple[Get | Put | Delete | Txn, ...] = ()


class TxnResult(NamedTuple):
    """The result of a transaction. `found` has all that its `Get`s read, including those of nested transactions."""

    succeeded: bool
    revision: int
    found: Mapping[str, KeyValue]


class Change(NamedTuple):
    """A key was put, or with `now` None deleted (also by the end of its lease)."""

    key: str
    now: KeyValue | None


class Watch(Protocol):
    """A watch on some ranges that has begun."""

    def after(self, revision: int) -> AsyncIterator[Sequence[Change]]:
        """The changes after that revision, in the order of their revisions in each range, for ever.

        It continues by itself on another member where it stopped. Raises StoreUnavailable, StoreMisconfigured, and
        Compacted if missed changes are no longer kept.
        """


class KeyValueStore(Protocol):
    """The operations. All raise StoreUnavailable and StoreMisconfigured; none waits for ever."""

    async def grant(self, seconds: int) -> int:
        """A new lease, which expires unless it is renewed within that many seconds."""

    async def renew(self, lease: int) -> bool:
        """Restart a lease's time to live; False if it has expired."""

    async def revoke(self, lease: int) -> None:
        """End a lease and delete all keys attached to it. An expired lease is no error."""

    async def commit(self, txn: Txn) -> TxnResult:
        """Apply a transaction: all of it or nothing. Raises LeaseExpired if the lease of a `Put` has expired.

        It may be applied twice if a member dies before it has answered, so it must be idempotent.
        """

    def watch(self, ranges: Sequence[Range]) -> AbstractAsyncContextManager[Watch]:
        """Watch these ranges from now on. The caller then reads the current values: no change after the revision of
        that read is missed.

        Reading first would be slower: etcd sets aside a watch that begins in the past, and serves those only every 100
        ms.
        """

    async def close(self) -> None: ...
