"""The policies for stalls and stragglers change nothing in jobs without any: whole jobs in virtual time, with them and
without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from random import Random

import pytest
from msgspec.structs import replace
from support.harness import only_long

from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.hangs.search import guilt
from dlrover_run.features.hangs.search.round_detectors import RoundDetectors
from dlrover_run.features.hangs.stalls import observer
from dlrover_run.features.hangs.stalls.rules import StallRules
from dlrover_run.features.hangs.stragglers.rules import StragglerRules
from simulation.nights import first_seed, night_parts
from simulation.program import Outcome, Program
from simulation.scenario import simulate
from simulation.seeds import PLACES, patched, run_seeds
from simulation.stall_world import World, play
from simulation.timeline import Broken
from simulation.torch.program import TorchProgram


class WatchedProgram(TorchProgram):
    """The same jobs, whose stalls and stragglers are looked for."""

    def rules(self, random: Random) -> JobRules:
        """The same rules, with the policies."""
        rules = super().rules(random)
        with_stalls = with_part(rules.parts, StallRules(watched=1))
        return replace(rules, parts=with_part(with_stalls, StragglerRules(watched=1)))


def run(seed: int, place: str, program: type[Program]) -> tuple[Outcome, list[str]]:
    lines: list[str] = []
    outcome = simulate(seed, lines.append, kind=PLACES[place], program=program)
    # The line that shows the rules differs.
    return outcome, [line for line in lines if "JobRules(" not in line]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", [*range(3), *only_long(*range(3, 30))])
def test_a_job_that_does_not_stall_decides_the_same(place: str, seed: int) -> None:
    without, with_policy = (run(seed, place, program) for program in (TorchProgram, WatchedProgram))
    assert with_policy == without


# Rounds whose workers hang, or only seem to.


def answers_at_once() -> AbstractContextManager[None]:
    """A node says that its workers train as soon as they ever did, before the question too."""
    witnesses = RoundDetectors.witnesses
    return patched((RoundDetectors, "witnesses"), by=lambda self, since: witnesses(self, 0.0))()


def asks_no_node() -> AbstractContextManager[None]:
    """A node that reports no quiet worker counts as one that trains."""
    return patched((observer, "ENOUGH_WITNESSES"), by=0)()


def names_in_collectives() -> AbstractContextManager[None]:
    """A worker that waits in a collective counts as one that hangs."""
    return patched((guilt, "_is_alone"), by=lambda one, waits: one.counts)()


def finds_only_rounds() -> AbstractContextManager[None]:
    """A stall is one of all workers."""
    return patched((observer, "find_alone"), by=lambda suspects: None)()


DEFECTS = (answers_at_once, asks_no_node, names_in_collectives, finds_only_rounds)


@pytest.mark.parametrize("seed", range(12))
def test_only_a_worker_that_hangs_is_named_and_it_is_named(seed: int) -> None:
    play(seed)


@pytest.mark.parametrize("part", night_parts(300, 25))
def test_only_a_worker_that_hangs_is_named_for_the_seeds_of_the_night(part: int) -> None:
    run_seeds(play, first_seed() + part, 25)


def test_the_worlds_have_workers_that_hang_and_workers_that_look_for_a_file() -> None:
    worlds = [World.drawn(seed) for seed in range(12)]
    assert any(world.hangs is not None for world in worlds)
    assert {len(world.groups) for world in worlds} == {1, 2, 6}
    assert any(world.polls for world in worlds)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_breaks_an_invariant(defect: Callable[[], AbstractContextManager[None]]) -> None:
    with defect():
        broken = [seed for seed in range(12) if _breaks(seed)]
    assert broken, f"no seed finds that {defect.__doc__}"


def _breaks(seed: int) -> bool:
    try:
        play(seed)
    except Broken:
        return True
    return False
