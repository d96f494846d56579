"""What TensorFlow writes for functions that it converts goes with the job, however a process of it ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from interpreters import python_215, python_221
from scripted_cluster import BOOT

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


def check_place_of_files(python: Path, folder: Path) -> None:
    """Run the script with a directory of the job, and see where it leaves its files."""
    (folder / "script.py").write_text(SCRIPT)
    scratch, usual = folder / "scratch", folder / "usual"
    scratch.mkdir()
    usual.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(BOOT.parent),
        "TF_PS_SCRATCH": str(scratch),
        "TMPDIR": str(usual),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [str(python), str(BOOT), str(folder / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert "doubled 42" in done.stdout, done.stderr
    assert list(usual.glob("__autograph*")) == []
    assert list(scratch.glob("__autograph_generated_file*.py"))


def test_generated_code_is_written_to_the_directory_of_the_job(tmp_path: Path) -> None:
    check_place_of_files(python_221(), tmp_path)


@pytest.mark.long
def test_generated_code_is_written_there_with_tensorflow_2_15_too(tmp_path: Path) -> None:
    check_place_of_files(python_215(), tmp_path)
