"""Data shards with real TensorFlow: what was used is counted in the model itself."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from data_cluster import DataCluster
from scripted_cluster import BOOT, SCRIPTS, Process

pytestmark = pytest.mark.tensorflow

EPOCHS = 12
"""Epochs of 16 batches."""


def counted(chief: Process) -> tuple[int, int]:
    """How often the least and the most used row was trained."""
    assert chief.wait_end() == 0, chief.output
    seen = re.search(r"seen=(\d+)\.\.(\d+)", chief.output)
    assert seen is not None, chief.output
    return int(seen[1]), int(seen[2])


@pytest.fixture
def cluster(tf221: Path, tmp_path: Path) -> DataCluster:
    return DataCluster(
        tf221,
        "strategy_train.py",
        tmp_path,
        workers=2,
        SHARDS="1",
        EPOCHS=str(EPOCHS),
        STEP_SECONDS="0.02",
        SAVE_EVERY="25",
    )


def begin(cluster: DataCluster, servers: int) -> Process:
    cluster.new_version(servers)
    for rank in range(2):
        cluster.start("worker", rank)
    return cluster.start("chief", TF_PS_VERSION=str(cluster.version))


@pytest.mark.long
def test_with_the_strategy_each_row_is_used_once_an_epoch_over_planned_changes(cluster: DataCluster) -> None:
    with cluster:
        chief = begin(cluster, 1)
        chief.wait_step(40)
        cluster.order(pause=True)
        assert chief.wait_end() == 75, chief.output
        chief = begin(cluster, 2)
        chief.wait_step(100)
        cluster.order(pause=True)
        assert chief.wait_end() == 75, chief.output
        assert counted(begin(cluster, 1)) == (EPOCHS, EPOCHS)


@pytest.mark.long
def test_with_the_strategy_no_row_is_lost_when_servers_and_chiefs_die(cluster: DataCluster) -> None:
    with cluster:
        chief = begin(cluster, 2)
        chief.wait_step(40)
        chief.kill()
        chief = cluster.start("chief", TF_PS_VERSION=str(cluster.version))
        chief.wait_for_message("saved", lambda message: message["step"] > 60)
        next(one for one in reversed(cluster._processes) if one.name == "ps-1").kill()
        least, most = counted(begin(cluster, 1))
        assert least >= EPOCHS
        assert most <= EPOCHS + 2, "what two workers had in their hands when the chief died may come twice"


@pytest.mark.long
def test_with_checkpoints_on_another_file_system_the_data_goes_on_where_the_model_does(
    tf221: Path, tmp_path: Path
) -> None:
    """By its scheme TensorFlow alone reaches it, though it is this machine's, so that each process finds it."""
    remote = f"file://{tmp_path}/model"
    cluster = DataCluster(
        tf221, "strategy_train.py", tmp_path, SHARDS="1", EPOCHS="4", STEP_SECONDS="0.02", MODEL_DIR=remote
    )
    with cluster:
        cluster.new_version(1)
        cluster.start("worker")
        chief = cluster.start("chief")
        chief.wait_step(20)
        cluster.order(pause=True)
        assert chief.wait_end() == 75, chief.output
        assert list((tmp_path / "model").glob("*.shards.json")), chief.output

        cluster.new_version(2)
        cluster.start("worker")
        chief = cluster.start("chief", TF_PS_VERSION="2")
        assert counted(chief) == (4, 4), chief.output


@pytest.mark.long
def test_the_state_of_the_data_is_kept_where_only_tensorflow_reaches_it(tf221: Path) -> None:
    done = subprocess.run(
        [str(tf221), str(BOOT), str(SCRIPTS / "remote_state.py")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "kept and given back" in done.stdout


def test_a_dataset_that_loads_ahead_gives_every_batch_once(tf221: Path) -> None:
    done = subprocess.run(
        [str(tf221), str(BOOT), str(SCRIPTS / "shards_dataset.py")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "eager 40 rows, sum 780; reported at the third batch: [(0, 4)]" in done.stdout
    assert "graph 40 rows, sum 780" in done.stdout
