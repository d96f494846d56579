"""The parts of a queue in the order in which they are handed out: the same for a seed on every machine and in every
Python.

Standard library only, Python 3.9 and later.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

_ROUNDS = 8
"""Four make it hard to distinguish from a true shuffle even on purpose; twice that, because the ranges are small."""


class Shuffle:
    """A permutation of `range(parts)`, chosen by `seed` and `epoch`.

    It is computed part by part, so that a queue of millions of parts takes no memory and no pause: a Feistel network
    over the next even power of two, repeated until the result is in the range (cycle walking: Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002).
    """

    def __init__(self, parts: int, seed: int, epoch: int) -> None:
        self._parts = parts
        self._half = max(1, ((parts - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._key = hashlib.blake2b(f"{parts}/{seed}/{epoch}".encode(), digest_size=16).digest()

    def at(self, place: int) -> int:
        """The element at a place of the permutation."""
        found = self._mix(place)
        # The range is more than a quarter of what is mixed, so this takes four turns at most on average.
        while found >= self._parts:
            found = self._mix(found)
        return found

    def _mix(self, number: int) -> int:
        left, right = number >> self._half, number & self._mask
        for turn in range(_ROUNDS):
            mixed = hashlib.blake2b(right.to_bytes(8, "big"), digest_size=8, key=self._key, salt=bytes([turn])).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "big") & self._mask)
        return left << self._half | right


class Part(NamedTuple):
    """The offsets from `begin` to before `end`, in epoch `epoch`. `number` identifies it in its queue."""

    number: int
    begin: int
    end: int
    epoch: int


class Parts:
    """The parts of `size` offsets, by number. They are numbered in the order in which they are handed out, through all
    epochs; with `shuffle` each epoch has an order of its own."""

    def __init__(self, size: int, shard: int, seed: int, shuffle: bool) -> None:
        self.per_epoch = -(-size // shard)
        self._size, self._shard, self._seed = size, shard, seed
        self._shuffle = Shuffle(self.per_epoch, seed, 0) if shuffle else None
        self._epoch = 0

    def part(self, number: int) -> Part:
        epoch, place = divmod(number, self.per_epoch)
        if self._shuffle is not None:
            if epoch != self._epoch:
                self._shuffle, self._epoch = Shuffle(self.per_epoch, self._seed, epoch), epoch
            place = self._shuffle.at(place)
        begin = place * self._shard
        return Part(number, begin, min(begin + self._shard, self._size), epoch)
