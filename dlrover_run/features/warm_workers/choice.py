"""Which warm workers are needed, which environment they have, and which may be used. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

OWN_VARIABLES = "DLROVER_"
"""How the names of the variables begin that tell a worker where its agent and its round are."""

STEP_DELAY = 1.0
"""Seconds after the first steps of the workers at which warm workers are prepared: what a step loads is loaded then."""

STORE_DELAY = 10.0
"""The same after they have met, where no steps are counted: what they do before their first step is not known."""

MAX_DEATHS = 3
"""Warm workers of a job that may end by themselves; after that no more are prepared."""

Use = Literal["none", "prepares", "environment", "ready"]
"""Whether a warm worker may become a worker, or why not: there is none, it still prepares itself, or it has read a
variable that the worker has with another value."""


class Warm(NamedTuple):
    """A warm worker: the environment that it was prepared with, and whether it waits for a rank."""

    environment: Mapping[str, str]
    waits: bool


class Changes(NamedTuple):
    """The local ranks whose warm workers end, and those that get one."""

    end: frozenset[int]
    prepare: tuple[int, ...]


def changes(running: Collection[int], done: Collection[int], warm: Collection[int], workers: int) -> Changes:
    """What is to change. `running` are the local ranks whose workers run, `done` those whose workers have ended with
    success, `warm` those with a warm worker, and `workers` is their number in a round."""
    needless = frozenset(rank for rank in warm if rank >= workers or rank in done)
    return Changes(needless, tuple(sorted(set(running).difference(warm))))


def use_of(warm: Warm | None, environment: Mapping[str, str]) -> Use:
    """Whether a warm worker may become the worker with this environment."""
    if warm is None:
        return "none"
    if not warm.waits:
        return "prepares"
    same = all(environment.get(name) == value for name, value in warm.environment.items())
    return "ready" if same else "environment"


def lasting(
    environment: Mapping[str, str], others: Collection[Mapping[str, str]], parent: Mapping[str, str]
) -> dict[str, str]:
    """What of a worker's environment does not belong to its round. `others` are environments of the same local rank
    for other ranks and rounds, and `parent` is the launcher's own."""
    return {
        name: value
        for name, value in environment.items()
        if parent.get(name) == value
        or not (name.startswith(OWN_VARIABLES) or any(other.get(name, value) != value for other in others))
    }


def prepares_at(all_stepped: float | None, all_met: float | None) -> float | None:
    """When warm workers of a round are prepared, so that they do not slow down its start; None while that is not
    known. The times are those at which all its workers had made a step, and had met, as far as they have."""
    if all_stepped is not None:
        return all_stepped + STEP_DELAY
    return None if all_met is None else all_met + STORE_DELAY
