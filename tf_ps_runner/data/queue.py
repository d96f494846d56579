"""The queues from which the processes of a job take their parts of the input.

Each part is handed out to one process at a time. What a process holds goes back when it dies, from where it got to, and
is handed out before anything else. So nothing is lost, and of a part only what its holder had used without reporting it
is used twice. A state of the queues, taken before a checkpoint is written, is restored with the model: then what was
used since is used again. Pure; nothing waits in here.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tf_ps_runner.data.order import Shuffle
from tf_ps_runner.data.state import (
    MAX_OPEN,
    MAX_QUEUES,
    STATE_VERSION,
    QueueSpec,
    QueueState,
    SavedState,
    StateError,
    part_range,
)

Holder = TypeVar("Holder", bound=Hashable)


class QueueError(Exception):
    """A request that cannot be carried out; the text is a sentence for the user. `lost` means that the part belongs to
    another task by now, or to none."""

    def __init__(self, sentence: str, lost: bool = False) -> None:
        super().__init__(sentence)
        self.lost = lost


@dataclass(frozen=True)
class Part:
    """The offsets from `begin` to before `end`, in epoch `epoch`. `number` identifies it in its queue."""

    number: int
    begin: int
    end: int
    epoch: int


@dataclass
class _Held(Generic[Holder]):
    holder: Holder
    used: int


class ShardQueue(Generic[Holder]):
    """One queue. Parts are numbered in the order in which they are handed out, through all epochs; no part of an epoch
    is handed out before all of the epoch before have been, except those that come back later.

    Raises StateError for a `state` that no such queue was ever in, once it has been checked by itself.
    """

    def __init__(self, spec: QueueSpec, state: QueueState | None = None) -> None:
        self.spec = spec
        self._next = state.next if state else 0
        self._held: dict[int, _Held[Holder]] = {}
        # Numbers that were given back, the lowest first, and how many offsets of each have been used.
        self._back: list[int] = []
        self._used: dict[int, int] = {}
        self._shuffle = Shuffle(spec.parts, spec.seed, 0)
        self._shuffled_epoch = 0
        for number, used in state.open if state else ():
            _, begin, end = self._place(number)
            if begin + used >= end:
                raise StateError(f"a part of {end - begin} is open of which {used} have been used")
            self._put_back(number, used)

    @property
    def open(self) -> int:
        """Parts that were handed out and are not used up."""
        return len(self._held) + len(self._back)

    @property
    def has_returned_parts(self) -> bool:
        """Whether a part can be taken that a task held before."""
        return bool(self._back)

    @property
    def all_given(self) -> bool:
        """Whether nothing is left to take; what is held may still come back."""
        return not self._back and self._next == self.spec.total

    @property
    def over(self) -> bool:
        """Whether all parts of all epochs have been used."""
        return self.all_given and not self._held

    @property
    def holders(self) -> set[Holder]:
        """The tasks that hold a part."""
        return {held.holder for held in self._held.values()}

    def take(self, holder: Holder) -> Part | None:
        """Hand out the next part; None when all are given."""
        if self.all_given:
            return None
        if self._back:
            number = heapq.heappop(self._back)
        else:
            number = self._next
            self._next += 1
        used = self._used.pop(number, 0)
        self._held[number] = _Held(holder, used)
        epoch, begin, end = self._place(number)
        return Part(number, begin + used, end, epoch)

    def use(self, holder: Holder, number: int, offset: int) -> None:
        """All of a part before `offset` has been used. Raises QueueError."""
        held = self._held.get(number)
        if held is None or held.holder != holder:
            raise QueueError(f"part {number} is not held by whoever says to have used it, or not any more", lost=True)
        _, begin, end = self._place(number)
        if not begin + held.used <= offset <= end:
            raise QueueError(f"part {number} was used up to {begin + held.used} of {end}, and cannot be to {offset}")
        held.used = offset - begin
        if offset == end:
            del self._held[number]

    def give_back(self, holder: Holder) -> None:
        """A task is gone: what it holds can be taken by others."""
        numbers = [number for number, held in self._held.items() if held.holder == holder]
        for number in numbers:
            self._put_back(number, self._held.pop(number).used)

    def state(self) -> QueueState:
        """The progress of this queue."""
        used = {**self._used, **{number: held.used for number, held in self._held.items()}}
        unfinished = sorted({*self._back, *self._held})
        return QueueState(self.spec, self._next, tuple((number, used.get(number, 0)) for number in unfinished))

    def _put_back(self, number: int, used: int) -> None:
        heapq.heappush(self._back, number)
        if used:
            self._used[number] = used

    def _place(self, number: int) -> tuple[int, int, int]:
        """The epoch of a part, its first offset and the one after its last."""
        epoch, place = divmod(number, self.spec.parts)
        if self.spec.shuffle:
            if epoch != self._shuffled_epoch:
                self._shuffle, self._shuffled_epoch = Shuffle(self.spec.parts, self.spec.seed, epoch), epoch
            place = self._shuffle.at(place)
        return epoch, *part_range(self.spec, place)


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
                f"queue {name} is there already and hands out {queue.spec}, not {spec}; all processes, and the "
                "checkpoint that the job goes on from, must mean the same, so give another input another name"
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
        """The progress of all queues."""
        return SavedState(STATE_VERSION, {name: queue.state() for name, queue in sorted(self._queues.items())})

    def roll_back(self, state: SavedState | None) -> None:
        """Go back to a state, None for the very beginning: no task holds anything any more. Raises StateError, and
        nothing has changed then."""
        if state is not None:
            state.check()
        known = state.queues if state is not None else {}
        self._queues = {name: ShardQueue(queue.spec, queue) for name, queue in known.items()}


def finished_waiters(holders: Collection[Holder], waiting: Sequence[Holder], keeper: Holder | None) -> set[Holder]:
    """Which of the tasks in `waiting` get the answer that all is over, once all parts are handed out. Pure.

    `holders` hold the parts that are open. A task that waits takes over what a dying process held, so that nothing of
    the tail is left over. But no task may wait for one that waits itself: a process may need a part of the next queue
    before it can finish the last one. So: all of them, if no part is open. None, while a task that does not wait holds
    a part. Else all but one, which stays for parts that may come back: `keeper` if possible, unless no other task holds
    a part.
    """
    if not holders:
        return set(waiting)
    if not set(holders) <= set(waiting):
        return set()
    others = [one for one in waiting if any(holder != one for holder in holders)]
    stays = keeper if keeper in others else next(iter(others), None)
    return {one for one in waiting if one != stays}
