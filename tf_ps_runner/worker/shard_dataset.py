"""Parts of the input as a `tf.data.Dataset` that loads ahead, and yet says of each batch when it was used.

What loads ahead does not know what was used, so each batch carries its number through the prefetching, and a function
behind that sees it go out: then all before it were used. Behind the last batch of a part goes one that is seen there
and goes no further, for the part must be used up before this process waits for another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from tf_ps_runner.worker.shards import Batch, Queue, Reader, hand_out, take_back


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
