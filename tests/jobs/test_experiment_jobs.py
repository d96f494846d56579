"""Restarts as experiments: whole jobs on two local nodes with four "GPUs" each, which are texts in a variable."""

from __future__ import annotations

import re
from pathlib import Path

from support.harness import OURS, Finished, only_long, run

SCRIPT = """
import os, pathlib, time
node, rank, local_rank = os.environ["NODE_ID"], os.environ["RANK"], int(os.environ["LOCAL_RANK"])
gpu = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[local_rank]
if f"{node}:{gpu}" == os.environ.get("BAD_GPU") or rank == os.environ.get("BAD_RANK"):
    raise RuntimeError(f"CUDA error: an illegal memory access was encountered at {time.time()}")
over = pathlib.Path("over")
if node == "2":
    over.touch()
while not over.exists():
    time.sleep(0.05)
"""


def job(directory: Path, **env: str) -> Finished:
    (directory / "train.py").write_text(SCRIPT)
    flags = ["--local-nodes=2", "--nproc-per-node=4", "--max-restarts=6", "--rdzv-conf", "early_failure_limit=0"]
    variables = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", **env}
    return run(OURS, [*flags, "--experiments=on", "train.py"], cwd=directory, env=variables)


def test_a_node_whose_gpu_fails_each_worker_that_has_it_leaves_and_the_job_succeeds(tmp_path: Path) -> None:
    done = job(tmp_path, BAD_GPU="1:5")
    shown = done.out + done.err
    assert done.code == 0, shown
    assert re.search(r"ranks 5 and 6 exchange their GPUs, to see whether it follows the GPU; restart 2 of 6", shown)
    assert "it follows node 1, each time on its GPU 5" in shown
    assert "[node 1] The launcher exits with code 73." in shown
    assert "node 1 was found broken; node 2 takes its place" in shown


@only_long
def test_a_failure_of_one_rank_wherever_it_runs_stops_the_job(tmp_path: Path) -> None:
    done = job(tmp_path, BAD_RANK="2")
    assert done.code == 1
    shown = " ".join(re.sub(r"\[node \d\] ", "", done.out + done.err).split())
    assert re.search(r"ollows rank 2 \(\d of \d failures\) on other devices or nodes too: its data", shown)
    assert "exchange their ranks" in shown
    assert re.search(r"stopped instead of \d more restarts", shown)
