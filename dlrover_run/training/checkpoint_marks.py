"""Tells the launcher that a checkpoint is complete."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path

MARK_VARIABLE = "DLROVER_CHECKPOINT_MARK"
"""The variable with which `dlrover-run` names a file to which the step of each checkpoint is written, as a line: a job
that has written one is not stopped early when it fails, planned changes wait for the next one, and the event log shows
how much work a failure cost. Nothing of the launcher is imported for this."""

CHANGE_VARIABLE = "DLROVER_PLANNED_CHANGE"
"""The variable that names a pipe of the launcher which is empty while a planned change waits for a checkpoint."""

CHANGE_TIMEOUT = 5.0
"""Seconds that a worker waits after a checkpoint for a planned change that was announced. The other nodes may have to
mark theirs too, and may need this worker for that."""

MAX_STEP = 10**15 - 1
"""The highest step that the launcher reads."""


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
