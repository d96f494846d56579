"""Shared by the tests of all programs: ranges of seeds in which every invariant holds, and planted defects."""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

import pytest

from simulation.etcd_scenario import EtcdScenario
from simulation.program import Outcome
from simulation.scenario import MasterScenario, Scenario
from simulation.timeline import Broken

PLACES: dict[str, type[Scenario]] = {"master": MasterScenario, "etcd": EtcdScenario}
"""The places of the records of a job."""

NEAR = 10
"""How many seeds are tried for a planted defect. After a change of the product, a seed may be another run."""

ENOUGH = 2000
"""How many seeds are searched for another one if those do not find the defect. That takes longer."""

Simulate = Callable[[int], Outcome]

R = TypeVar("R")

Variant = Callable[[], AbstractContextManager[None]]
"""A variant of the product until the end of the context."""


@dataclass(frozen=True)
class Defect:
    """A variant of the product that breaks an invariant, and a seed that finds it: with a master, and with etcd. None:
    the defect is not planted with this place of the records."""

    variant: Variant
    master: int | None = None
    etcd: int | None = None


def run_seeds(simulate: Callable[[int], R], first: int, count: int) -> list[R]:
    """Return the outcomes of seeds; every invariant must hold in each of them."""
    outcomes, broken = [], []
    for seed in range(first, first + count):
        try:
            outcomes.append(simulate(seed))
        except Broken as reason:
            broken.append(str(reason))
    assert not broken, "\n".join(broken)
    return outcomes


def patched(*places: tuple[Any, str], by: Any) -> Variant:
    """Return a variant with other values for these names, in every module that uses them."""

    @contextmanager
    def variant() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name in places:
                # A built-in is in no module until it is set there; any other missing name was renamed.
                stack.enter_context(patch.object(owner, name, by, create=hasattr(builtins, name)))
            yield

    return variant


def cases(defects: dict[str, Defect]) -> list[Any]:
    """Return the parameters of a test: each defect in each place of the records, with its seed."""
    return [
        pytest.param(defect, place, seed, id=f"{name}-{place}")
        for name, defect in defects.items()
        for place in PLACES
        if (seed := getattr(defect, place)) is not None
    ]


def demand_found(variant: Variant, simulate: Simulate, seed: int) -> None:
    """Demand that a seed breaks an invariant: that seed or one of the next seeds; or else another one, with a warning
    that names it."""
    near = range(seed, seed + NEAR)
    with variant():
        found = next(
            ((each, invariant) for each in (*near, *range(ENOUGH)) if (invariant := _broken(simulate, each))), None
        )
    assert found is not None, f"neither seeds {near[0]} to {near[-1]} nor the first {ENOUGH} break an invariant"
    # A variant that no longer fits the product raises an error, which shows nothing about the invariants.
    assert "Error(" not in found[1], found[1]
    if found[0] not in near:
        warnings.warn(f"the seed that finds this defect is now {found[0]}, no longer {seed}", stacklevel=2)


def _broken(simulate: Simulate, seed: int) -> str | None:
    try:
        simulate(seed)
    except Broken as broken:
        return str(broken)
    return None
