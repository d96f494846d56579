"""Workers and chiefs that die: only they are started again, the model is never rolled back for it, and each block is
used once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from job import GRAPH, STRATEGY, MakeJob, check_exactly_once, check_learned

pytestmark = pytest.mark.tensorflow

LIVE = r"goes on with the live model at step (\d+); no step lost"


def test_a_server_a_worker_and_the_chief_die_in_one_run_and_servers_are_removed(make_job: MakeJob) -> None:
    job = make_job(GRAPH)
    node = job.start("--ps=1:2", "--workers=1")
    job.train(60)
    node.kill("ps-1")
    assert int(node.until(r"Restoring parameters from .*/model\.ckpt-(\d+)")[1]) >= 50
    job.train(120, since=50)
    node.kill("worker-1")
    node.up("worker-2")
    node.kill("chief-1")
    assert int(node.until(LIVE)[1]) >= 120
    job.scale("--ps=1")
    job.allow(100)
    saved = node.until(r"1 parameter server instead of 2; chief-2 saved at step (\d+)")
    assert node.until(r"has restored .*, and goes on after step (\d+)")[1] == saved[1]
    check_learned(job.finish(node))


@pytest.mark.long
@pytest.mark.parametrize("script", [GRAPH, STRATEGY])
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


@pytest.mark.long
@pytest.mark.parametrize("script", [GRAPH, STRATEGY])
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


@pytest.mark.long
@pytest.mark.parametrize("script", [GRAPH, STRATEGY])
def test_workers_are_added_and_dismissed_while_the_others_train(
    make_job: MakeJob, undisturbed: Callable[[str], float], script: str
) -> None:
    usual = undisturbed(script)
    job = make_job(script)
    node = job.start("--ps=2", "--workers=1:3")
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
