"""The policies for stalls and stragglers change nothing in jobs without any: whole jobs in virtual time, with them and
without."""

from __future__ import annotations

from random import Random

import pytest
from harness import only_long
from msgspec.structs import replace

from dlrover_run.coordination.combined_records import with_part
from dlrover_run.coordination.rules import JobRules
from dlrover_run.policies.stall.rules import StallRules
from dlrover_run.policies.straggler.rules import StragglerRules
from simulation.program import Outcome, Program
from simulation.scenario import simulate
from simulation.seeds import PLACES
from simulation.torch.program import TorchProgram


class WatchedProgram(TorchProgram):
    """The same jobs, whose stalls and stragglers are looked for."""

    def rules(self, random: Random) -> JobRules:
        """The same rules, with the policies."""
        rules = super().rules(random)
        with_stalls = with_part(rules.policy, StallRules(watched=1))
        return replace(rules, policy=with_part(with_stalls, StragglerRules(watched=1)))


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
