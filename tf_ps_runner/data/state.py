"""The records of a job's queues: what each of them hands out, and the state that is stored beside a checkpoint.

A state says how far each queue has come and which parts before that are still open: a few numbers, however large the
input is. It is read by later versions of this program, and a user may have changed it, so it is checked.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

STATE_VERSION = 1
"""Raised when an older program could not read a state."""

MAX_QUEUES = 16
"""Queues of one job."""

MAX_OPEN = 1400
"""Parts of all queues that may be open at a time, held by a task or given back unfinished. With more, takers wait. It
keeps a state within one line of 64 KiB, in which it travels."""

MAX_SHARDS = 2**40
"""Parts of all epochs of a queue: more than any job hands out, and short to write."""

QueueName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._:/-]{1,100}\Z")]
_Short = Annotated[int, Meta(ge=0, le=MAX_SHARDS)]


class StateError(ValueError):
    """A state that cannot be restored; the text is a clause."""


class QueueSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a queue hands out: the offsets from 0 to before `size`, in parts of `shard`, `epochs` times over. With
    `shuffle` the parts of each epoch come in an order of its own, which `seed` decides."""

    size: Annotated[int, Meta(ge=1, le=2**50)]
    shard: Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
    epochs: Annotated[int, Meta(ge=1, le=MAX_SHARDS)] = 1
    seed: Annotated[int, Meta(ge=-(2**53), le=2**53)] = 0
    shuffle: bool = False

    @property
    def parts(self) -> int:
        """Parts of one epoch."""
        return -(-self.size // self.shard)

    @property
    def total(self) -> int:
        """Parts of all epochs."""
        return self.parts * self.epochs

    def problem(self) -> str | None:
        """A clause if no queue can be like this, else None."""
        if self.total > MAX_SHARDS:
            return f"{self.size} in parts of {self.shard}, {self.epochs} times over, are too many parts"
        return None

    def __str__(self) -> str:
        order = f"shuffled by seed {self.seed}" if self.shuffle else "in order"
        times = f", {self.epochs} epochs" if self.epochs > 1 else ""
        return f"{self.size} in parts of {self.shard}{times}, {order}"


class QueueState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The progress of a queue. All parts before the place `next` have been used, except those in `open`: the place of
    each, and how many of its offsets have been used. Places are counted through all epochs."""

    spec: QueueSpec
    next: _Short
    open: Annotated[tuple[tuple[_Short, _Short], ...], Meta(max_length=MAX_OPEN)] = ()


class SavedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The progress of all queues of a job, as stored beside a checkpoint."""

    version: int
    queues: Annotated[dict[QueueName, QueueState], Meta(max_length=MAX_QUEUES)]

    def check(self) -> None:
        """Raises StateError if no queues were ever like this."""
        if self.version != STATE_VERSION:
            raise StateError(f"it has version {self.version}, and this program reads version {STATE_VERSION}")
        if sum(len(queue.open) for queue in self.queues.values()) > MAX_OPEN:
            raise StateError(f"more than {MAX_OPEN} parts are open in it")
        for name, queue in self.queues.items():
            clause = queue.spec.problem() or _contradiction(queue)
            if clause is not None:
                raise StateError(f"queue {name}: {clause}")


def part_range(spec: QueueSpec, index: int) -> tuple[int, int]:
    """The offsets of a part: the first, and the one after the last."""
    begin = index * spec.shard
    return begin, min(begin + spec.shard, spec.size)


def _contradiction(queue: QueueState) -> str | None:
    places = [place for place, _ in queue.open]
    if queue.next > queue.spec.total:
        return "more parts were handed out than there are"
    if len(set(places)) != len(places) or any(place >= queue.next for place in places):
        return "a part is open that was never handed out, or is so twice"
    return None
