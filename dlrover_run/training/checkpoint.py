"""A directory of checkpoints that is consistent after a kill at any moment.

A checkpoint becomes visible atomically, by a rename, after its bytes have reached the disk. It has a footer with its
length and SHA-256, so that a file that was truncated or damaged later is detected, and the next older one is used. The
footer follows the data, where `torch.load` does not read: each file is still an ordinary checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dlrover_run.progress import page
from dlrover_run.training.checkpoint_marks import mark_checkpoint

logger = logging.getLogger(__name__)

MAGIC = b"DLRVCKP1"
LENGTH_BYTES = 8
FOOTER_SIZE = hashlib.sha256().digest_size + LENGTH_BYTES + len(MAGIC)
READ_SIZE = 1 << 20

_NAME = re.compile(r"step-(\d{12,})\.pt")
_TEMPORARY = ".step-*.tmp"


class DamagedCheckpointError(Exception):
    """The file is not what was saved; the message is the evidence."""


@dataclass(frozen=True)
class Checkpoint:
    """A saved state, and the step after which it was saved."""

    step: int
    state: Any


class FileOperations:
    """The file operations of a save; a test can interrupt between any two of them."""

    def create(self, path: Path) -> BinaryIO:
        return path.open("xb")

    def sync_file(self, file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)


class _HashingWriter:
    """Hashes the bytes while they are written, so that a large state is neither copied nor read back."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._length = 0

    def write(self, data: bytes | memoryview) -> int:
        self._digest.update(data)
        self._file.write(data)
        self._length += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def footer(self) -> bytes:
        return self._digest.digest() + self._length.to_bytes(LENGTH_BYTES, "big") + MAGIC


class CheckpointDirectory:
    """The newest `keep` checkpoints of one job, as `step-<number>.pt` in `path`.

    One process at a time may call `save`, by convention rank 0; any process may call `load_latest` at any time. A
    checkpoint holds what `torch.load(weights_only=True)` accepts: tensors, numbers, strings, lists, tuples and dicts.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 3, files: FileOperations | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.path = Path(path)
        self.keep = keep
        self._files = FileOperations() if files is None else files

    def save(self, step: int, state: object) -> Path:
        """Write `state` as the checkpoint after `step` steps and return its file.

        When this returns, the checkpoint survives a crash of the machine. If it raises (OSError: no space, no access)
        or the process dies, the older checkpoints are unchanged.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, it is {step}")
        with page.during(page.Phase.SAVING):
            return self._save(step, state)

    def _save(self, step: int, state: object) -> Path:
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for path in missing:
            self._files.sync_directory(path.parent)
        # Only a save that was killed leaves a temporary file, because there is one writer, this process.
        for left_over in self.path.glob(_TEMPORARY):
            self._files.remove(left_over)
        target = self._file_of(step)
        temporary = self.path / f".{target.name}.{os.getpid()}.tmp"
        try:
            with self._files.create(temporary) as file:
                writer = _HashingWriter(file)
                torch.save(state, writer)  # type: ignore[arg-type]  # it only calls write and flush
                file.write(writer.footer())
                self._files.sync_file(file)
            self._files.rename(temporary, target)
        except BaseException:
            self._files.remove(temporary)
            raise
        self._files.sync_directory(self.path)
        mark_checkpoint(step)
        # Files of later steps are not counted: they are damaged, or of a run that this one was deliberately reset from.
        older = [number for number in self.steps() if number <= step]
        for number in older[: -self.keep]:
            self._files.remove(self._file_of(number))
        return target

    def steps(self) -> list[int]:
        """The steps with a file, damaged or not, in ascending order; empty if the directory does not exist."""
        names = os.listdir(self.path) if self.path.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def load_latest(self, map_location: str | torch.device = "cpu") -> Checkpoint | None:
        """The newest checkpoint that is not damaged, or None. Each damaged one before it is logged as a warning.

        Raises ValueError for an undamaged file that `torch.load(weights_only=True)` refuses: falling back to an older
        file would hide that error.
        """
        tried: set[int] = set()
        # The directory is listed again each time: a file disappears only if a newer one has been saved meanwhile.
        while left := set(self.steps()) - tried:
            step = max(left)
            tried.add(step)
            path = self._file_of(step)
            try:
                return Checkpoint(step, _load(path, map_location))
            except FileNotFoundError:
                continue
            except DamagedCheckpointError as error:
                logger.warning("Skip damaged checkpoint %s: %s; trying the next older one", path, error)
        return None

    def _file_of(self, step: int) -> Path:
        return self.path / f"step-{step:012d}.pt"


def _load(path: Path, map_location: str | torch.device) -> Any:
    try:
        with path.open("rb") as file:
            _verify(file)
            file.seek(0)
            return torch.load(file, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"the checkpoint {path} is not damaged but holds more than tensors and plain values: {error}"
        ) from error
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedCheckpointError(f"the disk cannot read it ({error.strerror})") from error


def _verify(file: BinaryIO) -> None:
    """Raise DamagedCheckpointError unless the file has exactly the bytes that its footer describes."""
    length = os.fstat(file.fileno()).st_size - FOOTER_SIZE
    if length < 0:
        raise DamagedCheckpointError(f"it has only {length + FOOTER_SIZE} bytes")
    file.seek(length)
    footer = file.read(FOOTER_SIZE)
    if not footer.endswith(MAGIC):
        raise DamagedCheckpointError("its end is missing")
    recorded = int.from_bytes(footer[-len(MAGIC) - LENGTH_BYTES : -len(MAGIC)], "big")
    if recorded != length:
        raise DamagedCheckpointError(f"it has {length} bytes of data, {recorded} were saved")
    file.seek(0)
    digest = hashlib.sha256()
    left = length
    while left and (chunk := file.read(min(READ_SIZE, left))):
        digest.update(chunk)
        left -= len(chunk)
    if digest.digest() != footer[: digest.digest_size]:
        raise DamagedCheckpointError("its checksum is wrong")
