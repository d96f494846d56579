"""Tasks that are killed, hang, or are replaced. After the loss of a server the job returns to the newest checkpoint,
and every block is used. A planned change, and the death of a worker or of the chief, lose no step and use each block
once.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from job import (
    GRAPH,
    PAUSES,
    RESTORED,
    STRATEGY,
    MakeJob,
    Node,
    both_ways,
    change_servers,
    check_exactly_once,
    check_learned,
)

pytestmark = [pytest.mark.tensorflow, pytest.mark.long]

LIVE = r"goes on with the live model at step (\d+); no step lost"

Usual = Callable[[str], float]
"""Returns the AUC of a script without faults."""


@both_ways
def test_all_servers_die_at_once(make_job: MakeJob, undisturbed: Usual, script: str) -> None:
    usual = undisturbed(script)
    job = make_job(script)
    node = job.start("--ps=3", "--workers=1")
    job.train(100)
    node.kill("ps-0", "ps-1", "ps-2")
    assert int(node.until(RESTORED)[1]) >= 50
    check_learned(job.finish(node), usual)
    assert node.servers("ps-3") == node.servers("ps-0")


@both_ways
def test_servers_die_one_after_the_other_and_the_job_continues_each_time(
    make_job: MakeJob, undisturbed: Usual, script: str
) -> None:
    usual = undisturbed(script)
    job = make_job(script)
    node = job.start("--ps=2", "--workers=1")
    job.train(100)
    node.kill("ps-0")
    node.until(RESTORED)
    job.train(150, since=50)
    node.kill("ps-3")
    assert int(node.until(RESTORED)[1]) >= 100
    check_learned(job.finish(node), usual)


@both_ways
def test_a_stopped_server_gives_no_error_and_is_replaced(make_job: MakeJob, undisturbed: Usual, script: str) -> None:
    usual = undisturbed(script)
    job = make_job(script)
    node = job.start("--ps=2", "--workers=1")
    job.train(100)
    node.kill("ps-0", with_signal=signal.SIGSTOP)
    job.allow(50)
    node.until(r"ps-0 \(rank 0\) on .* does not answer any more")
    assert int(node.until(RESTORED)[1]) >= 50
    check_learned(job.finish(node), usual)


@both_ways
def test_a_server_dies_while_a_checkpoint_is_written(make_job: MakeJob, undisturbed: Usual, script: str) -> None:
    usual = undisturbed(script)
    job = make_job(script, PACE_SAVE="100")
    node = job.start("--ps=2", "--workers=1")
    job.allow(200)
    node.until("a checkpoint is begun at step")
    # The other server writes its part, and this one cannot.
    node.kill("ps-1", with_signal=signal.SIGSTOP)
    job.allow_save()
    node.kill("ps-1")
    assert 50 <= int(node.until(RESTORED)[1]) < 100
    check_learned(job.finish(node), usual)


@pytest.mark.parametrize(("backend", "script"), [("master", GRAPH), ("master", STRATEGY), ("etcd", GRAPH)])
def test_a_server_moves_to_another_address_when_its_node_is_lost(
    make_job: MakeJob,
    undisturbed: Usual,
    backend: str,
    script: str,
    free_port: int,
    request: pytest.FixtureRequest,
) -> None:
    usual = undisturbed(script)
    endpoint = f"127.0.0.1:{free_port}" if backend == "master" else request.getfixturevalue("etcd").endpoints
    job = make_job(script)

    def start(role: str, name: str, **env: str) -> Node:
        conf = "lost_after=1,keep_alive_interval=1"
        if backend == "master":
            conf += f",is_host={int(role == 'chief')}"
        place = (f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={conf}")
        return job.start(f"--role={role}", "--ps=1", "--workers=1", *place, name=name, env=env)

    chief, worker, lost = start("chief", "chief"), start("worker", "worker"), start("ps", "lost", NODE_ID="0")
    lost.up("ps-0")
    spare = start("ps", "spare", NODE_ID="1")
    job.train(100)
    spare.search("tf-ps-run: ")
    lost.lose()
    spare.up("ps-1")
    assert chief.servers("chief-1") != chief.servers("chief-0")
    check_learned(job.finish(chief, worker, spare), usual)


@both_ways
def test_one_two_one_three_servers_in_one_run(make_job: MakeJob, undisturbed: Usual, script: str) -> None:
    usual = undisturbed(script)
    job = make_job(script)
    node = job.start("--ps=1:3", "--workers=1")
    job.train(50)
    for before, servers in ((3, 1), (1, 2), (2, 1), (1, 3)):
        change_servers(job, node, servers, before)
    check_exactly_once(job.finish(node), usual)


@both_ways
def test_a_server_dies_while_training_pauses_for_a_planned_change(
    make_job: MakeJob, undisturbed: Usual, script: str
) -> None:
    usual = undisturbed(script)
    job = make_job(script)
    node = job.start("--ps=1:2", "--workers=1")
    job.train(100)
    job.scale("--ps=1")
    # No task leaves before the next step, which is not allowed.
    node.until(PAUSES)
    node.kill("ps-1")
    assert int(node.until(RESTORED)[1]) >= 50
    check_learned(job.finish(node), usual)


@both_ways
def test_only_workers_that_die_are_restarted_and_each_block_is_used_once(
    make_job: MakeJob, undisturbed: Usual, script: str
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
def test_a_chief_that_dies_twice_continues_with_the_live_model_each_time(
    make_job: MakeJob, undisturbed: Usual, script: str
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
