"""Single seeds of the simulation, for the mutation run: each is a test of its own, so only those that execute a line
are run against its mutants. `make test` has more of them, many in one test."""

from __future__ import annotations

import pytest
from simulation.parameter_servers.program import ServersProgram
from simulation.parameter_servers.scaled import ScaledServersProgram
from simulation.program import Program
from simulation.scenario import simulate
from simulation.seeds import PLACES
from simulation.survivors.program import PreparingSurvivorsProgram, SurvivorsProgram
from simulation.torch.program import PreparingProgram, TorchProgram

SEEDS: dict[type[Program], int] = {
    TorchProgram: 10,
    PreparingProgram: 3,
    SurvivorsProgram: 4,
    PreparingSurvivorsProgram: 2,
    ServersProgram: 6,
    ScaledServersProgram: 3,
}
"""How many seeds of each program, with a master and with etcd."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("program", "seed"),
    [pytest.param(program, seed, id=f"{program.__name__}-{seed}") for program, n in SEEDS.items() for seed in range(n)],
)
def test_invariants_hold(program: type[Program], seed: int, place: str) -> None:
    simulate(seed, kind=PLACES[place], program=program)
