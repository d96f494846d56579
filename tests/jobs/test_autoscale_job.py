"""Real jobs that scale themselves: the throughput of each size is planted, and the best one is found."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cluster import is_master
from support.harness import OURS, WAIT, finish, start, status_of

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

CONF = "autoscale_block=0.8,autoscale_warm_up=0.5,autoscale_tolerance=0.1,autoscale_node_timeout=3"

SEARCH_TIMEOUT = 3 * WAIT
"""Seconds until the search of a job on a busy machine has ended."""


def nodes_of(launcher: int) -> dict[int, list[psutil.Process]]:
    """The processes of each local node that has workers, by the rank of the node."""
    by_number: dict[str, list[psutil.Process]] = {}
    ranks: dict[str, int] = {}
    for process in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            number = variables.get("DLROVER_LOCAL_NODE", "")
            by_number.setdefault(number, []).append(process)
            if "GROUP_RANK" in variables:
                ranks[number] = int(variables["GROUP_RANK"])
    return {rank: by_number[number] for number, rank in ranks.items()}


def kill(launcher: int, victim: str) -> None:
    """Kill the master, the node with rank 0, or that with the highest rank."""
    if victim == "master":
        doomed = [one for one in psutil.Process(launcher).children(recursive=True) if is_master(one)]
    else:
        nodes = nodes_of(launcher)
        doomed = nodes[0 if victim == "rank 0" else max(nodes)]
    assert doomed
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize(
    ("throughput", "best", "victim"),
    [
        ("50,100,150,200", 4, ""),
        ("50,100,102,104", 2, ""),
        ("50,100,80,60", 2, "master"),
        ("50,50,50,50", 1, ""),
        ("50,100,102,104", 2, "rank 0"),
        ("50,100,102,104", 2, "newcomer"),
    ],
    ids=["linear", "knee", "decline", "flat", "rank-0-killed", "newcomer-killed"],
)
def test_the_planted_size_is_found(tmp_path: Path, throughput: str, best: int, victim: str) -> None:
    """Whatever is killed is killed while a size of several nodes is tried."""
    script, end, name = tmp_path / "train.py", tmp_path / "end", f"autoscale-{os.getpid()}-{best}-{victim[:4]}"
    script.write_text(SCRIPT)
    args = ["--autoscale", "--local-nodes=1:4", "--node-join-after=0", f"--rdzv-conf={CONF}", f"--rdzv-id={name}"]
    process = start(OURS, [*args, "--max-restarts=3", script, throughput, end], cwd=tmp_path)
    try:
        deadline = time.monotonic() + SEARCH_TIMEOUT
        choice: dict[str, Any] = {}
        while victim or not choice.get("condition", "").startswith("ReachMax"):
            assert time.monotonic() < deadline, f"the search has not ended: {choice}"
            assert process.poll() is None, finish(process)
            found = status_of(OURS, name)
            choice = found.get("size_choice") or {}
            if victim and choice.get("condition") == "Continue" and found["round_nodes"] > 1:
                kill(process.pid, victim)
                victim = ""
        assert choice["wanted_nodes"] == best
        assert found["restarts"] == 0
    finally:
        end.touch()
        result = finish(process)
    assert result.code == 0, result.err
