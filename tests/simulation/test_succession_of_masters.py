"""The loss of the machine of the master and of its successor, a divided network, and the return of the first node."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from dlrover_run.coordination import coordinator
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds import quorum
from dlrover_run.coordination.rounds.quorum import LostMaster
from dlrover_run.master.jobs import Jobs
from dlrover_run.rendezvous.master_client import succession
from dlrover_run.rendezvous.master_client.client import MasterClient
from dlrover_run.rendezvous.master_client.succession import Succession
from dlrover_run.transport.messages import Answered
from simulation.nights import first_seed, night_parts
from simulation.seeds import run_seeds
from simulation.succession import EARLY_KINDS, ENDPOINT, World, play, play_world
from simulation.timeline import Broken

SEEDS = 25

EARLY_SEEDS = 12


def test_one_world_goes_on_without_the_machine_of_the_master() -> None:
    played = [play(seed) for seed in range(SEEDS)]
    assert {kind for kind, _ in played} == {"lose", "lose both", "divide", "late"}
    assert sum(masters > 2 for _, masters in played) > SEEDS / 4


@pytest.mark.parametrize("part", night_parts(2000, 250))
def test_one_world_goes_on_for_the_seeds_of_the_night(part: int) -> None:
    run_seeds(play, first_seed() + part, 250)


def play_early(first: int, count: int) -> list[World]:
    """Play runs in which the master is lost, or the network divided, before the first round. Raises Broken."""
    worlds = [World(seed, kinds=EARLY_KINDS) for seed in range(first, first + count)]
    for seed, world in enumerate(worlds, first):
        play_world(world, seed)
    return worlds


def test_one_world_begins_without_the_first_machine() -> None:
    worlds = play_early(0, EARLY_SEEDS)
    assert {world.kind for world in worlds} == {*EARLY_KINDS}
    assert all(world.is_early for world in worlds)
    assert sum(len(world.all) > 1 for world in worlds) > EARLY_SEEDS / 2


TWO_STARTERS = 202611281068
"""The seed of a run in which two nodes have their turn within 0.2 s, as one began to look 5 s after the other."""


def test_two_masters_that_begin_at_the_same_time_become_one() -> None:
    assert play_early(TWO_STARTERS, 1)[0].is_early
    ends_alone = patch.object(Succession, "other_places", lambda self, own: (self.place,))
    with ends_alone, pytest.raises(Broken, match="one round"):
        play_early(TWO_STARTERS, 1)


@pytest.mark.parametrize("part", night_parts(2000, 250))
def test_one_world_begins_for_the_seeds_of_the_night(part: int) -> None:
    run_seeds(partial(play, kinds=EARLY_KINDS), first_seed() + part, 250)


real_step = Succession.step


def start_nothing(self: Succession, *given: Any) -> Any:
    return real_step(self, *given)._replace(starts=None)


real_recall = MasterClient._recall_from


async def recall_from_endpoint(self: MasterClient, place: str, own: str) -> bool:
    return place == ENDPOINT and await real_recall(self, place, own)


def play_ten(first: int) -> None:
    for seed in range(first, first + 10):
        play(seed)


DEFECTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no node starts the next master": lambda: patch.object(Succession, "step", start_nothing),
    "all candidates start at once": lambda: patch.object(succession, "CANDIDATE_DELAY", 0.0),
    "the endpoint's node is not sent to the successor": lambda: patch.object(Jobs, "move", lambda *_: Answered()),
    "the next master needs more members than there are": lambda: patch.object(
        quorum, "needed_members", lambda members, least, ended: members
    ),
    "the next master needs no quorum": lambda: patch.object(quorum, "needed_members", lambda members, least, ended: 0),
    "the master that was replaced keeps its nodes": lambda: patch.object(
        MasterClient, "_recall_from", recall_from_endpoint
    ),
}

FIRST_SEEDS = {"the master that was replaced keeps its nodes": 225, "all candidates start at once": 325}
"""The first of the ten seeds of a planted defect, where it is not 0."""


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_break_an_invariant(defect: str) -> None:
    with DEFECTS[defect](), pytest.raises(Broken, match=r"one round|has the job|one world trains"):
        play_ten(FIRST_SEEDS.get(defect, 0))


real_quorum = quorum.with_quorum


def only_between_rounds(plan: Plan, rules: JobRules, lost: LostMaster | None) -> Plan:
    return real_quorum(plan, rules, lost) if plan.members else plan


EARLY_DEFECTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "before the first round the next master needs no quorum": lambda: patch.object(
        coordinator, "with_quorum", only_between_rounds
    ),
    "a majority is enough though the first node may have others": lambda: patch.object(
        quorum, "needed_members", lambda members, least, ended: (members - ended) // 2 + 1
    ),
    "all nodes are needed": DEFECTS["the next master needs more members than there are"],
    "no node starts the next master": DEFECTS["no node starts the next master"],
}


@pytest.mark.parametrize("defect", EARLY_DEFECTS)
def test_planted_defects_before_the_first_round_break_an_invariant(defect: str) -> None:
    with EARLY_DEFECTS[defect](), pytest.raises(Broken, match=r"one round|has the job|one world trains"):
        play_early(0, 10)
