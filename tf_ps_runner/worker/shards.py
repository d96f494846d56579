"""The parts of the input that this process takes, and how far it reports them as used.

A part is cut into batches. A batch is *used* when the script asks for the next one, or, if it was handed to a
coordinator's `schedule`, once its result is there. Only what is used without a gap before it is reported, so that after
a death the next process begins with the first batch that may not have been used.

Runs in the script's interpreter: standard library only, Python 3.9 and later; TensorFlow for `make_dataset`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from tf_ps_runner.data.order import Shuffle


def make_dataset(queue: Queue, load: Callable[[int, int], Any], signature: Any, length: int, prefetch: int) -> Any:
    """A dataset of what `load(begin, end)` returns, in batches of `length` offsets at most."""
    import tensorflow as tf

    if length < 1:
        raise ValueError(f"a batch has a length from 1, not {length!r}")
    if prefetch < 0:
        raise ValueError(f"as many batches as are loaded ahead are at least 0, not {prefetch!r}")
    outgoing = Outgoing()

    def produce() -> Iterator[tuple[int, Any]]:
        reader = Reader(queue, length)
        while (batch := reader.next()) is not None:
            values = load(batch.begin, batch.end)
            yield outgoing.number(batch), values
            if reader.at_end_of_part:
                yield 0, values

    def see(number: Any, *values: Any) -> Any:
        seen = tf.numpy_function(outgoing.see, [number], tf.int64)
        return tf.ensure_shape(seen, []), *values

    counted = (tf.TensorSpec((), tf.int64), signature)
    ahead = tf.data.Dataset.from_generator(produce, output_signature=counted)
    if prefetch:
        ahead = ahead.prefetch(prefetch)
    options = tf.data.Options()
    # TensorFlow would load ahead behind that, too, where nobody could see what was used.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    seen = ahead.map(see).filter(lambda number, *values: number > 0).map(lambda number, values: values)
    return seen.with_options(options)


class Outgoing:
    """The batches on their way from where they are loaded to where they are asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._ahead: dict[int, Batch] = {}
        self._current: Batch | None = None

    def number(self, batch: Batch) -> int:
        """The number, from 1, under which a batch goes."""
        with self._lock:
            self._count += 1
            self._ahead[self._count] = batch
            return self._count

    def see(self, number: Any) -> Any:
        """A batch goes out, or 0 for none; the one before it was used. Returns the number."""
        with self._lock:
            before, self._current = self._current, self._ahead.pop(int(number), None)
            current = self._current
        if before is not None:
            take_back(before)
            before.used()
        if current is not None:
            hand_out(current)
        return number


class Requests(Protocol):
    """Where requests for data go."""

    def request(self, what: str, **fields: Any) -> Mapping[str, Any]:
        """The answer to a request; any thread may call this, and others are answered while one waits."""


