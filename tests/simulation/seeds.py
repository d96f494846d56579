"""What the tests of both simulations share: a range of seeds in which every law holds, and variants of the product."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from simulation.timeline import Broken

Outcome = TypeVar("Outcome")

Variant = Callable[[], AbstractContextManager[None]]
"""A variant of the product, as long as the context is open."""


def run_seeds(simulate: Callable[[int], Outcome], first: int, count: int) -> list[Outcome]:
    """The outcomes of seeds in which every law holds."""
    outcomes, broken = [], []
    for seed in range(first, first + count):
        try:
            outcomes.append(simulate(seed))
        except Broken as reason:
            broken.append(str(reason))
    assert not broken, "\n".join(broken)
    return outcomes


def patched(*places: tuple[Any, str], by: Any) -> Variant:
    """A variant with something in place of a name in every module that uses it."""

    @contextmanager
    def variant() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name in places:
                # A built-in is in no module until it is put there; whatever else is not there was renamed.
                stack.enter_context(patch.object(owner, name, by, create=hasattr(builtins, name)))
            yield

    return variant
