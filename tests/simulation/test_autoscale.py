"""The autoscaler in jobs whose best size is known, beside the published rule in the same jobs."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from support.harness import only_long

from dlrover_run.features.autoscale.model import AutoscaleState
from simulation.autoscale.job import MAX_RECORD, Ours, run
from simulation.autoscale.played import play, share_of
from simulation.autoscale.worlds import HOUR, draw, stationary

WORLDS = 36
"""Worlds that `make test` plays: 10,000 are `(cd tests && python -m simulation.autoscale 0 --count 10000)`."""

STATIONARY = [seed for seed in range(200) if draw(seed).trouble == "none"]
"""Worlds whose nodes neither come nor go, and in which no size fails."""


def test_almost_all_jobs_end_with_the_best_size_and_few_do_by_the_published_rule() -> None:
    worlds = [play(seed) for seed in range(WORLDS)]
    published = sum(one.found_by_published for one in worlds) / WORLDS
    print(f"within 5 % of the best utility: {100 * share_of(worlds):.1f} %, the published rule {100 * published:.1f} %")
    assert share_of(worlds) >= 0.9
    assert published <= 0.7
    assert not any(one.outside for one in worlds)
    assert all(one.is_within_limit for one in worlds)
    assert all(one.settled is not False for one in worlds)


@pytest.mark.parametrize("seed", [*STATIONARY[:3], *only_long(*STATIONARY[3:20])])
def test_a_stationary_job_settles_once_with_few_changes(seed: int) -> None:
    account = run(stationary(draw(seed), hours=24.0))
    # The first is the size with which the job begins.
    assert len(account.changes) - 1 <= account.world.sizes.max_changes
    assert all(at < 12 * HOUR for at, _ in account.changes)
    assert isinstance(account.chooser, Ours)
    assert account.chooser.has_settled


@pytest.mark.parametrize("seed", [1, 14, *only_long(*range(20, 40))])
def test_a_coordinator_that_takes_over_at_any_moment_changes_nothing(seed: int) -> None:
    world = replace(draw(seed), hours=4.0)
    accounts = [run(replace(world, taken_over=taken_over)) for taken_over in (0.0, 2 * HOUR)]
    assert accounts[0].changes == accounts[1].changes


def test_the_state_of_a_long_job_stays_small() -> None:
    account = run(replace(draw(17), hours=3.0))
    assert isinstance(account.chooser, Ours)
    state: AutoscaleState = account.chooser.state
    assert len(msgspec.json.encode(state)) < MAX_RECORD
