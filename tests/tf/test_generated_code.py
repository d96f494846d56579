"""What TensorFlow writes for functions that it converts goes with the job, however a process of it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreters import newest_tensorflow_first
from scripted_cluster import BOOT, run_booted

pytestmark = pytest.mark.tensorflow

SCRIPT = """
import os, signal
import tensorflow as tf

@tf.function
def double(x):
    if x > 0:
        x = x * 2
    return x

print("doubled", int(double(tf.constant(21))), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@newest_tensorflow_first
def test_generated_code_is_written_to_the_directory_of_the_job(tensorflow: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    scratch, usual = tmp_path / "scratch", tmp_path / "usual"
    scratch.mkdir()
    usual.mkdir()
    variables = {"TF_PS_SCRATCH": str(scratch), "TMPDIR": str(usual)}
    done = run_booted(tensorflow, BOOT, tmp_path / "script.py", **variables)
    assert "doubled 42" in done.stdout, done.stderr
    assert list(usual.glob("__autograph*")) == []
    assert list(scratch.glob("__autograph_generated_file*.py"))
