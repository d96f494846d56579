"""What a training script reports to the launcher: its steps, and that a checkpoint is complete."""

from __future__ import annotations

import math
import os
import select
from contextlib import suppress
from pathlib import Path

from dlrover_run.observe import page

MARK_VARIABLE = "DLROVER_CHECKPOINT_MARK"
"""The variable with which `dlrover-run` names a file to which the step of each checkpoint is written, as a line: a job
that has written one is not stopped early when it fails, planned changes wait for the next one, and the event log shows
how much work a failure cost."""

CHANGE_VARIABLE = "DLROVER_PLANNED_CHANGE"
"""The variable that names a pipe of the launcher which is empty while a planned change waits for a checkpoint."""

CHANGE_TIMEOUT = 5.0
"""Seconds that a worker waits after a checkpoint for a planned change that was announced. The other nodes may have to
mark theirs too, and may need this worker for that."""

MAX_STEP = 10**15 - 1
"""The highest step that the launcher reads."""


def report(steps: int = 1, samples: int = 0, waited: float = 0.0, left: int | None = None) -> None:
    """Report that this rank has made `steps` more steps with `samples` more samples of its own, and that it waited for
    data for `waited` seconds of that time.

    `left` is how much the job has still to train after that, on any number of ranks: in samples of all ranks together
    if samples are reported, else in steps. A job that scales itself makes no change that would not pay any more.

    It takes about two microseconds, and has no effect in a process that `dlrover-run` has not started. From the first
    report on, steps that the sampler or the optimizer count are ignored. Raises ValueError for a number below 0.
    """
    if not (0 <= steps <= page.MAX_COUNT and 0 <= samples <= page.MAX_COUNT):
        raise ValueError(f"steps and samples must be from 0 to {page.MAX_COUNT}, not {steps} and {samples}")
    if left is not None and not 0 <= left <= page.MAX_COUNT:
        raise ValueError(f"left must be from 0 to {page.MAX_COUNT}, not {left}")
    if not (waited >= 0 and math.isfinite(waited)):
        raise ValueError(f"waited must be a number of seconds, 0 or more, not {waited}")
    page.add(page.StepSource.REPORT, steps, samples, waited, left)


def mark_checkpoint(step: int) -> None:
    """Report that the checkpoint after `step` steps is complete. `CheckpointDirectory.save` does it by itself.

    If one rank saves for all, it alone calls this. If several nodes save, one rank of each does, and a planned change
    waits for all of them. While a planned change is announced it returns only once that is made or given up, or after
    CHANGE_TIMEOUT seconds: steps after the checkpoint would be made again. It has no effect in a process that
    `dlrover-run` has not started. Raises ValueError for a number that is no step.
    """
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"step must be from 0 to {MAX_STEP}, not {step}")
    with suppress(OSError):
        _mark(step)
        _wait_for_planned_change(step)


def _mark(step: int) -> None:
    if path := os.environ.get(MARK_VARIABLE):
        Path(path).write_text(f"{step}\n")


def _wait_for_planned_change(step: int) -> None:
    path = os.environ.get(CHANGE_VARIABLE)
    if not path:
        return
    pipe = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        if not poll.poll(0):
            # Only a mark after the announcement counts, and the first one may have come before it.
            _mark(step)
            poll.poll(CHANGE_TIMEOUT * 1000)
    finally:
        os.close(pipe)
