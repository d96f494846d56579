"""Nodes that prepare before they take part, in virtual time: every invariant holds, and defects of the product are
found."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.membership import KnownNode
from dlrover_run.coordination.rounds import gathering, planned_changes
from dlrover_run.workers import template_client
from dlrover_run.workers.starter import Starter
from simulation.nights import first_seed, night_parts
from simulation.program import Outcome
from simulation.scenario import simulate
from simulation.seeds import PLACES, Defect, cases, demand_found, patched, run_seeds
from simulation.survivors.program import PreparingSurvivorsProgram
from simulation.torch.program import PreparingProgram, TorchProgram

PROGRAMS: dict[str, type[TorchProgram]] = {"torch": PreparingProgram, "survivors": PreparingSurvivorsProgram}

SEEDS = {("torch", "master"): 12, ("torch", "etcd"): 8, ("survivors", "master"): 8, ("survivors", "etcd"): 4}
"""The seeds of `make test`; `make test-long` runs 1,500 others of each."""


def run(seed: int, place: str, program: type[TorchProgram] = PreparingProgram) -> Outcome:
    return simulate(seed, kind=PLACES[place], program=program)


def test_every_invariant_holds_and_newcomers_join_when_they_are_ready() -> None:
    runs: list[TorchProgram] = []
    for (name, place), count in SEEDS.items():
        program = PROGRAMS[name]

        class Counting(program):  # type: ignore[valid-type, misc]
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                runs.append(self)

        run_seeds(partial(run, place=place, program=Counting), 0, count)
    # The invariants only show something for jobs in which something has happened.
    assert sum(one.invariants.newcomers.joined_ready for one in runs) > len(runs) / 16
    assert sum(one.preparation.accidents for one in runs) > len(runs) / 4
    assert any(one.preparation.given_up for one in runs)


@pytest.mark.parametrize("part", night_parts(1500, 100))
@pytest.mark.parametrize(("name", "place"), SEEDS)
def test_every_invariant_holds_for_the_seeds_of_the_night(name: str, place: str, part: int) -> None:
    run_seeds(partial(run, place=place, program=PROGRAMS[name]), first_seed() + part, 100)


def all_that_are_eligible(gate: Any, plan: Any, nodes: Any) -> Any:
    return gate.joins(plan, gathering.eligible(gate, plan, nodes))


def without_any_that_prepared(gate: Any, plan: Any, nodes: Any) -> Any:
    return [state for state in real_ready(gate, plan, nodes) if state.prepared_at is None]


def without_those_that_prepare(gate: Any, plan: Any, nodes: Any) -> Any:
    return [state for state in real_eligible(gate, plan, nodes) if not state.report.preparing]


def prestart_silently(self: Starter, parent: Any, on_ready: Any = None) -> None:
    real_prestart(self, parent)


def take_for_a_repetition(self: Coordinator, report: Any, now: float) -> bool:
    """A report whose only news is that the node is ready changes nothing."""
    known = self.nodes.get(report.key)
    if known is not None and known.report.preparing and report.ranks is None:
        report = msgspec.structs.replace(report, preparing=True)
    return real_receive(self, report, now)


real_ready = planned_changes._ready
real_eligible = gathering.eligible
real_prestart = Starter.prestart
real_receive = Coordinator.receive

DEFECTS = {
    "a newcomer that prepares interrupts the round": Defect(
        patched((planned_changes, "_ready"), by=all_that_are_eligible), master=1, etcd=4
    ),
    "a newcomer that has prepared is not taken in": Defect(
        patched((planned_changes, "_ready"), by=without_any_that_prepared), master=1
    ),
    "a coordinator ignores that a node is ready": Defect(
        patched((Coordinator, "receive"), by=take_for_a_repetition), master=0
    ),
    "a job that lacks nodes waits for those that prepare": Defect(
        patched((gathering, "eligible"), by=without_those_that_prepare), master=1, etcd=0
    ),
    "newcomers are gathered from when the first one joins": Defect(
        patched((KnownNode, "ready_at"), by=property(lambda self: self.joined_at)), master=150
    ),
    "a node that is ready sends no report": Defect(
        patched((Starter, "prestart"), by=prestart_silently), master=1, etcd=0
    ),
    "a node reports for ever that it prepares": Defect(
        patched((Starter, "is_prestarting"), by=property(lambda self: self._prestarting is not None)), master=0
    ),
    "a template that imports for ever is not given up": Defect(
        patched((template_client, "PREPARE_TIMEOUT"), by=1e9), master=12
    ),
}


@pytest.mark.parametrize(("defect", "place", "seed"), cases(DEFECTS))
def test_a_planted_defect_is_found(defect: Defect, place: str, seed: int) -> None:
    demand_found(defect.variant, partial(run, place=place), seed)


OF_SURVIVORS = {
    "a newcomer that prepares interrupts the round": 8,
    "a newcomer that has prepared is not taken in": 11,
    "a job that lacks nodes waits for those that prepare": 1,
}
"""Defects that are planted in jobs whose workers outlive their round too, each with a seed that finds it."""


@pytest.mark.parametrize(("name", "seed"), OF_SURVIVORS.items(), ids=OF_SURVIVORS)
def test_a_planted_defect_is_found_where_workers_outlive_their_round(name: str, seed: int) -> None:
    demand_found(DEFECTS[name].variant, partial(run, place="master", program=PreparingSurvivorsProgram), seed)
