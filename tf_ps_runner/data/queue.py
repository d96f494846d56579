"""The queues from which the processes of a job take their parts of the input, and their state beside a checkpoint.

Each part is handed out to one process at a time. When a process dies, the rest of what it holds goes back and is handed
out before anything else. So nothing is lost, and of a part only what its holder had used without reporting it is used
twice. A state, taken before a checkpoint is written, is restored with the model: then what was used since is used
again. Pure; nothing waits in here.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Sequence
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

from tf_ps_runner.data.order import Part, Parts

STATE_VERSION = 1
"""Raised when an older program could not read a state."""

MAX_QUEUES = 16
"""Queues of one job."""

MAX_OPEN = 1400
"""Parts of all queues that may be open at a time, held by a task or given back unfinished. With more, takers wait. It
keeps a state within one line of 64 KiB, in which it is sent."""

MAX_SHARDS = 2**40
"""Parts of all epochs of a queue: more than any job hands out, and short to write."""

Holder = TypeVar("Holder", bound=Hashable)
QueueName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._:/-]{1,100}\Z")]
_Number = Annotated[int, Meta(ge=0, le=MAX_SHARDS)]


class StateError(ValueError):
    """A state that cannot be restored; the text is a clause."""


class QueueError(Exception):
    """A request that cannot be carried out; the text is a sentence for the user. `lost` means that the part belongs to
    another task by now, or to none."""

    def __init__(self, sentence: str, lost: bool = False) -> None:
        super().__init__(sentence)
        self.lost = lost


class QueueSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a queue hands out: the offsets from 0 to before `size`, in parts of `shard`, `epochs` times over. With
    `shuffle` the parts of each epoch come in an order of its own, which `seed` decides."""

    size: Annotated[int, Meta(ge=1, le=2**50)]
    shard: Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
    epochs: Annotated[int, Meta(ge=1, le=MAX_SHARDS)] = 1
    seed: Annotated[int, Meta(ge=-(2**53), le=2**53)] = 0
    shuffle: bool = False

    @property
    def total(self) -> int:
        """Parts of all epochs."""
        return -(-self.size // self.shard) * self.epochs

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
    """The progress of a queue. All parts before the number `next` have been used, except those in `open`: the number of
    each, and how many of its offsets have been used."""

    spec: QueueSpec
    next: _Number
    open: Annotated[tuple[tuple[_Number, _Number], ...], Meta(max_length=MAX_OPEN)] = ()

    def problem(self) -> str | None:
        """A clause if no queue was ever in this state, else None."""
        numbers = [number for number, _ in self.open]
        if self.next > self.spec.total:
            return "more parts were handed out than there are"
        if len(set(numbers)) != len(numbers) or any(number >= self.next for number in numbers):
            return "a part is open that was never handed out, or is so twice"
        return None


class SavedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The progress of all queues of a job, as stored beside a checkpoint: a few numbers, however large the input is.

    Later versions of this program read it, and a user may have changed it, so it is checked.
    """

    version: int
    queues: Annotated[dict[QueueName, QueueState], Meta(max_length=MAX_QUEUES)]

    def check(self) -> None:
        """Raises StateError if no queues were ever like this."""
        if self.version != STATE_VERSION:
            raise StateError(f"it has version {self.version}, and this program reads version {STATE_VERSION}")
        if sum(len(queue.open) for queue in self.queues.values()) > MAX_OPEN:
            raise StateError(f"more than {MAX_OPEN} parts are open in it")
        for name, queue in self.queues.items():
            if (clause := queue.spec.problem() or queue.problem()) is not None:
                raise StateError(f"queue {name}: {clause}")


class ShardQueue(Generic[Holder]):
    """One queue. No part of an epoch is handed out before all parts of the epoch before, except those that go back.

    Raises StateError for a `state` that passed its check but that no such queue was ever in.
    """

    def __init__(self, spec: QueueSpec, state: QueueState | None = None) -> None:
        self.spec = spec
        self._next = state.next if state else 0
        self._parts = Parts(spec.size, spec.shard, spec.seed, spec.shuffle)
        # How many offsets of each open part have been used, and which task holds it. Those that no task holds are also
        # in a heap, by which the lowest number is handed out first.
        self._used: dict[int, int] = dict(state.open) if state else {}
        self._holders: dict[int, Holder] = {}
        self._returned = sorted(self._used)
        for number, used in self._used.items():
            part = self._parts.part(number)
            if part.begin + used >= part.end:
                raise StateError(f"a part of {part.end - part.begin} is open of which {used} have been used")

    @property
    def open(self) -> int:
        """Parts that were handed out and are not used up."""
        return len(self._used)

    @property
    def has_returned_parts(self) -> bool:
        """Whether a part can be taken that a task held before."""
        return bool(self._returned)

    @property
    def all_given(self) -> bool:
        """Whether nothing is left to take; what is held may still come back."""
        return not self._returned and self._next == self.spec.total

    @property
    def holders(self) -> set[Holder]:
        """The tasks that hold a part."""
        return set(self._holders.values())

    def take(self, holder: Holder) -> Part | None:
        """Hand out the next part; None when all are given."""
        if self.all_given:
            return None
        if self._returned:
            number = heapq.heappop(self._returned)
        else:
            number = self._next
            self._next += 1
        self._holders[number] = holder
        used = self._used.setdefault(number, 0)
        part = self._parts.part(number)
        return part._replace(begin=part.begin + used)

    def use(self, holder: Holder, number: int, offset: int) -> None:
        """All of a part before `offset` has been used. Raises QueueError."""
        if self._holders.get(number) != holder:
            raise QueueError(f"part {number} is not held, or no longer held, by the task that reports its use", True)
        part = self._parts.part(number)
        used = part.begin + self._used[number]
        if not used <= offset <= part.end:
            raise QueueError(f"part {number} was used up to {used} of {part.end}, and cannot be to {offset}")
        self._used[number] = offset - part.begin
        if offset == part.end:
            del self._used[number], self._holders[number]

    def give_back(self, holder: Holder) -> None:
        """A task is gone: what it holds can be taken by others."""
        for number in [number for number, each in self._holders.items() if each == holder]:
            del self._holders[number]
            heapq.heappush(self._returned, number)

    def state(self) -> QueueState:
        return QueueState(self.spec, self._next, tuple(sorted(self._used.items())))


class ShardQueues(Generic[Holder]):
    """All queues of a job, by their names."""

    def __init__(self) -> None:
        self._queues: dict[str, ShardQueue[Holder]] = {}

    def named(self, name: str) -> ShardQueue[Holder] | None:
        """The queue of that name; None if no task has created it."""
        return self._queues.get(name)

    def open(self, name: str, spec: QueueSpec) -> ShardQueue[Holder]:
        """The queue of that name, created with this spec if it does not exist. Raises QueueError."""
        queue = self._queues.get(name)
        if queue is None:
            problem = spec.problem()
            if problem is None and len(self._queues) >= MAX_QUEUES:
                problem = f"a job has {MAX_QUEUES} queues at most"
            if problem is not None:
                raise QueueError(f"no queue {name} can be made: {problem}")
            queue = self._queues[name] = ShardQueue(spec)
        elif queue.spec != spec:
            raise QueueError(
                f"queue {name} exists already and hands out {queue.spec}, not {spec}; all processes, and the "
                "checkpoint that the job continues from, must agree, so give another input another name"
            )
        return queue

    def take(self, holder: Holder, name: str, spec: QueueSpec) -> Part | None:
        """Hand out the next part of a queue; None if all are given, or if too many are open. Raises QueueError."""
        queue = self.open(name, spec)
        if not queue.has_returned_parts and sum(each.open for each in self._queues.values()) >= MAX_OPEN:
            return None
        return queue.take(holder)

    def use(self, holder: Holder, name: str, number: int, offset: int) -> None:
        """All of a part before `offset` has been used. Raises QueueError."""
        queue = self._queues.get(name)
        if queue is None:
            raise QueueError(f"there is no queue {name}, or none any more", lost=True)
        queue.use(holder, number, offset)

    def give_back(self, holder: Holder) -> None:
        """A task is gone: what it holds, of any queue, can be taken by others."""
        for queue in self._queues.values():
            queue.give_back(holder)

    def snapshot(self) -> SavedState:
        return SavedState(STATE_VERSION, {name: queue.state() for name, queue in sorted(self._queues.items())})

    def roll_back(self, state: SavedState | None) -> None:
        """Go back to a state, None for the very beginning: no task holds anything any more. Raises StateError, and
        nothing has changed then."""
        if state is not None:
            state.check()
        saved = state.queues if state is not None else {}
        self._queues = {name: ShardQueue(queue.spec, queue) for name, queue in saved.items()}


def finished_waiters(holders: Collection[Holder], waiting: Sequence[Holder], preferred: Holder | None) -> set[Holder]:
    """Which of the tasks in `waiting` get the answer that all is over, once all parts are handed out. Pure.

    `holders` hold the parts that are open. A waiting task takes over what a dying process held, so that the last parts
    are not lost. But no task may wait for one that waits itself: a process may need a part of the next queue before it
    can finish the last one. So: all of them, if no part is open. None, while a task that does not wait holds a part.
    Else all but one, which stays for parts that may come back: `preferred` if possible, unless no other task holds a
    part.
    """
    if not holders:
        return set(waiting)
    if not set(holders) <= set(waiting):
        return set()
    others = [one for one in waiting if any(holder != one for holder in holders)]
    stays = preferred if preferred in others else next(iter(others), None)
    return {one for one in waiting if one != stays}
