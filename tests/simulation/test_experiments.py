"""Planted causes of failures, one at a time and two at once: no verdict is wrong, and none costs a restart."""

from __future__ import annotations

from itertools import combinations

import pytest
from support.harness import only_long

from simulation.experiments.jobs import CAUSES, planted_job

BUDGET = 5


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("cause", CAUSES)
def test_no_verdict_on_one_planted_cause_is_wrong(cause: str, size: int) -> None:
    for seed in range(60):
        found = planted_job((cause,), size, BUDGET, seed, experiments=True)
        assert False not in found.verdicts, seed
        assert found.restarts <= BUDGET


@pytest.mark.parametrize("cause", ["gpu", "data"])
def test_most_causes_on_four_nodes_are_found(cause: str) -> None:
    found = [planted_job((cause,), 4, BUDGET, seed, experiments=True) for seed in range(60)]
    assert sum(bool(each.verdicts) for each in found) > 45


def test_a_flaky_job_has_as_many_restarts_as_without_and_no_verdict() -> None:
    for seed in range(200):
        found, without = (planted_job(("flaky",), 2, BUDGET, seed, experiments=each) for each in (True, False))
        assert found.verdicts == []
        assert (found.restarts, found.finished) == (without.restarts, without.finished)


@only_long
@pytest.mark.parametrize("causes", combinations(CAUSES, 2), ids="+".join)
def test_of_two_causes_at_once_the_wrong_verdicts_are_few(causes: tuple[str, str]) -> None:
    wrong = sum(False in planted_job(causes, 4, BUDGET, seed, experiments=True).verdicts for seed in range(200))
    assert wrong <= 2
