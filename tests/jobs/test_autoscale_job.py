"""Real jobs that scale themselves: the throughput of each size is planted, and the best one is found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import is_master
from harness import OURS, WAIT, environment, finish, start

SCRIPT = """
import os, pathlib, sys, time
from dlrover_run.training import report

nodes = int(os.environ["WORLD_SIZE"])
throughput = [float(one) for one in sys.argv[1].split(",")][nodes - 1]
# Each worker has its batch, so a step is as much work as there are nodes. Late steps are caught up with.
step = nodes / throughput
began, made = time.monotonic(), 0
while not pathlib.Path(sys.argv[2]).exists():
    made += 1
    time.sleep(max(0.0, began + made * step - time.monotonic()))
    report()
"""

CONF = "autoscale_block=0.8,autoscale_warm_up=0.5,autoscale_tolerance=0.1,autoscale_patience=3"

SEARCH_TIMEOUT = 3 * WAIT
"""Seconds until the search of a job on a busy machine has ended."""


def status(name: str) -> dict[str, Any]:
    """The status of the job; empty while it is not found."""
    command = [sys.executable, "-m", "dlrover_run", "status", "--json", f"--rdzv-id={name}"]
    found = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    result: dict[str, Any] = json.loads(found.stdout) if found.returncode == 0 else {}
    return result


@pytest.mark.long
@pytest.mark.parametrize(
    ("throughput", "best", "kills_master"),
    [("50,100,150,200", 4, False), ("50,100,102,104", 2, False), ("50,100,80,60", 2, True), ("50,50,50,50", 1, False)],
    ids=["linear", "knee", "decline", "flat"],
)
def test_the_planted_size_is_found(tmp_path: Path, throughput: str, best: int, kills_master: bool) -> None:
    script, end, name = tmp_path / "train.py", tmp_path / "end", f"autoscale-{os.getpid()}-{best}-{kills_master}"
    script.write_text(SCRIPT)
    args = ["--autoscale", "--local-nodes=1:4", "--node-join-after=0", f"--rdzv-conf={CONF}", f"--rdzv-id={name}"]
    process = start(OURS, [*args, script, throughput, end], cwd=tmp_path)
    try:
        deadline = time.monotonic() + SEARCH_TIMEOUT
        choice: dict[str, Any] = {}
        while not choice.get("condition", "").startswith("ReachMax"):
            assert time.monotonic() < deadline, f"the search has not ended: {choice}"
            assert process.poll() is None, finish(process)
            found = status(name)
            choice = found.get("size_choice") or {}
            if kills_master and choice.get("condition") == "Continue":
                kills_master = False
                masters = [one for one in psutil.Process(process.pid).children(recursive=True) if is_master(one)]
                assert masters
                masters[0].send_signal(signal.SIGKILL)
        assert choice["wanted_nodes"] == best
        assert found["restarts"] == 0
    finally:
        end.touch()
        result = finish(process)
    assert result.code == 0, result.err
