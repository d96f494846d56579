"""How fast a device multiplies matrices, and whether it does so rightly.

The product's size is found by time, so that one takes some milliseconds whatever the device is; then products are made
for as long as was ordered, and the speed is all operations (2 n^3 each) by the time that they took.

Every element of every product is checked, exactly. The factors hold -1, 0 and 1, so products hold whole numbers, far
below 256 for the largest size: all that bfloat16 holds without rounding, and no partial sum, in whatever order the
device adds, is rounded either. For a vector x of whole numbers without a zero, C x = A (B x) holds exactly when C = A B
(Freivalds). One wrong element in a row always shows, as its error times an element of x is not zero, and NaN equals
nothing; several in one row cancel out for one of `2 * WEIGHT` vectors at most, and x is drawn anew for each order. The
sums of the check are made with vector instructions, not by the units that multiply matrices.

On a CPU each thread makes products of its own, and the speed is the sum of theirs. Threads that share a product wait
for each other in each, and beside another process that is some 20 ms each time: on a machine of two cores with one of
them busy the same product of 128 was then 700 times slower, which says nothing about the node.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from .accelerators import Accelerator

SIZES = {"cpu": (128, 4096)}
"""The smallest and the largest matrices to multiply, for a kind of device that is not an accelerator."""

ACCELERATOR_SIZES = (1024, 8192)
"""The same for an accelerator. Larger ones than 8192 are no faster, and rounding would begin with 65536."""

LONG_ENOUGH = 0.0015
"""Seconds from which a product is long enough: starting it and reading the clock take microseconds."""

EASY_THREADS = 8
"""Threads that may make products of that length beside each other. With more of them the products are longer by as
much, for all these threads share one interpreter, which they need for some 0.1 ms around each product."""

TOGETHER = 4
"""Products that an accelerator is given at a time, which hides the way there and back."""

WARM_UP = 3
"""Products before the clock starts, in which libraries load kernels and clocks rise."""

DENSITY = 8
"""One element of so many is 1, one is -1, all others are 0. The elements of a product of 8192 then have a standard
deviation of 23, so that 256 is eleven of them away and no healthy device ever comes there."""

WEIGHT = 7
"""The largest element of the vector of the check. Sums stay below 2^24, up to which float32 is exact: C x adds up 8192
terms of at most 7 * 256."""


class WrongResult(Exception):
    """The device computed wrongly; the message is a clause."""


class Product:
    """A pair of random matrices of one size, and what their product must be."""

    def __init__(self, accelerator: Accelerator, size: int, together: int) -> None:
        self.size = size
        self._accelerator = accelerator
        self._left = self._factor()
        self._right = self._factor()
        self._results = [torch.empty_like(self._left) for _ in range(together)]
        device = accelerator.device
        magnitude = torch.randint(1, WEIGHT + 1, (size,), device=device)
        sign = torch.randint(0, 2, (size,), device=device) * 2 - 1
        self._weights = (magnitude * sign).float()
        self._expected = self._times(self._left, self._times(self._right, self._weights))

    def _factor(self) -> torch.Tensor:
        drawn = torch.randint(0, DENSITY, (self.size, self.size), device=self._accelerator.device, dtype=torch.uint8)
        return (drawn == 0).to(self._accelerator.dtype) - (drawn == 1).to(self._accelerator.dtype)

    def _times(self, matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        # Not matrix @ vector, which may use what is to be checked, and may round float32 to TF32.
        return (matrix.float() * vector).sum(dim=1)

    def multiply(self) -> float:
        """Make the products, as many as are made together; the seconds that it took."""
        self._accelerator.synchronize()
        began = time.perf_counter()
        for result in self._results:
            torch.mm(self._left, self._right, out=result)
        self._accelerator.synchronize()
        return time.perf_counter() - began

    def check(self) -> None:
        """Raise WrongResult when one of the products just made is wrong, and forget them."""
        for result in self._results:
            wrong = int((self._times(result, self._weights) != self._expected).sum().item())
            if wrong:
                raise WrongResult(
                    f"{self._accelerator.name} multiplied matrices wrongly: "
                    f"{wrong} of {self.size} rows of a product are wrong"
                )
            # A product that is never written must not pass for the one before it.
            result.fill_(math.nan)

    @property
    def operations(self) -> float:
        """Additions and multiplications in `multiply`."""
        return 2.0 * self.size**3 * len(self._results)


def measure_compute(accelerator: Accelerator, seconds: float, threads: int = 1) -> float:
    """Multiply matrices for about that long; the speed in TFLOP/s. On a CPU so many threads do it, each by itself.

    Raises WrongResult, torch.OutOfMemoryError, or whatever the device's driver raises.
    """
    beside = threads if accelerator.device.type in SIZES else 1
    size, together = _find_size(accelerator, seconds, max(1.0, beside / EASY_THREADS))
    if beside == 1:
        return _measure(accelerator, size, together, seconds)
    with ThreadPoolExecutor(beside) as pool:
        speeds = [pool.submit(_measure, accelerator, size, together, seconds) for _ in range(beside)]
    return sum(speed.result() for speed in speeds)


def _measure(accelerator: Accelerator, size: int, together: int, seconds: float) -> float:
    product = Product(accelerator, size, together)
    for _ in range(WARM_UP):
        product.multiply()
        product.check()
    taken, operations = 0.0, 0.0
    until = time.perf_counter() + seconds
    # The checks count into the time of the order, though not into the speed.
    while not operations or time.perf_counter() < until:
        taken += product.multiply()
        operations += product.operations
        product.check()
    return operations / taken / 1e12


def _find_size(accelerator: Accelerator, seconds: float, longer: float) -> tuple[int, int]:
    """The smallest product that takes long enough, by doubling, and how many are made together; the quicker of two
    tries counts."""
    kind = accelerator.device.type
    size, largest = SIZES.get(kind, ACCELERATOR_SIZES)
    together = 1 if kind in SIZES else TOGETHER
    enough = min(LONG_ENOUGH * longer, seconds / 10)
    while True:
        product = Product(accelerator, size, together)
        product.multiply()
        taken = min(product.multiply(), product.multiply())
        if size * 2 > largest or taken / together >= enough:
            return size, together
        size *= 2
