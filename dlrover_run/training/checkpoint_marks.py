"""Tells the launcher that a checkpoint is complete."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

MARK_VARIABLE = "DLROVER_CHECKPOINT_MARK"
"""The variable with which `dlrover-run` names a file to which the step of each checkpoint is written, as a line: a job
that has written one is not stopped early when it fails, planned changes wait for the next one, and the event log shows
how much work a failure cost. Nothing of the launcher is imported for this."""

MAX_STEP = 10**15 - 1
"""The highest step that the launcher reads."""


def mark_checkpoint(step: int) -> None:
    """Report that the checkpoint after `step` steps is complete. `CheckpointDirectory.save` does it by itself.

    If one rank saves for all, it alone calls this. If several nodes save, one rank of each does, and a planned change
    waits for all of them. It has no effect in a process that `dlrover-run` has not started. Raises ValueError for a
    number that is no step.
    """
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"step must be from 0 to {MAX_STEP}, not {step}")
    if path := os.environ.get(MARK_VARIABLE):
        with suppress(OSError):
            Path(path).write_text(f"{step}\n")
