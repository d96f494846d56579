"""The commands that README.md shows for TensorFlow, as they stand there, with pretended tasks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from doc_pages import README, blocks, commands
from harness import Mailbox
from pretended import PRETEND, Job, scale


def shown() -> list[list[str]]:
    """The words of each command, without the program's name."""
    found = [command.words for block in blocks(README, "bash") for command in commands(block)]
    return [words[1:] for words in found if words and words[0] == "tf-ps-run"]


@pytest.mark.long
def test_a_job_that_is_started_as_readme_says_is_scaled_as_readme_says(
    start: Callable[..., Job], mailbox: Mailbox
) -> None:
    begin, change = shown()
    at = begin.index("train.py")
    script = shutil.copy(PRETEND, mailbox.directory / "train.py")
    job = start(*begin[:at], script=Path(script), args=tuple(begin[at + 1 :]))
    first = job.up("ps-0")["cluster"]["ps"]
    for name in ("chief-0", *(f"ps-{rank}" for rank in range(1, len(first))), "evaluator-0", "worker-0"):
        job.up(name)
    job.train()
    word, flag = change
    assert word == "scale"
    scaled = scale(job, flag)
    assert scaled.returncode == 0, scaled.stderr
    coming = job.up(f"ps-{len(first)}")
    assert len(coming["cluster"]["ps"]) == int(flag.partition("=")[2]) != len(first)
    job.up("chief-1")
    job.train("chief-1", "checkpoint", 7, "/pretend/model.ckpt-7")
    job.finish("chief-1")
