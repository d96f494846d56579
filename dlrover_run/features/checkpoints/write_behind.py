"""Writes files from memory to the disk: atomically, with a checksum, synced; and removes what is not kept any more."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from dlrover_run.features.checkpoints.held import HeldFile
from dlrover_run.features.checkpoints.memory import HeldMemory
from dlrover_run.training.saved_steps import complete_steps, removable, saved_files
from dlrover_run.training.whole_files import FileOperations, StateWriter, write_whole

COPY_BYTES = 4 * 1024 * 1024

TEMPORARY = ".memory-{name}.{mark}.tmp"
"""The name of a file while it is written; not that of a save of a worker, which removes what such saves have left."""


class LockedFiles(FileOperations):
    """A file that is being written is locked, and the kernel unlocks it when its writer ends: what is not locked is
    left over from a writer that was killed."""

    def create(self, path: Path) -> BinaryIO:
        file = super().create(path)
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file


class WriteBehind:
    """Writes what is held, from old to new, until `HeldMemory.drain`. `tell` gets a sentence when the disk refuses."""

    def __init__(self, memory: HeldMemory, tell: Callable[[str], None], files: FileOperations | None = None) -> None:
        self._memory = memory
        self._tell = tell
        self._files = LockedFiles() if files is None else files
        self._cleaned: set[Path] = set()

    def run(self) -> None:
        """Write until all is written after `HeldMemory.drain`."""
        while (following := self._memory.next_to_write()) is not None:
            held, fd = following
            problem = ""
            try:
                self._write(held, fd)
            except OSError as error:
                problem = error.strerror or str(error)
            finally:
                os.close(fd)
            if self._memory.note_written(held, problem):
                self._tell(
                    f"the checkpoint of step {held.file.step} cannot be written to {held.directory} ({problem}); it "
                    "stays in memory, and is tried again"
                )

    def _write(self, held: HeldFile, fd: int) -> None:
        directory, name = held.directory, held.file.name
        directory.mkdir(parents=True, exist_ok=True)
        if directory not in self._cleaned:
            self._cleaned.add(directory)
            for path in directory.glob(TEMPORARY.format(name="*", mark="*")):
                self._remove_left_over(path)
        temporary = directory / TEMPORARY.format(name=name, mark=os.urandom(4).hex())
        write_whole(self._files, temporary, directory / name, lambda writer: copy(fd, held.size, writer))
        found = saved_files(os.listdir(directory))
        # Whichever rank completes the step: the nodes write at their own pace.
        if any((each.step, each.attempt) == (held.file.step, held.file.attempt) for each in complete_steps(found)):
            for old in removable(found, held.file.step, held.keep, held.damaged):
                self._files.remove(directory / old.name)

    def _remove_left_over(self, path: Path) -> None:
        # Where the file system has no locks, nothing tells a file that is left over from one that is being written.
        with contextlib.suppress(OSError), path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._files.remove(path)


def copy(fd: int, size: int, writer: StateWriter) -> None:
    """Copy a memory file. Its own position is not used, because others may read it too."""
    buffer = memoryview(bytearray(min(size, COPY_BYTES)))
    done = 0
    while done < size:
        count = os.preadv(fd, [buffer[: size - done]], done)
        if count == 0:
            raise OSError("the memory of a checkpoint has ended early")
        writer.write(buffer[:count])
        done += count