class ShardSpec(NamedTuple):
    """What a queue hands out: the offsets from 0 to before `size`, in parts of `shard`, `epochs` times over. With
    `shuffle` the parts of each epoch come in an order of its own, which `seed` decides."""

    size: int
    shard: int
    epochs: int = 1
    seed: int = 0
    shuffle: bool = False

    @property
    def parts(self) -> int:
        """Parts of one epoch."""
        return -(-self.size // self.shard)

    def problem(self) -> str | None:
        """A sentence when no queue can be like this, else None."""
        for name in ("size", "shard", "epochs"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                return f"{'shard_size' if name == 'shard' else name} is a whole number from 1, not {value!r}"
        return None


class TakenPart(NamedTuple):
    """The offsets from `begin` to before `end`, in epoch `epoch`; `number` identifies it in its queue."""

    number: int
    begin: int
    end: int
    epoch: int


class Queue(Protocol):
    """Where parts come from."""

    def take(self) -> TakenPart | None:
        """The next part; None when all epochs have been used. Waits while other tasks may still give parts back."""

    def use(self, number: int, offset: int) -> bool:
        """Report that all of a part before `offset` was used; False if the part is not this process's any more."""


class AgentQueue:
    """A queue of the job."""

    def __init__(self, agent: Requests, name: str, spec: ShardSpec) -> None:
        self._agent = agent
        self._name = name
        self._spec = spec

    def take(self) -> TakenPart | None:
        """The next part. Raises RuntimeError with the agent's sentence if there is no such queue."""
        answer = self._agent.request("take", queue=self._name, spec=self._spec._asdict())
        if answer.get("over"):
            return None
        if "shard" not in answer:
            raise RuntimeError(f"DataShards {self._name}: {_refusal(answer)}")
        return TakenPart(answer["shard"], answer["begin"], answer["end"], answer["epoch"])

    def use(self, number: int, offset: int) -> bool:
        """False if the part was given to another task, as after a rollback."""
        try:
            answer = self._agent.request("used", queue=self._name, shard=number, next=offset)
        except ConnectionError:
            # The agent is gone, and has this process killed.
            return True
        return not answer.get("lost")


class OwnQueue:
    """The same parts in the same order, for a process that trains without tf-ps-run."""

    def __init__(self, spec: ShardSpec) -> None:
        self._spec = spec
        self._parts = self._all()

    def take(self) -> TakenPart | None:
        """The next part; no other process takes any."""
        return next(self._parts, None)

    def use(self, number: int, offset: int) -> bool:
        """Does nothing."""
        return True

    def _all(self) -> Iterator[TakenPart]:
        spec = self._spec
        for epoch in range(spec.epochs):
            shuffle = Shuffle(spec.parts, spec.seed, epoch) if spec.shuffle else None
            for place in range(spec.parts):
                begin = (shuffle.at(place) if shuffle else place) * spec.shard
                yield TakenPart(epoch * spec.parts + place, begin, min(begin + spec.shard, spec.size), epoch)


class OpenPart:
    """A part that this process holds: which batches of it are in use, and how far it was used."""

    def __init__(self, part: TakenPart) -> None:
        self.part = part
        self._cut = part.begin
        self._told = part.begin
        self._away: set[int] = set()

    def cut(self, length: int | None) -> tuple[int, int] | None:
        """The next offsets of it, `length` at most; None at its end."""
        begin = self._cut
        if self.exhausted:
            return None
        self._cut = self.part.end if length is None else min(begin + length, self.part.end)
        self._away.add(begin)
        return begin, self._cut

    @property
    def exhausted(self) -> bool:
        """Whether all of it was cut off."""
        return self._cut == self.part.end

    def finish(self, begin: int) -> int | None:
        """The batch that begins there was used: the offset to report, None while an earlier batch is still in use."""
        self._away.discard(begin)
        offset = min(self._away, default=self._cut)
        if offset == self._told:
            return None
        self._told = offset
        return offset


class Batch:
    """Some offsets of a part, in use by this process. It counts as used once, however often that is said."""

    def __init__(self, reader: Reader, open_part: OpenPart, begin: int, end: int) -> None:
        self.begin = begin
        self.end = end
        self.one_step = reader.length is not None
        self._reader = reader
        self._open_part = open_part
        self._used = False

    def used(self) -> None:
        """Its result is in the model."""
        if not self._used:
            self._used = True
            self._reader.finish(self._open_part, self.begin)


class Reader:
    """Takes parts from a queue and cuts them into batches; one for each place of the script that asks for some.

    Any thread may report what is used, while another one waits for the next part.
    """

    def __init__(self, queue: Queue, length: int | None) -> None:
        self.length = length
        self._queue = queue
        self._current: OpenPart | None = None
        self._lock = threading.Lock()

    def next(self) -> Batch | None:
        """The next batch; None when all was used."""
        while True:
            with self._lock:
                open_part = self._current
                cut = open_part.cut(self.length) if open_part is not None else None
            if open_part is not None and cut is not None:
                return Batch(self, open_part, *cut)
            _taking.add(threading.get_ident())
            try:
                for prepare in _before_take:
                    prepare()
                part = self._queue.take()
            finally:
                _taking.discard(threading.get_ident())
            if part is None:
                return None
            self._current = OpenPart(part)

    @property
    def at_end_of_part(self) -> bool:
        """Whether the next batch will be of another part."""
        current = self._current
        return current is None or current.exhausted

    def finish(self, open_part: OpenPart, begin: int) -> None:
        """One batch was used."""
        # The lock is held while it is reported, or the offsets of two threads could arrive in the other order.
        with self._lock:
            offset = open_part.finish(begin)
            if offset is not None and not self._queue.use(open_part.part.number, offset) and self._current is open_part:
                # It belongs to another task by now, so the rest of it is not for this process.
                self._current = None


_before_take: list[Callable[[], None]] = []


def before_take(prepare: Callable[[], None]) -> None:
    """Have `prepare()` called each time before a part is taken."""
    _before_take.append(prepare)


_taking: set[int] = set()
"""The threads that wait for a part."""


def is_taking() -> bool:
    """Whether a thread waits for a part, or does what has to be done before."""
    return bool(_taking)


_out: dict[int, list[Batch]] = {}
"""The batches that each thread was given and has not asked beyond."""

_elsewhere: set[Batch] = set()
"""Batches that were given to an unknown thread."""

_stepped: set[Batch] = set()
"""Those of all with which a step was made."""


def batches(queue: Queue, length: int | None) -> Iterator[Batch]:
    """Each batch in turn. It is used when the next one is requested, unless it was claimed meanwhile."""
    reader = Reader(queue, length)
    while (batch := reader.next()) is not None:
        waiting = _out.setdefault(threading.get_ident(), [])
        waiting.append(batch)
        yield batch
        _stepped.discard(batch)
        # A claimed list does not belong to this generator any more.
        if _out.get(threading.get_ident()) is waiting:
            waiting.remove(batch)
            batch.used()


def claim() -> list[Batch]:
    """The batches that this thread was given and has not asked beyond: the caller reports when they are used. That is
    `schedule`, which only begins their way."""
    return _out.pop(threading.get_ident(), [])


def hand_out(batch: Batch) -> None:
    """A batch goes to the thread that asks TensorFlow for it, whichever that is."""
    _elsewhere.add(batch)


def take_back(batch: Batch) -> None:
    """The thread that had the batch asks for the next one."""
    _elsewhere.discard(batch)
    _stepped.discard(batch)


def made_step(step: int) -> None:
    """A session of this thread has made a step, with the batch that the thread has."""
    _stepped.update(_out.get(threading.get_ident(), ()))
    _stepped.update(_elsewhere)


def before_leaving() -> None:
    """Report the batches with which a step was made: this process ends before it asks for the next ones. A whole part
    may take more than one step, and is only reported by the next request."""
    for batch in list(_stepped):
        if batch.one_step:
            batch.used()


def _refusal(answer: Mapping[str, Any]) -> str:
    return str(answer.get("error") or "the agent of this process has given no part")
