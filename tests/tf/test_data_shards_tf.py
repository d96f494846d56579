"""Data shards with real TensorFlow: the model itself counts what was used."""

from __future__ import annotations

import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from scripted_cluster import BOOT, SCRIPTS, Process, ScriptedCluster, run_booted

from tf_ps_runner.agent.protocol import Answer, answer_line, read_line
from tf_ps_runner.agent.queue_service import QueueService
from tf_ps_runner.cluster.model import Role, TaskKey

pytestmark = pytest.mark.tensorflow

EPOCHS = 12
"""Epochs of 16 batches."""


class DataCluster(ScriptedCluster):
    """The queues start anew with each version, as those of the chief's agent."""

    def __init__(self, python: Path, script: str, folder: Path, **more: Any) -> None:
        super().__init__(python, script, folder, **more)
        self._service = QueueService()
        self._lock = threading.Lock()

    def new_version(self, servers: int) -> None:
        """A new set of servers, and new queues."""
        super().new_version(servers)
        with self._lock:
            self._service.reset()

    def on_request(self, process: Process, line: socket.socket, text: bytes) -> None:
        """Answer for the queues."""
        message = read_line(text)
        assert isinstance(message, tuple), text
        number, request = message

        def reply(answer: Answer) -> None:
            try:
                line.sendall(answer_line(number, answer))
            except OSError:
                return

        with self._lock:
            self._service.ask(self._key(process), request, reply)

    def on_disconnect(self, process: Process) -> None:
        """Return the parts that it held."""
        with self._lock:
            self._service.gone(self._key(process))

    def _key(self, process: Process) -> TaskKey:
        return TaskKey(Role(process.name.split("-")[0]), self._processes.index(process))


def counted(chief: Process) -> tuple[int, int]:
    """How often the least and the most used row was trained."""
    assert chief.wait_end() == 0, chief.output
    seen = re.search(r"seen=(\d+)\.\.(\d+)", chief.output)
    assert seen is not None, chief.output
    return int(seen[1]), int(seen[2])


@pytest.fixture
def cluster(tensorflow: Path, tmp_path: Path) -> DataCluster:
    return DataCluster(
        tensorflow,
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
        assert most <= EPOCHS + 2, "the batches of two workers at the death of the chief may be used twice"


def run_script(python: Path, name: str) -> str:
    """The output of a script that runs to its end."""
    done = run_booted(python, BOOT, SCRIPTS / name)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_state_of_the_data_is_kept_where_only_tensorflow_can_access_it(tensorflow: Path) -> None:
    assert "kept and given back" in run_script(tensorflow, "remote_state.py")


def test_a_dataset_that_prefetches_gives_every_batch_once(tensorflow: Path) -> None:
    printed = run_script(tensorflow, "shards_dataset.py")
    assert "eager 40 rows, sum 780; reported at the third batch: [(0, 4)]" in printed
    assert "graph 40 rows, sum 780" in printed
