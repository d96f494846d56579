"""Jobs with parameter servers whose best numbers are known: the choice stays within the bounds, changes one thing at a
time, takes no server away, ends after a bounded number of changes near the best, and then changes nothing."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from support.harness import only_long
from support.virtual_scaled import LIMITS, Model, ScaledCluster, autoscaled

from dlrover_run.features.autoscale.model import Sizes

QUIET = 900.0
"""Seconds for which nothing changes once the search has ended."""


def draw(seed: int) -> tuple[Model, int]:
    """The job of that seed, and the most workers that it may have."""
    random = Random(f"servers {seed}")
    model = Model(
        alone=random.choice((0.05, 0.1, 0.5)),
        served=random.choice((0.0, 0.01, 0.02, 0.05)),
        hot=random.random() < 0.25,
        size=random.choice((10.0, 10.0, 150.0)),
        noise=random.choice((0.0, 0.03, 0.08)),
    )
    return model, random.choice((1, 3, 7))


def utility(model: Model, workers: int, servers: int) -> float:
    return model.steps(workers + 1, servers) / (workers + 1) ** LIMITS.efficiency


@pytest.mark.parametrize("seed", [*range(3), *only_long(*range(3, 40))])
def test_a_stationary_job_ends_near_the_best_numbers_and_stays_there(seed: int) -> None:
    model, most = draw(seed)
    job = ScaledCluster(model, autoscaled(workers=(0, most)))
    job.run(3 * 3600, until=lambda: job.workers.condition.has_settled)
    assert job.workers.condition.has_settled, f"{model}: {job.workers}"
    # The load of the size that was found may ask for another server.
    job.run(QUIET)
    job.run(3600, until=lambda: job.workers.condition.has_settled)
    changes = list(job.history)
    job.run(QUIET)
    assert job.history == changes
    for (workers, servers), (next_workers, next_servers) in pairwise(changes):
        assert (workers == next_workers) != (servers == next_servers)
        assert next_servers >= servers
    assert all(0 <= workers <= most and 1 <= servers <= 3 for workers, servers in changes)
    each_search = Sizes(1, most + 1).max_changes + 1
    assert len(changes) <= 1 + changes[-1][1] * (each_search + 1)
    workers, servers = job.numbers
    best = max(utility(model, number, servers) for number in range(most + 1))
    assert utility(model, workers, servers) >= 0.9 * best
    if model.size == 150.0:
        assert servers >= 2
    assert not any(state.failures or state.memory_restarts for state in job.cluster.roles)
