"""The examples of docs/surviving.md survive a killed worker as the page says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from support.doc_pages import DOCS, blocks
from support.harness import OURS, WAIT, start

EXAMPLES = blocks(DOCS / "surviving.md", "python")

MINE = """
import os
import time

import torch
import torch.distributed as dist

print(f"rank {os.environ['RANK']} is process {os.getpid()}", flush=True)
model = torch.nn.Linear(2, 1)
dataset = torch.arange(480.0)


def train_one_step(step, batch=None):
    ones = torch.ones(1)
    dist.all_reduce(ones)
    time.sleep(0.05)
    with torch.no_grad():
        model.weight.fill_(step + 1)
    if dist.get_rank() == 0:
        print(f"made step {step + 1}", flush=True)
"""
"""The module of the user: a step is a collective, and the weights are the number of steps."""

LAST_STEP = 60

KEEPS_SURVIVORS = tuple(map(int, version("torch").split(".")[:2])) >= (2, 14)
"""With an older torch the example restarts all workers, and has no checkpoint."""


def _resumes_from_a_save(begins: list[int], made: int, processes: list[int]) -> bool:
    return begins[-1] in range(20, made + 1, 10) and len(processes) == 2


def _resumes_from_the_last_step(begins: list[int], made: int, processes: list[int]) -> bool:
    return made - 1 <= begins[-1] <= made + 1 and len(processes) == 2


def _is_the_same_process(begins: list[int], made: int, processes: list[int]) -> bool:
    if not KEEPS_SURVIVORS:
        return begins[-1] == 0 and len(processes) == 2
    return made - 1 <= begins[-1] <= made + 1 and len(processes) == 1


@pytest.mark.parametrize(
    ("number", "flags", "resumes"),
    [
        (0, [], _resumes_from_a_save),
        (1, [], _resumes_from_a_save),
        (2, [], _resumes_from_the_last_step),
        (3, ["--survivors=keep"], _is_the_same_process),
    ],
    ids=["checkpoint", "sampler", "last step", "survivors"],
)
def test_an_example_survives(
    number: int, flags: list[str], resumes: Callable[[list[int], int, list[int]], bool], tmp_path: Path
) -> None:
    assert len(EXAMPLES) == 4
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "train.py").write_text(EXAMPLES[number].text)
    printed = tmp_path / "printed"
    words = ["--nproc-per-node=2", "--max-restarts=1", *flags, "train.py"]
    with printed.open("w") as output:
        process = start(OURS, words, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT)
    try:
        limit = time.monotonic() + WAIT
        while "made step 25\n" not in printed.read_text():
            assert time.monotonic() < limit, printed.read_text()
            assert process.poll() is None, printed.read_text()
            time.sleep(0.02)
        os.kill(_processes(printed, 1)[0], signal.SIGKILL)
        assert process.wait(WAIT) == 0, printed.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(WAIT)
    text = printed.read_text()
    before, _, _ = text.rpartition("\nrank 1 is process")
    made = max(int(step) for step in re.findall(r"^made step (\d+)$", before, re.MULTILINE))
    begins = [int(step) for step in re.findall(r"^begins after step (\d+)", text, re.MULTILINE)]
    assert " was killed by SIGKILL" in text
    assert text.rstrip().endswith(f"made step {LAST_STEP}")
    assert resumes(begins, made, _processes(printed, 0)), text
    if number == 1:
        samples = re.findall(r"^begins after step (\d+), sample (\d+)$", text, re.MULTILINE)
        assert all(int(sample) == 8 * int(step) for step, sample in samples)


def _processes(printed: Path, rank: int) -> list[int]:
    return [int(pid) for pid in re.findall(rf"^rank {rank} is process (\d+)$", printed.read_text(), re.MULTILINE)]
