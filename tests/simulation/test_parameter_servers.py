"""Whole jobs with parameter servers over the real clients of a master and of etcd, in virtual time."""

from __future__ import annotations

from functools import partial

import pytest
from cluster_simulation.test_cluster_simulation import BROKEN

from simulation.etcd_scenario import EtcdScenario
from simulation.parameter_servers.program import ServersProgram
from simulation.scenario import MasterScenario, Scenario, simulate
from simulation.seeds import run_seeds
from simulation.timeline import Broken

SEEDS: dict[type[Scenario], int] = {MasterScenario: 20, EtcdScenario: 8}
"""Seeds of the ordinary run."""

NAMES = ["master", "etcd"]
LONG_CHUNK = 1000

AT_ONCE = [
    "a server is replaced within its version",
    "the loss of a server changes nothing",
    "the gate never opens",
    "the end of the chief is not noticed",
    "an id is given again",
    "what was started counts as ready",
    "capacity has no bound",
]
"""Planted defects that the first seed with a master finds."""


@pytest.mark.parametrize(("kind", "seeds"), SEEDS.items(), ids=NAMES)
def test_every_law_of_parameter_servers_holds(kind: type[Scenario], seeds: int) -> None:
    outcomes = run_seeds(partial(simulate, kind=kind, program=ServersProgram), 0, seeds)
    assert {"finished", "failed"} <= {outcome.phase for outcome in outcomes}
    assert sum(outcome.versions for outcome in outcomes) >= seeds


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(10))
@pytest.mark.parametrize("kind", SEEDS, ids=NAMES)
def test_every_law_of_parameter_servers_holds_for_ten_thousand_seeds(kind: type[Scenario], chunk: int) -> None:
    run_seeds(partial(simulate, kind=kind, program=ServersProgram), SEEDS[kind] + chunk * LONG_CHUNK, LONG_CHUNK)


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_planted_defect_of_the_cluster_is_found(name: str) -> None:
    with BROKEN[name](), pytest.raises(Broken):
        simulate(0, None, MasterScenario, ServersProgram)
