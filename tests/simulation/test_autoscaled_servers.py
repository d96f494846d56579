"""Jobs with parameter servers that choose their own numbers, with the real clients of a master and of etcd, in virtual
time: every invariant holds, whatever happens to tasks, nodes and coordinators."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from dlrover_run.features.autoscale.decide import decide
from dlrover_run.features.autoscale.model import AutoscaleState, SizeView
from simulation.nights import first_seed, night_parts
from simulation.parameter_servers.scaled import ScaledServersProgram
from simulation.program import Outcome
from simulation.scenario import simulate
from simulation.seeds import PLACES, Defect, cases, demand_found, patched, run_seeds
from tf_ps_runner.cluster import autoscaling
from tf_ps_runner.cluster.choice import ServersChoice
from tf_ps_runner.cluster.server_load import ServersView, decide_servers

wanted: list[set[tuple[int, int]]] = []


class NotedProgram(ScaledServersProgram):
    """Notes the numbers that were wanted in each run."""

    def outcome(self) -> Outcome:
        wanted.append(self.chosen)
        return super().outcome()


@pytest.mark.parametrize("place", PLACES)
def test_every_invariant_holds_in_jobs_that_choose_their_numbers(place: str) -> None:
    wanted.clear()
    run_seeds(partial(simulate, kind=PLACES[place], program=NotedProgram), 0, 8)
    # The invariants only show something for jobs that try numbers. Of other eight runs few may live long enough for
    # that.
    assert sum(bool(numbers) for numbers in wanted) >= 3
    # Somewhere both the workers and the servers were chosen anew.
    assert any(len({workers for workers, _ in numbers if workers}) > 1 for numbers in wanted)
    assert any(len({servers for _, servers in numbers if servers}) > 1 for numbers in wanted)


@pytest.mark.parametrize("part", night_parts(500, 25))
@pytest.mark.parametrize("place", PLACES)
def test_every_invariant_holds_for_the_seeds_of_the_night(place: str, part: int) -> None:
    run_seeds(partial(simulate, kind=PLACES[place], program=ScaledServersProgram), first_seed() + part, 25)


def test_what_is_decided_in_a_trial_of_a_stored_plan_is_no_decision() -> None:
    """A seed in which the trial has the epoch of the leader that makes it, and a time of its own."""
    run_seeds(partial(simulate, kind=PLACES["etcd"], program=NotedProgram), 15, 1)


def choose_while_busy(rules: Any, sizes: Any, state: AutoscaleState, view: SizeView, now: float) -> AutoscaleState:
    return decide(rules, sizes, state, replace(view, busy=False), now)


def take_away(rules: Any, state: ServersChoice, view: ServersView, now: float) -> ServersChoice:
    """Take a server away that has little to do."""
    found = decide_servers(rules, state, view, now)
    idle = view.steady and view.processor is not None and view.processor < 50 and view.servers > 1
    return replace(found, target=view.servers - 1) if idle else found


def exceed(rules: Any, state: ServersChoice, view: ServersView, now: float) -> ServersChoice:
    """Add servers beyond what is allowed."""
    return decide_servers(rules, state, view._replace(most=99, room=99), now)


DEFECTS = {
    "a size that only fails is tried for ever": Defect(
        patched((autoscaling, "_is_trial"), by=lambda cluster, choice: bool(choice.workers.target)), master=38, etcd=4
    ),
    "a server with little to do is taken away": Defect(
        patched((autoscaling, "decide_servers"), by=take_away), master=4
    ),
    "servers have no bound": Defect(patched((autoscaling, "decide_servers"), by=exceed), master=2, etcd=1),
    "workers are chosen while the servers change": Defect(
        patched((autoscaling, "decide"), by=choose_while_busy), master=66
    ),
}


@pytest.mark.parametrize(("defect", "place", "seed"), cases(DEFECTS))
def test_a_planted_defect_of_the_choice_is_found(defect: Defect, place: str, seed: int) -> None:
    demand_found(defect.variant, partial(simulate, kind=PLACES[place], program=ScaledServersProgram), seed)
