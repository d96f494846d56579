"""The parts of the input that this process takes, and how far it reports them as used.

A part is cut into batches. A batch is *used* when the script requests the next one, or, if it was passed to a
coordinator's `schedule`, once its result is there. Only what is used without a gap before it is reported, so that after
a death the next process begins with the first batch that may not have been used.

Runs in the script's interpreter: standard library only, Python 3.9 and later; TensorFlow for `make_dataset`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from tf_ps_runner.data.order import Part, Parts


class ShardSpec(NamedTuple):
    """What a queue hands out: the offsets from 0 to before `size`, in parts of `shard`, `epochs` times over. With
    `shuffle` the parts of each epoch come in an order of its own, which `seed` decides."""

    size: int
    shard: int
    epochs: int = 1
    seed: int = 0
    shuffle: bool = False

    def problem(self) -> str | None:
        """A sentence if no queue can be like this, else None."""
        for name, value in (("size", self.size), ("shard_size", self.shard), ("epochs", self.epochs)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                return f"{name} must be a whole number from 1, not {value!r}"
        return None


class Requests(Protocol):
    """Sends requests for data."""

    def request(self, what: str, **fields: Any) -> Mapping[str, Any]:
        """The answer to a request. Any thread may call this, and others are answered while one waits."""


class Queue(Protocol):
    """Where parts come from."""

    def take(self) -> Part | None:
        """The next part; None when all epochs have been used. Waits while other tasks may still give parts back."""

    def use(self, number: int, offset: int) -> bool:
        """Report that all of a part before `offset` was used; False if the part does not belong to this process any
        more, as after a rollback."""


class AgentQueue:
    """A queue of the job. Raises RuntimeError with the agent's reason if there can be no such queue."""

    def __init__(self, agent: Requests, name: str, spec: ShardSpec) -> None:
        self._agent = agent
        self._name = name
        self._spec = spec

    def take(self) -> Part | None:
        answer = self._agent.request("take", queue=self._name, spec=self._spec._asdict())
        if answer.get("over"):
            return None
        if "shard" not in answer:
            raise RuntimeError(f"DataShards {self._name}: {answer.get('error') or 'the agent has sent no part'}")
        return Part(answer["shard"], answer["begin"], answer["end"], answer["epoch"])

    def use(self, number: int, offset: int) -> bool:
        try:
            return not self._agent.request("used", queue=self._name, shard=number, next=offset).get("lost")
        except ConnectionError:
            # The agent is gone, and has this process killed.
            return True


class OwnQueue:
    """The same parts in the same order, for a process that trains without tf-ps-run."""

    def __init__(self, spec: ShardSpec) -> None:
        parts = Parts(spec.size, spec.shard, spec.seed, spec.shuffle)
        self._parts = map(parts.part, range(parts.per_epoch * spec.epochs))

    def take(self) -> Part | None:
        return next(self._parts, None)

    def use(self, number: int, offset: int) -> bool:
        return True


class OpenPart:
    """A part that this process holds: which batches of it are in use, and how far it was used."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._cut = part.begin
        self._reported = part.begin
        self._in_use: set[int] = set()

    @property
    def exhausted(self) -> bool:
        """Whether all of it was cut off."""
        return self._cut == self.part.end

    def cut(self, length: int | None) -> tuple[int, int] | None:
        """The next offsets of it, at most `length`; None at its end."""
        begin = self._cut
        if self.exhausted:
            return None
        self._cut = self.part.end if length is None else min(begin + length, self.part.end)
        self._in_use.add(begin)
        return begin, self._cut

    def finish(self, begin: int) -> int | None:
        """The batch that begins there was used: the offset to report, None while an earlier batch is still in use."""
        self._in_use.discard(begin)
        offset = min(self._in_use, default=self._cut)
        if offset == self._reported:
            return None
        self._reported = offset
        return offset


class Batch:
    """Some offsets of a part, in use by this process."""

    def __init__(self, reader: Reader, open_part: OpenPart, begin: int, end: int) -> None:
        self.begin = begin
        self.end = end
        self.one_step = reader.length is not None
        self._reader = reader
        self._open_part = open_part
        self._used = False

    def used(self) -> None:
        """Its result is in the model. Idempotent."""
        if not self._used:
            self._used = True
            self._reader.finish(self._open_part, self.begin)


class Reader:
    """Takes parts from a queue and cuts them into batches of at most `length` offsets, or of whole parts for None.

    One for each place of the script that requests data. Any thread may report what is used, while another one waits for
    the next part.
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
        # The lock is held while it is reported, or the offsets of two threads could arrive in the other order.
        with self._lock:
            offset = open_part.finish(begin)
            if offset is not None and not self._queue.use(open_part.part.number, offset) and self._current is open_part:
                # It belongs to another task by now, so the rest of it is not for this process.
                self._current = None


