"""Measures how fast a device multiplies matrices, and checks the products.

The size of the product is chosen by time, so that a product takes some milliseconds on any device. Then products are
computed for the requested time, and the speed is all operations (2 n^3 each) by the time that they took.

Every element of every product is checked, exactly. The factors hold -1, 0 and 1, so products hold integers, far below
256 for the largest size. bfloat16 holds these without rounding, and no partial sum is rounded, in any order of the
additions. For a vector x of integers without a zero, C x = A (B x) holds exactly when C = A B (Freivalds). One wrong
element in a row is always detected, because its error times an element of x is not zero, and NaN equals nothing;
several in one row cancel out for at most one of `2 * WEIGHT` vectors, and x is drawn again for each request. The sums
of the check use vector instructions, not the units that multiply matrices.

On a CPU each thread computes products of its own, and the speeds are added. Threads that share a product wait for each
other in each product: beside another process some 20 ms each time. On a machine with two cores, one of them busy, the
same product of 128 was 700 times slower, which is no property of the node.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from .accelerators import Accelerator

SIZES = {"cpu": (128, 4096)}
"""The sizes of the smallest and the largest matrices, for a device type that is not an accelerator."""

ACCELERATOR_SIZES = (1024, 8192)
"""The same for an accelerator. Sizes above 8192 are no faster, and rounding would begin at 65536."""

LONG_ENOUGH = 0.0015
"""Minimum seconds of a product: starting it and reading the clock take microseconds."""

EASY_THREADS = 8
"""Threads that may compute products of that length at a time. With more threads the products must take proportionally
longer, because all threads share one interpreter, which each needs for some 0.1 ms around a product."""

TOGETHER = 4
"""Products that are submitted to an accelerator at a time, which hides the latency."""

WARM_UP = 3
"""Products before the measurement, in which libraries load kernels and clock rates rise."""

DENSITY = 8
"""One of this many elements is 1, one is -1, all others are 0. The elements of a product of 8192 then have a standard
deviation of 23, so 256 is eleven standard deviations away, which no healthy device ever reaches."""

WEIGHT = 7
"""The largest element of the vector of the check. Sums stay below 2^24, up to which float32 is exact: C x adds up 8192
terms of at most 7 * 256."""


class WrongResult(Exception):
    """The device computed a wrong result; the message is a clause."""


class Product:
    """A pair of random matrices of one size, and the expected product."""

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
        # Not matrix @ vector, which may use the units under test, and may round float32 to TF32.
        return (matrix.float() * vector).sum(dim=1)

    def multiply(self) -> float:
        """Compute the products of one submission; return the seconds."""
        self._accelerator.synchronize()
        began = time.perf_counter()
        for result in self._results:
            torch.mm(self._left, self._right, out=result)
        self._accelerator.synchronize()
        return time.perf_counter() - began

    def check(self) -> None:
        """Raise WrongResult if one of the last products is wrong, and clear them."""
        for result in self._results:
            wrong = int((self._times(result, self._weights) != self._expected).sum().item())
            if wrong:
                raise WrongResult(
                    f"{self._accelerator.name} multiplied matrices wrongly: "
                    f"{wrong} of {self.size} rows of a product are wrong"
                )
            # A product that the device does not write must not be taken for the previous one.
            result.fill_(math.nan)

    @property
    def operations(self) -> float:
        """Additions and multiplications in `multiply`."""
        return 2.0 * self.size**3 * len(self._results)


def measure_compute(accelerator: Accelerator, seconds: float, threads: int = 1) -> float:
    """Multiply matrices for about that long; return the speed in TFLOP/s. On a CPU each of `threads` does so.

    Raises WrongResult, torch.OutOfMemoryError, or what the device's driver raises.
    """
    parallel = threads if accelerator.device.type in SIZES else 1
    size, together = _calibrate_size(accelerator, seconds, max(1.0, parallel / EASY_THREADS))
    if parallel == 1:
        return _measure(accelerator, size, together, seconds)
    with ThreadPoolExecutor(parallel) as pool:
        speeds = [pool.submit(_measure, accelerator, size, together, seconds) for _ in range(parallel)]
    return sum(speed.result() for speed in speeds)


def _measure(accelerator: Accelerator, size: int, together: int, seconds: float) -> float:
    product = Product(accelerator, size, together)
    for _ in range(WARM_UP):
        product.multiply()
        product.check()
    taken, operations = 0.0, 0.0
    until = time.perf_counter() + seconds
    # The checks count towards the time of the request, but not towards the speed.
    while not operations or time.perf_counter() < until:
        taken += product.multiply()
        operations += product.operations
        product.check()
    return operations / taken / 1e12


def _calibrate_size(accelerator: Accelerator, seconds: float, longer: float) -> tuple[int, int]:
    """The smallest size that takes long enough, found by doubling, and the number of products of one submission; the
    faster of two attempts counts."""
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
