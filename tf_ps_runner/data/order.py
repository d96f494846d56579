"""The order in which the parts of an epoch are handed out: the same for a seed on every machine and in every Python.

A permutation that is computed part by part, so that a queue of millions of parts takes no memory and no pause: a
Feistel network over the next even power of two, followed until it comes back into the range (cycle walking: Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

from __future__ import annotations

import hashlib

_ROUNDS = 8
"""Four make it hard to tell from a true shuffle even on purpose; twice that, because the ranges are small."""


class Shuffle:
    """A permutation of `range(parts)`, chosen by `seed` and `epoch`."""

    def __init__(self, parts: int, seed: int, epoch: int) -> None:
        self._parts = parts
        self._half = max(1, ((parts - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._key = hashlib.blake2b(f"{parts}/{seed}/{epoch}".encode(), digest_size=16).digest()

    def at(self, place: int) -> int:
        """What stands at a place of the permutation."""
        found = self._mix(place)
        # The range is more than a quarter of what is mixed, so that this takes four turns at most on average.
        while found >= self._parts:
            found = self._mix(found)
        return found

    def _mix(self, number: int) -> int:
        left, right = number >> self._half, number & self._mask
        for turn in range(_ROUNDS):
            mixed = hashlib.blake2b(right.to_bytes(8, "big"), digest_size=8, key=self._key, salt=bytes([turn])).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "big") & self._mask)
        return left << self._half | right
