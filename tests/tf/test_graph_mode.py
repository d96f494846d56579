"""What a script of TensorFlow 1, with sessions or with `tf.estimator`, keeps when its cluster changes.

The test acts as the agent: it sends the orders, and starts and kills the processes itself. The scripts use nothing of
tf-ps-run.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from interpreters import each_tensorflow, tensorflow_215
from scripted_cluster import Process, ScriptedCluster, quiet_port
from support.harness import only_long

pytestmark = pytest.mark.tensorflow

GRAPH, ESTIMATOR = "graph_train.py", "estimator_train.py"

NEVER = str(10**9)


def checkpoints(model: Path) -> list[int]:
    """The steps of the checkpoints in a directory."""
    return sorted(int(path.stem.rpartition("-")[2]) for path in model.glob("model.ckpt-*.index"))


def train(cluster: ScriptedCluster, servers: int) -> tuple[Process, Process]:
    """Start servers, chief and a worker, and let the worker start to train."""
    cluster.new_version(servers)
    chief, worker = cluster.start("chief"), cluster.start("worker")
    chief.wait_for_message("restored")
    cluster.order(open=True)
    worker.wait_for_message("ready")
    return chief, worker


def leave(cluster: ScriptedCluster, chief: Process, worker: Process) -> int:
    """The planned end of a version: the worker leaves, the chief saves and leaves. Return the step of the model."""
    cluster.order(pause=True)
    assert worker.wait_end() == 75, worker.output
    cluster.order(save=True)
    assert chief.wait_end() == 75, chief.output
    step = chief.messages("saved")[-1]["step"]
    assert step >= max(chief.step, worker.step)
    assert checkpoints(cluster.model)[-1] == step
    assert "finished" not in chief.output + worker.output
    return int(step)


def copy_of(cluster: ScriptedCluster, step: int, folder: Path) -> str:
    """A copy of a checkpoint, which the next version will not overwrite."""
    folder.mkdir()
    for path in cluster.model.glob(f"model.ckpt-{step}.*"):
        shutil.copy(path, folder)
    return str(folder / f"model.ckpt-{step}")


@pytest.mark.long
@each_tensorflow
def test_servers_are_added_and_removed_without_the_loss_of_a_step(tensorflow: Path, tmp_path: Path) -> None:
    """Each variable and slot stays what it was."""
    with ScriptedCluster(tensorflow, GRAPH, tmp_path, SAVE_STEPS=NEVER) as cluster:
        chief, worker = train(cluster, 1)
        worker.wait_step(20)
        step = leave(cluster, chief, worker)
        for servers in (2, 1, 3):
            reference = copy_of(cluster, step, tmp_path / f"reference-{step}")
            cluster.new_version(servers)
            chief, worker = cluster.start("chief", REFERENCE=reference), cluster.start("worker")
            restored = chief.wait_for_message("restored")
            assert (restored["how"], restored["step"], restored["skipped"]) == ("checkpoint", step, [])
            assert restored["path"].endswith(f"model.ckpt-{step}")
            # By its first step the chief has compared the model, which no other process has changed until then.
            chief.wait_for_message("step")
            assert worker.messages("ready") == []
            cluster.order(open=True)
            worker.wait_step(step + 20)
            assert f"Restoring parameters from {restored['path']}" in chief.output
            assert "compared 3 variables, different: []" in chief.output
            step = leave(cluster, chief, worker)


@pytest.mark.long
@each_tensorflow
def test_a_chief_continues_with_the_live_model_and_a_worker_may_move(tensorflow: Path, tmp_path: Path) -> None:
    with ScriptedCluster(tensorflow, GRAPH, tmp_path, SAVE_STEPS=NEVER) as cluster:
        chief, worker = train(cluster, 2)
        worker.wait_step(20)
        chief.kill()
        before = worker.step
        again = cluster.start("chief")
        restored = again.wait_for_message("restored")
        assert (restored["how"], restored["path"]) == ("live", None)
        assert restored["step"] >= before > 0
        # It saves the model that it found before it trains: there was only the first step to return to.
        assert checkpoints(cluster.model)[0] == 0
        assert again.wait_for_message("saved")["step"] >= before
        worker.wait_step(restored["step"] + 20)
        worker.kill()
        elsewhere = cluster.start("worker", address=f"127.0.0.1:{quiet_port()}")
        elsewhere.wait_for_message("ready")
        elsewhere.wait_step(again.step + 20)
        assert again.popen.poll() is None
        assert "An error was raised" not in again.output


@pytest.mark.parametrize(
    ("tensorflow", "forked"), [("2.21", True), *only_long(("2.15", False))], indirect=["tensorflow"]
)
def test_the_death_of_a_server_loses_the_steps_after_the_last_complete_checkpoint(
    tensorflow: Path, forked: bool, tmp_path: Path
) -> None:
    """The model is read from the newest complete checkpoint; a truncated one is skipped and reported."""
    with ScriptedCluster(tensorflow, GRAPH, tmp_path, forked=forked, SAVE_STEPS="10") as cluster:
        _, worker = train(cluster, 2)
        worker.wait_step(40)
        cluster.new_version(0)
        whole, damaged = checkpoints(cluster.model)[-2:]
        data = next(cluster.model.glob(f"model.ckpt-{damaged}.data-*"))
        os.truncate(data, data.stat().st_size - 1)
        reference = copy_of(cluster, whole, tmp_path / "reference")
        cluster.new_version(2)
        chief = cluster.start("chief", REFERENCE=reference)
        restored = chief.wait_for_message("restored")
        # The model may be a step ahead of the name, because the worker continues while the name is chosen.
        assert (restored["how"], Path(restored["path"]).name) == ("checkpoint", f"model.ckpt-{whole}")
        (skipped,) = restored["skipped"]
        assert f"model.ckpt-{damaged} is not complete ({data.name} has " in skipped
        chief.wait_step(whole + 5)
        assert "compared 3 variables, different: []" in chief.output
        # A worker that joins while the cluster is about to change again leaves before its first step.
        worker = cluster.start("worker")
        worker.wait_for_message("hello")
        cluster.order(pause=True)
        assert worker.wait_end() == 75, worker.output
        assert worker.messages("ready") + worker.messages("step") == []


@pytest.mark.long
def test_checksums_of_the_data_are_compared(tensorflow: Path, tmp_path: Path) -> None:
    with ScriptedCluster(tensorflow, GRAPH, tmp_path, SAVE_STEPS="10") as cluster:
        chief, _ = train(cluster, 1)
        chief.wait_step(40)
        cluster.new_version(0)
        whole, damaged = checkpoints(cluster.model)[-2:]
        data = next(cluster.model.glob(f"model.ckpt-{damaged}.data-*"))
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
        cluster.new_version(1)
        restored = cluster.start("chief").wait_for_message("restored")
        assert Path(restored["path"]).name == f"model.ckpt-{whole}"
        assert "hecksum" in restored["skipped"][0]


@pytest.mark.long
def test_when_the_chief_has_finished_a_worker_exits_too(tensorflow: Path, tmp_path: Path) -> None:
    with ScriptedCluster(tensorflow, GRAPH, tmp_path) as cluster:
        chief, worker = train(cluster, 1)
        worker.wait_step(20)
        cluster.order(ending=True)
        assert worker.wait_end() == 0, worker.output
        assert "finished at" in worker.output
        # The order to end does not apply to the chief: it exits when its own work is done.
        chief.wait_step(worker.step + 20)


@pytest.mark.long
def test_a_worker_that_waits_for_data_leaves_while_it_waits(tensorflow: Path, tmp_path: Path) -> None:
    with ScriptedCluster(tensorflow, GRAPH, tmp_path) as cluster:
        cluster.new_version(1)
        chief, worker = cluster.start("chief"), cluster.start("worker", STEP_SECONDS="1000")
        chief.wait_for_message("restored")
        cluster.order(open=True)
        worker.wait_for_message("step")
        cluster.order(pause=True)
        assert worker.wait_end() == 75, worker.output


@tensorflow_215
def test_a_planned_change_loses_no_step_of_an_estimator(tensorflow: Path, tmp_path: Path) -> None:
    with ScriptedCluster(tensorflow, ESTIMATOR, tmp_path, forked=True, SAVE_STEPS=NEVER) as cluster:
        chief, worker = train(cluster, 1)
        worker.wait_step(20)
        step = leave(cluster, chief, worker)
        # Estimator delays a worker by five seconds, and by more for each further one.
        assert "before starting training" not in worker.output
        chief, worker = train(cluster, 2)
        restored = chief.messages("restored")[0]
        assert (restored["how"], restored["step"]) == ("checkpoint", step)
        worker.wait_step(step + 20)


@pytest.mark.long
@tensorflow_215
def test_a_chief_continues_with_the_live_model_of_an_estimator(tensorflow: Path, tmp_path: Path) -> None:
    with ScriptedCluster(tensorflow, ESTIMATOR, tmp_path, SAVE_STEPS=NEVER) as cluster:
        chief, worker = train(cluster, 2)
        worker.wait_step(20)
        chief.kill()
        before = worker.step
        restored = cluster.start("chief").wait_for_message("restored")
        assert (restored["how"], restored["path"]) == ("live", None)
        assert restored["step"] >= before > 0
        worker.wait_step(restored["step"] + 20)


@pytest.mark.long
@tensorflow_215
def test_an_evaluator_starts_and_exits_with_the_training(tensorflow: Path, tmp_path: Path) -> None:
    with ScriptedCluster(tensorflow, ESTIMATOR, tmp_path, LAST_STEP="60", SAVE_STEPS="20") as cluster:
        chief, worker = train(cluster, 1)
        evaluator = cluster.start("evaluator")
        evaluator.wait_for_message("ready")
        for process in (chief, worker, evaluator):
            assert process.wait_end() == 0, process.output
        # Each of them may be at a step when another one takes the last.
        assert re.search(r"Saving dict for global step 6\d:", evaluator.output), evaluator.output
