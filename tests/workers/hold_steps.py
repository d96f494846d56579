"""Saves steps in memory, as a rank of a job; `python hold_steps.py DIRECTORY STEP...`.

The state is bytes, so that torch is not imported. With KILL_AT it kills itself before that operation of the last step,
counted from 0: before the save, when room is reserved, and when all is on its way from the device, which is a thread
here: the copies that it has begun arrive at the latest when they are waited for.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dlrover_run.training import peers
from dlrover_run.training.checkpoint import CheckpointDirectory
from dlrover_run.training.saved_steps import Attempt
from dlrover_run.training.state_plan import StatePlan
from dlrover_run.training.whole_files import FileOperations, StateWriter

ATTEMPT = Attempt(1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), "0000abcd")
KILL_POINTS = 3
LENGTH_BYTES = 8


def state_of(step: int, rank: int, size: int = 100_000) -> bytes:
    """What no other step and no other rank has."""
    return random.Random(f"{step} {rank}").randbytes(size)


class Bytes(FileOperations):
    """States are bytes."""

    def __init__(self) -> None:
        self.left: int | None = None
        """Operations before this process is killed."""
        self.device = Device(self._next)

    def _next(self) -> None:
        if self.left is not None:
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1

    def dump(self, state: object, file: StateWriter) -> None:
        assert isinstance(state, bytes)
        file.write(len(state).to_bytes(LENGTH_BYTES, "big") + state)

    def dump_to_memory(self, state: object, plan: StatePlan) -> None:
        assert isinstance(state, bytes)
        self._next()
        plan.write(len(state).to_bytes(LENGTH_BYTES, "big"))
        for half in (state[: len(state) // 2], state[len(state) // 2 :]):
            plan.remote.append(OnDevice(half))
            plan.place(plan.remote[-1], len(half))

    def fit(self, plan: StatePlan, size: int) -> None:
        self._next()
        plan.write(bytes(size - plan.length))

    @property
    def copies(self) -> Device:
        return self.device

    def load(self, file: BinaryIO, map_location: Any) -> bytes:
        return file.read(int.from_bytes(file.read(LENGTH_BYTES), "big"))

    load_from_memory = load


class OnDevice:
    """What only the device can read."""

    device = "a device"

    def __init__(self, content: bytes) -> None:
        self.content = content


class Device:
    """A device that needs no torch, and copies in a thread."""

    def __init__(self, before_wait: Callable[[], None]) -> None:
        self._before_wait = before_wait
        self._copies: list[threading.Thread] = []

    def is_remote(self, storage: Any) -> bool:
        return isinstance(storage, OnDevice)

    def register(self, address: int, size: int, device: Any) -> str:
        return ""

    def unregister(self, address: int) -> None:
        pass

    def copy_async(self, target: memoryview, storage: OnDevice) -> None:
        def copy() -> None:
            for start in range(0, len(target), 10_000):
                target[start : start + 10_000] = storage.content[start : start + 10_000]

        self._copies.append(threading.Thread(target=copy))
        self._copies[-1].start()

    def synchronize(self, storages: Sequence[Any]) -> None:
        self._before_wait()
        while self._copies:
            self._copies.pop().join()


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