_before_take: list[Callable[[], None]] = []

_taking: set[int] = set()
"""The threads that wait for a part."""

_given: dict[int, list[Batch]] = {}
"""The batches that each thread was given since it last requested one."""

_of_datasets: set[Batch] = set()
"""Batches that a dataset has given to an unknown thread of TensorFlow."""

_stepped: set[Batch] = set()
"""Batches of both kinds with which a step was made."""


def before_take(prepare: Callable[[], None]) -> None:
    """Have `prepare()` called each time before a part is taken."""
    _before_take.append(prepare)


def is_taking() -> bool:
    """Whether a thread waits for a part, or does what has to be done before."""
    return bool(_taking)


def batches(queue: Queue, length: int | None) -> Iterator[Batch]:
    """Each batch in turn. It is used when the next one is requested, unless it was claimed meanwhile."""
    reader = Reader(queue, length)
    while (batch := reader.next()) is not None:
        given = _given.setdefault(threading.get_ident(), [])
        given.append(batch)
        yield batch
        _stepped.discard(batch)
        # A claimed list does not belong to this generator any more.
        if _given.get(threading.get_ident()) is given:
            given.remove(batch)
            batch.used()


def claim() -> list[Batch]:
    """The batches that this thread was given since it last requested one: the caller reports when they are used. Used
    by `schedule`, after which their results are not there yet."""
    return _given.pop(threading.get_ident(), [])


def made_step() -> None:
    """A session of this thread has made a step, with the batch that the thread has."""
    _stepped.update(_given.get(threading.get_ident(), ()))
    _stepped.update(_of_datasets)


def before_leaving() -> None:
    """Report the batches with which a step was made: this process ends before it requests the next ones. A whole part
    may take more than one step, and is only reported by the next request."""
    for batch in list(_stepped):
        if batch.one_step:
            batch.used()


class DatasetBatches:
    """The batches of a dataset, from where they are loaded to where the script requests them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._loaded: dict[int, Batch] = {}
        self._current: Batch | None = None

    def loaded(self, batch: Batch) -> int:
        """The number, from 1, of a batch that is loaded."""
        with self._lock:
            self._count += 1
            self._loaded[self._count] = batch
            return self._count

    def give(self, number: Any) -> Any:
        """The batch of this number is requested, 0 for the end of a part: the one before it was used. Returns the
        number."""
        with self._lock:
            before, self._current = self._current, self._loaded.pop(int(number), None)
            current = self._current
        if before is not None:
            _of_datasets.discard(before)
            _stepped.discard(before)
            before.used()
        if current is not None:
            _of_datasets.add(current)
        return number


def make_dataset(queue: Queue, load: Callable[[int, int], Any], signature: Any, length: int, prefetch: int) -> Any:
    """A dataset of what `load(begin, end)` returns, in batches of at most `length` offsets."""
    import tensorflow as tf

    if length < 1:
        raise ValueError(f"batch_size must be at least 1, not {length!r}")
    if prefetch < 0:
        raise ValueError(f"prefetch must be at least 0, not {prefetch!r}")
    in_dataset = DatasetBatches()

    def produce() -> Iterator[tuple[int, Any]]:
        reader = Reader(queue, length)
        while (batch := reader.next()) is not None:
            values = load(batch.begin, batch.end)
            yield in_dataset.loaded(batch), values
            if reader.at_end_of_part:
                yield 0, values

    def give(number: Any, *values: Any) -> Any:
        given = tf.numpy_function(in_dataset.give, [number], tf.int64)
        return tf.ensure_shape(given, []), *values

    numbered = (tf.TensorSpec((), tf.int64), signature)
    loaded = tf.data.Dataset.from_generator(produce, output_signature=numbered)
    if prefetch:
        loaded = loaded.prefetch(prefetch)
    options = tf.data.Options()
    # Otherwise TensorFlow would also load ahead behind `give`, where it cannot be seen what was used.
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    given = loaded.map(give).filter(lambda number, *values: number > 0).map(lambda number, values: values)
    return given.with_options(options)
