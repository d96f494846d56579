"""Whole jobs in virtual time that scale themselves: every invariant holds, whatever happens to nodes and
coordinators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from simulation.nights import first_seed, night_parts
from simulation.program import Outcome
from simulation.scenario import Scenario, simulate
from simulation.seeds import PLACES, run_seeds
from simulation.torch.scaled import ScaledProgram

wanted: list[set[int]] = []
commands: list[int] = []


class NotedProgram(ScaledProgram):
    """Notes the sizes that were wanted in each run, and how often the command ran that starts nodes."""

    def outcome(self) -> Outcome:
        wanted.append(self.invariants.targets)
        commands.append(len(self.invariants.runs))
        return super().outcome()


@pytest.mark.parametrize("place", PLACES)
def test_every_invariant_holds_in_jobs_that_scale_themselves(place: str) -> None:
    wanted.clear()
    commands.clear()
    kind: type[Scenario] = PLACES[place]
    run: Callable[[int], Outcome] = partial(simulate, kind=kind, program=NotedProgram)
    run_seeds(run, 0, 10)
    # The invariants only show something for jobs that try sizes. Of other ten runs few may live long enough for that.
    assert sum(bool(targets) for targets in wanted) >= 3
    assert any(len(targets) > 1 for targets in wanted)
    assert any(commands)


@pytest.mark.parametrize("part", night_parts(1000, 50))
@pytest.mark.parametrize("place", PLACES)
def test_every_invariant_holds_for_the_seeds_of_the_night(place: str, part: int) -> None:
    run_seeds(partial(simulate, kind=PLACES[place], program=ScaledProgram), first_seed() + part, 50)


@pytest.mark.parametrize(("place", "seed"), [("master", 187), ("etcd", 41)])
def test_the_time_until_which_newcomers_are_spares_is_no_deadline_once_it_has_passed(place: str, seed: int) -> None:
    """Seeds in which a size is wanted although no step was counted until then."""
    run_seeds(partial(simulate, kind=PLACES[place], program=NotedProgram), seed, 1)
