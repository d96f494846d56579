"""Jobs whose workers outlive their round, in virtual time: every invariant holds, and defects of the product are
found."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.features.survivors import observer, worker_record
from dlrover_run.features.survivors.model import SurvivorsReport
from dlrover_run.features.survivors.worker_record import Due, Step, WorkerRecord
from simulation.nights import first_seed, night_parts
from simulation.program import Outcome
from simulation.scenario import simulate
from simulation.seeds import PLACES, Defect, cases, demand_found, patched, run_seeds
from simulation.survivors import nodes
from simulation.survivors.program import SurvivorsProgram

SEEDS = {"master": 30, "etcd": 8}
"""The seeds of `make test`; `make test-long` runs 3,000 others of each place."""


class CountingProgram(SurvivorsProgram):
    """Counts over all runs of a test what the invariants are about."""

    runs: list[SurvivorsProgram]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.runs.append(self)


@pytest.fixture(autouse=True)
def runs() -> list[SurvivorsProgram]:
    CountingProgram.runs = []
    return CountingProgram.runs


def run(seed: int, place: str) -> Outcome:
    return simulate(seed, kind=PLACES[place], program=CountingProgram)


@pytest.mark.parametrize("place", SEEDS)
def test_every_invariant_holds_and_workers_keep_their_processes(place: str, runs: list[SurvivorsProgram]) -> None:
    outcomes = run_seeds(partial(run, place=place), 0, SEEDS[place])
    assert {"finished", "failed"} <= {outcome.phase for outcome in outcomes}
    # The invariants only show something for jobs in which something has happened.
    assert sum(program.groups_in_place for program in runs) > SEEDS[place] / 3
    assert sum(program.kept for program in runs) > SEEDS[place] / 10
    assert place != "master" or any(program.given_up for program in runs)


def test_the_look_of_an_operator_is_no_decision_of_a_coordinator() -> None:
    """A seed in which one reads the job twice, longer apart than until a deadline of the first look."""
    run_seeds(partial(run, place="etcd"), 6013, 1)


@pytest.mark.parametrize("part", night_parts(3000, 150))
@pytest.mark.parametrize("place", SEEDS)
def test_every_invariant_holds_for_the_seeds_of_the_night(place: str, part: int) -> None:
    run_seeds(partial(run, place=place), first_seed() + part, 150)


def offers_of_some(plan: Any, nodes: Any) -> list[SurvivorsReport] | None:
    states = [state for member in plan.members if (state := nodes.get(member.key)) and state.connected]
    parts = [SurvivorsReport.get(state.report.parts) for state in states if state.report.in_round(plan.key)]
    return [part for part in parts if part.key == plan.key and part.handles] or None


def part_with_old_handles(workers: Any, expected: int, part: Any, port: int) -> SurvivorsReport:
    whole = real_part(workers, expected, part, port)
    handles = tuple(worker.handle for worker in workers)
    return replace(whole, handles=handles) if len(workers) == expected and all(handles) else whole


real_part = worker_record.node_part


def ask_anew(self: WorkerRecord, key: RoundKey, now: float) -> WorkerRecord:
    return replace(self, asked=key, asked_at=now)


def survive_any_store(worker: WorkerRecord, part: Any) -> bool:
    return worker.able


DEFECTS: dict[str, Defect] = {
    "a uuid is used again": Defect(patched((observer, "uuid_of"), by=lambda key: 7), master=0),
    "a group is formed of some workers of the round": Defect(
        patched((observer, "offers"), by=offers_of_some), master=0
    ),
    "a handle is reported for two rounds": Defect(patched((nodes, "node_part"), by=part_with_old_handles), master=2),
    "a worker that does not answer is waited for": Defect(
        patched((worker_record, "_within"), by=lambda since, timeout, now, otherwise: Due(Step.WAIT)), master=0
    ),
    "each round gives such a worker more time": Defect(patched((WorkerRecord, "note_asked"), by=ask_anew), master=0),
    "every worker restarts": Defect(patched((worker_record, "can_survive"), by=lambda worker, part: False), master=0),
    "a worker survives its store": Defect(patched((worker_record, "can_survive"), by=survive_any_store), master=17),
    "the others wait for a worker that cannot": Defect(
        patched((observer, "reasons_against"), by=lambda plan, state, members: ()), master=13
    ),
}

SAMPLE = ("a uuid is used again", "a handle is reported for two rounds")
"""Defects that `make test` plants too."""


@pytest.mark.parametrize(("defect", "place", "seed"), cases({name: DEFECTS[name] for name in SAMPLE}))
def test_a_planted_defect_is_found(defect: Defect, place: str, seed: int) -> None:
    demand_found(defect.variant, partial(run, place=place), seed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("defect", "place", "seed"), cases({name: one for name, one in DEFECTS.items() if name not in SAMPLE})
)
def test_every_planted_defect_is_found(defect: Defect, place: str, seed: int) -> None:
    demand_found(defect.variant, partial(run, place=place), seed)
