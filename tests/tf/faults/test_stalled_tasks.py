"""A worker and then a server of TensorFlow are stopped, with `--stall-action`: each is named while it is, and no other
task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from job import RESTORED, Node
from support.harness import environment, until

from dlrover_run.events.reader import merged, read_logs
from dlrover_run.events.records import Event, WorkerReady, WorkerStalled, WorkerStarted

pytestmark = [pytest.mark.tensorflow, pytest.mark.long]

SCRIPT = Path(__file__).parents[1] / "scripts" / "graph_train.py"


@pytest.fixture
def node(tensorflow: Path, tmp_path: Path) -> Iterator[Node]:
    flags = ("--ps=2", "--workers=1", "--stall-action=restart", "--max-restarts=1", f"--journal={tmp_path / 'journal'}")
    ours = {"PYTHON_EXEC": str(tensorflow), "MODEL_DIR": str(tmp_path / "model"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tf_ps_runner", *flags, str(SCRIPT)],
        cwd=tmp_path,
        env=environment({**ours, "SAVE_STEPS": "50"}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    node = Node("tf-ps-run", process)
    yield node
    process.kill()
    node.finish()


def until_trains(journal: Path, worker: str, times: int) -> int:
    """Wait until the task of that name has made a step in this many processes. The pid of the last one."""

    def find() -> int | None:
        events = events_of(journal)
        ready = [one for one in events if isinstance(one, WorkerReady) and (one.name, one.stage) == (worker, "step")]
        pids = [one.pid for one in events if isinstance(one, WorkerStarted) and one.name == worker]
        return pids[-1] if len(ready) >= times else None

    return until(find, lambda: f"{worker} has made no step: {events_of(journal)}")


def events_of(journal: Path) -> Sequence[Event]:
    return [entry.event for entry in merged(read_logs(journal))] if journal.exists() else []


def test_a_stopped_task_is_named_and_replaced(node: Node, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    worker = until_trains(journal, "worker 0", 1)
    os.kill(worker, signal.SIGSTOP)
    node.until(r"no progress for \d+ s: worker-0 is stopped by a signal")
    until_trains(journal, "worker 0", 2)
    server = until_trains(journal, "ps 1", 1)
    os.kill(server, signal.SIGSTOP)
    node.until(r"no progress.* for \d+ s: ps-1 is stopped by a signal")
    node.until(RESTORED)
    until_trains(journal, "worker 0", 3)
    node.signal(signal.SIGTERM)
    node.finish()
    guilty = {one.name for one in events_of(journal) if isinstance(one, WorkerStalled) and one.guilty}
    assert guilty == {"worker 0", "ps 1"}
