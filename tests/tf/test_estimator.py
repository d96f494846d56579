"""What a script with `tf.estimator` keeps when its cluster changes, with nothing of tf-ps-run in it.

The test plays the agent: it gives the orders, and starts and kills the processes itself.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from interpreters import python_215
from scripted_cluster import Process, ScriptedCluster

pytestmark = pytest.mark.tensorflow

NEVER = str(10**9)


def train(cluster: ScriptedCluster, servers: int) -> tuple[Process, Process]:
    """Start servers, chief and a worker, and let the worker in."""
    cluster.new_version(servers)
    chief, worker = cluster.start("chief"), cluster.start("worker")
    chief.wait_for_message("restored")
    cluster.order(open=True)
    worker.wait_for_message("ready")
    return chief, worker


def test_a_planned_change_loses_no_step(tmp_path: Path) -> None:
    with ScriptedCluster(python_215(), "estimator_train.py", tmp_path, forked=True, SAVE_STEPS=NEVER) as cluster:
        chief, worker = train(cluster, 1)
        worker.wait_step(20)
        cluster.order(pause=True)
        assert worker.wait_end() == 75, worker.output
        cluster.order(save=True)
        assert chief.wait_end() == 75, chief.output
        saved = chief.messages("saved")[-1]
        assert saved["step"] >= max(chief.step, worker.step)
        assert "finished" not in chief.output + worker.output
        # Estimator has a worker wait for five seconds, and more for each that follows.
        assert "before starting training" not in worker.output
        chief, worker = train(cluster, 2)
        restored = chief.messages("restored")[0]
        assert (restored["how"], restored["step"], restored["path"]) == ("checkpoint", saved["step"], saved["path"])
        worker.wait_step(saved["step"] + 20)


@pytest.mark.long
def test_a_chief_goes_on_in_the_live_model(tmp_path: Path) -> None:
    with ScriptedCluster(python_215(), "estimator_train.py", tmp_path, SAVE_STEPS=NEVER) as cluster:
        chief, worker = train(cluster, 2)
        worker.wait_step(20)
        chief.kill()
        before = worker.step
        restored = cluster.start("chief").wait_for_message("restored")
        assert (restored["how"], restored["path"]) == ("live", None)
        assert restored["step"] >= before > 0
        worker.wait_step(restored["step"] + 20)


@pytest.mark.long
def test_an_evaluator_begins_and_comes_to_its_end_with_the_training(tmp_path: Path) -> None:
    with ScriptedCluster(python_215(), "estimator_train.py", tmp_path, LAST_STEP="60", SAVE_STEPS="20") as cluster:
        chief, worker = train(cluster, 1)
        evaluator = cluster.start("evaluator")
        evaluator.wait_for_message("ready")
        assert chief.wait_end() == 0, chief.output
        assert worker.wait_end() == 0, worker.output
        assert evaluator.wait_end() == 0, evaluator.output
        # Each of them may be at a step when another one takes the last.
        assert re.search(r"Saving dict for global step 6\d:", evaluator.output), evaluator.output
