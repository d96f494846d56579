"""Saves steps in memory, as a rank of a job; `python hold_steps.py DIRECTORY STEP...`.

The state is bytes, so that torch is not imported. With KILL_AT it kills itself before that operation of the last step,
counted from 0: room was reserved before the first write, which has two halves.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

from dlrover_run.training import peers
from dlrover_run.training.checkpoint import CheckpointDirectory
from dlrover_run.training.saved_steps import Attempt
from dlrover_run.training.whole_files import FOOTER_SIZE, MAGIC, FileOperations, StateWriter

ATTEMPT = Attempt(1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), "0000abcd")
KILL_POINTS = 4


def state_of(step: int, rank: int, size: int = 100_000) -> bytes:
    """What no other step and no other rank has."""
    return random.Random(f"{step} {rank}").randbytes(size)


class Bytes(FileOperations):
    """States are bytes."""

    def __init__(self) -> None:
        self.left: int | None = None
        """Operations before this process is killed."""

    def _next(self) -> None:
        if self.left is not None:
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1

    def dump(self, state: object, file: StateWriter) -> None:
        assert isinstance(state, bytes)
        self._next()
        for half in (state[: len(state) // 2], state[len(state) // 2 :]):
            self._next()
            file.write(half)
        self._next()

    def load(self, file: BinaryIO, map_location: Any) -> bytes:
        data = file.read()
        return data[:-FOOTER_SIZE] if data.endswith(MAGIC) else data


def without_torch() -> None:
    """Ask no process group which ranks there are: the import of torch takes longer than the rest."""
    peers.has_group = lambda: False


def directory(path: str | Path, files: Bytes | None = None, keep: int = 3) -> CheckpointDirectory:
    """The directory of this rank, by the environment."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return CheckpointDirectory(path, keep, files or Bytes(), rank=rank, world_size=world, attempt=ATTEMPT)


def main() -> None:
    without_torch()
    files = Bytes()
    checkpoints = directory(sys.argv[1], files)
    steps = [int(text) for text in sys.argv[2:]]
    for step in steps:
        if step == steps[-1] and "KILL_AT" in os.environ:
            files.left = int(os.environ["KILL_AT"])
        checkpoints.save(step, state_of(step, int(os.environ.get("RANK", "0"))), memory=True)


if __name__ == "__main__":
    main()
