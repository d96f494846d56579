"""What the tests of all programs share: a range of seeds in which every law holds, and planted defects."""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from simulation.etcd_scenario import EtcdScenario
from simulation.program import Outcome
from simulation.scenario import MasterScenario, Scenario
from simulation.timeline import Broken

PLACES: dict[str, type[Scenario]] = {"master": MasterScenario, "etcd": EtcdScenario}
"""Where the records of a job may be."""

LONG_CHUNK = 1000
"""Seeds of one of the long tests."""

NEAR = 10
"""How many seeds are tried for a planted defect. A change of the product may make a seed another run."""

ENOUGH = 2000
"""Seeds among which another one is looked for when those do not find it, which takes longer."""

Simulate = Callable[[int], Outcome]

Variant = Callable[[], AbstractContextManager[None]]
"""A variant of the product, as long as the context is open."""


@dataclass(frozen=True)
class Defect:
    """A variant of the product that breaks a law, and a seed that finds it: with a master, and with etcd. None is a
    place where it is not planted."""

    variant: Variant
    master: int | None = None
    etcd: int | None = None


def run_seeds(simulate: Simulate, first: int, count: int) -> list[Outcome]:
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


def cases(defects: dict[str, Defect]) -> list[Any]:
    """The parameters of a test: each defect in each place, with its seed."""
    return [
        pytest.param(defect, place, seed, id=f"{name}-{place}")
        for name, defect in defects.items()
        for place in PLACES
        if (seed := getattr(defect, place)) is not None
    ]


def demand_found(variant: Variant, simulate: Simulate, seed: int) -> None:
    """A seed breaks a law: that one or one soon after it, or else, with a warning that names it, another one."""
    near = range(seed, seed + NEAR)
    with variant():
        found = next(((each, law) for each in (*near, *range(ENOUGH)) if (law := _broken(simulate, each))), None)
    assert found is not None, f"neither seeds {near[0]} to {near[-1]} nor the first {ENOUGH} break a law"
    # A variant that does not fit the product any more raises: that shows nothing of the laws.
    assert "Error(" not in found[1], found[1]
    if found[0] not in near:
        warnings.warn(f"the seed that finds this is {found[0]} now, and no longer {seed}", stacklevel=2)


def _broken(simulate: Simulate, seed: int) -> str | None:
    try:
        simulate(seed)
    except Broken as broken:
        return str(broken)
    return None
