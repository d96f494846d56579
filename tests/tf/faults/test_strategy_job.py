"""A job with `ParameterServerStrategy` loses a server and resumes from its last checkpoint, with each TensorFlow."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreters import each_tensorflow
from job import STRATEGY, MakeJob
from scripted_cluster import SCRIPTS

pytestmark = pytest.mark.tensorflow

EVERY = 20
"""Steps between two checkpoints."""

BLOCKS = 16
"""Blocks of the rows of the table, each of which is trained in one step."""


@each_tensorflow
def test_a_lost_server_takes_the_job_back_to_its_last_checkpoint(make_job: MakeJob, tmp_path: Path) -> None:
    until = tmp_path / "until"
    settings = {"MODEL_DIR": str(tmp_path / "model"), "UNTIL": str(until), "STEPS": "0", "SAVE_EVERY": str(EVERY)}
    node = make_job(STRATEGY).start("--ps=2", "--workers=1", program=SCRIPTS / "strategy_train.py", env=settings)
    saved = int(node.until(r"\[chief-0\]:saved at (\d+)")[1])
    node.kill("ps-1")
    restored = int(node.until(r"chief-1: has restored .*, and goes on after step (\d+)")[1])
    assert restored >= saved
    assert restored % EVERY == 0
    until.touch()
    assert node.finish() == 0, node.output
    step, least, most = map(int, node.until(r"\[chief-1\]:done at (\d+) seen=(\d+)\.\.(\d+)").groups())
    assert step > restored
    assert step // BLOCKS <= least <= most <= -(-step // BLOCKS), "each block is trained as often as the others"
