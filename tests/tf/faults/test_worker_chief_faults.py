"""Workers and chiefs that die: only they are started again, the model is never rolled back for it, and each block is
used once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from job import GRAPH, RESTORED, MakeJob, both_ways, change_servers, check_exactly_once, check_learned

pytestmark = pytest.mark.tensorflow

LIVE = r"goes on with the live model at step (\d+); no step lost"


@pytest.mark.long
def test_a_server_a_worker_and_the_chief_die_in_one_run_and_servers_are_removed(make_job: MakeJob) -> None:
    job = make_job(GRAPH)
    node = job.start("--ps=1:2", "--workers=1")
    job.train(100)
    node.kill("ps-1")
    restored = int(node.until(RESTORED)[1])
    assert restored >= 50
    job.train(restored + 70, since=restored)
    node.kill("worker-1")
    node.up("worker-2")
    node.kill("chief-1")
    assert int(node.until(LIVE)[1]) >= restored + 70
    change_servers(job, node, 1, before=2)
    check_learned(job.finish(node))


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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
