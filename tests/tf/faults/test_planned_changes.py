"""Servers that are added and removed while the job runs: no step is lost, each block is used once, and a server that
dies meanwhile costs no more than it does at any other time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from job import PAUSES, RESTORED, MakeJob, both_ways, change_servers, check_exactly_once, check_learned

pytestmark = [pytest.mark.tensorflow, pytest.mark.long]


@both_ways
def test_one_two_one_three_servers_in_one_run(
    make_job: MakeJob, undisturbed: Callable[[str], float], script: str
) -> None:
    usual = undisturbed(script)
    job = make_job(script)
    node = job.start("--ps=1:3", "--workers=1")
    job.train(50)
    for before, servers in ((3, 1), (1, 2), (2, 1), (1, 3)):
        change_servers(job, node, servers, before)
    check_exactly_once(job.finish(node), usual)


@both_ways
def test_a_server_dies_while_the_next_ones_are_started(
    make_job: MakeJob, undisturbed: Callable[[str], float], script: str
) -> None:
    usual = undisturbed(script)
    job = make_job(script)
    node = job.start("--ps=1:2", "--workers=1")
    job.train(100)
    job.scale("--ps=1")
    node.until("is started while training goes on")
    node.kill("ps-0")
    assert int(node.until(RESTORED)[1]) >= 50
    check_learned(job.finish(node), usual)


@both_ways
def test_a_server_dies_while_training_pauses(
    make_job: MakeJob, undisturbed: Callable[[str], float], script: str
) -> None:
    usual = undisturbed(script)
    job = make_job(script)
    node = job.start("--ps=1:2", "--workers=1")
    job.train(100)
    job.scale("--ps=1")
    # Nobody leaves before the next step, which nobody is allowed.
    node.until(PAUSES)
    node.kill("ps-1")
    assert int(node.until(RESTORED)[1]) >= 50
    check_learned(job.finish(node), usual)


@both_ways
def test_a_server_that_is_coming_dies_and_training_goes_on(
    make_job: MakeJob, undisturbed: Callable[[str], float], script: str
) -> None:
    usual = undisturbed(script)
    job = make_job(script)
    node = job.start("--ps=1:2", "--workers=1")
    job.train(100)
    job.scale("--ps=1")
    node.until("is started while training goes on")
    node.kill("ps-2")
    node.until(PAUSES)
    job.allow(20)
    node.until("1 parameter server instead of 2; ")
    check_learned(job.finish(node), usual)
