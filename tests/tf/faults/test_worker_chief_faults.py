"""Workers and chiefs that die: only they are started again, the model is never rolled back for it, and each block is
used once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from job import MakeJob, both_ways, check_exactly_once

pytestmark = [pytest.mark.tensorflow, pytest.mark.long]

LIVE = r"goes on with the live model at step (\d+); no step lost"


@both_ways
def test_of_workers_that_die_only_they_are_started_again_and_each_block_is_used_once(
    make_job: MakeJob, undisturbed: Callable[[str], float], script: str
) -> None:
    usual = undisturbed(script)
    job = make_job(script)
    node = job.start("--ps=2", "--workers=2")
    job.train(100)
    node.kill("worker-0")
    node.up("worker-2")
    job.train(150, since=100)
    node.kill("worker-1", "worker-2")
    node.up("worker-3")
    node.up("worker-4")
    check_exactly_once(job.finish(node), usual)
    assert node.others_stayed("ps-0", "ps-1", "chief-0")


@both_ways
def test_a_chief_that_dies_twice_goes_on_in_the_live_model_each_time(
    make_job: MakeJob, undisturbed: Callable[[str], float], script: str
) -> None:
    usual = undisturbed(script)
    job = make_job(script)
    node = job.start("--ps=2", "--workers=1")
    job.train(100)
    node.kill("chief-0")
    assert int(node.until(LIVE)[1]) == 100
    job.train(150, since=100)
    node.kill("chief-1")
    assert int(node.until(LIVE)[1]) == 150
    check_exactly_once(job.finish(node), usual)
    assert node.others_stayed("ps-0", "ps-1", "worker-0")


@both_ways
def test_workers_are_added_and_dismissed_while_the_others_train(
    make_job: MakeJob, undisturbed: Callable[[str], float], script: str
) -> None:
    usual = undisturbed(script)
    job = make_job(script)
    node = job.start("--ps=2", "--workers=1:3")
    node.up("worker-2")
    job.scale("--workers=1")
    node.until("1 worker is wanted, so .* leave")
    job.train(100)
    job.scale("--workers=3")
    node.up("worker-3")
    node.up("worker-4")
    job.train(150, since=100)
    job.scale("--workers=1")
    node.until("1 worker is wanted, so .* leave")
    check_exactly_once(job.finish(node), usual)
    assert node.others_stayed("ps-0", "ps-1", "chief-0", "worker-0")
