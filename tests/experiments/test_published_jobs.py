"""Published command lines as jobs, letter for letter but for paths: one of document 001 in pods, one of document 002 on
one machine. What the other lines mean is shown by `tests/command_line/test_published_commands.py`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import environment
from support.job import CapturedProcess
from support.master_process import master
from support.published_commands import CHAOS_ARTICLE, CHAOS_TUTORIAL, torch_pod, typed

from experiments.experiment import CHAOS, Digits

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist" / "cnn_train.py"

COPIES = 8
"""The number of copies of each image. The five epochs of the line then last long enough to inject a fault."""


@pytest.fixture
def data(digits: Digits, tmp_path: Path) -> Path:
    """The digits in the folders of the command line, `training/` and `testing/`."""
    for part, folder in (("training", digits.training), ("testing", digits.validation)):
        for image in folder.glob("*/*.png"):
            target = tmp_path / "data" / part / image.parent.name
            target.mkdir(parents=True, exist_ok=True)
            for copy in range(COPIES if part == "training" else 1):
                (target / f"{copy}-{image.name}").symlink_to(image.resolve())
    return tmp_path / "data"


@contextlib.contextmanager
def shell(text: str, data: Path, **env: str) -> Iterator[CapturedProcess]:
    """The container's command, in its own session."""
    line = typed(
        text,
        {
            "examples/pytorch/mnist/start_chaos.sh": str(CHAOS),
            "examples/pytorch/mnist/cnn_train.py": str(EXAMPLE),
            "/data/mnist_png": str(data),
        },
    )
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["/bin/bash", "-c", line],
        env=environment({"PATH": programs, "OMP_NUM_THREADS": "1", "TMPDIR": str(data.parent), **env}),
        cwd=data.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield CapturedProcess(env.get("WORKER_ID", "the cluster"), process)
        finally:
            process.kill()


def test_the_first_pod_of_document_001_is_preempted(data: Path) -> None:
    line = CHAOS_TUTORIAL["preempted"]
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(master()).address
        pods = [stack.enter_context(shell(line, data, **torch_pod(each, master=address))) for each in range(4)]
        pods[0].until_prints("group_world_size=4")
        pods[0].until_prints("step = 20\n")
        # What `kubectl delete pod` does.
        pods[0].signal(signal.SIGTERM)
        successor = stack.enter_context(shell(line, data, **torch_pod(4, rank=0, master=address)))
        assert pods[0].finish() == 128 + signal.SIGTERM
        successor.until_prints("group_rank=0")
        successor.until_prints("group_world_size=4")
        assert [pod.finish() for pod in (*pods[1:], successor)] == [0] * 4
    # The command line names no directory for checkpoints, and training resumes from one.
    assert successor.has_printed("Load epoch = ")
    assert not successor.has_printed("step = 0 ")
    assert successor.has_printed("final accuracy = ")


def test_a_machine_of_document_002_is_faulty(data: Path) -> None:
    with shell(CHAOS_ARTICLE["fault node"], data, PET_LOCAL_NODES="4", WORKER_NUM="4") as job:
        assert job.finish() == 0
    for words in (
        "start_chaos: node 1: killed local rank 0, process ",
        "Fault nodes are: [1] and stragglers are: []",
        "The node network is breakdown.",
        "node 1 was found broken; node 4 takes its place",
        "final accuracy = ",
    ):
        assert job.has_printed(words), job.output
