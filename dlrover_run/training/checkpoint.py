"""A directory of checkpoints that is right after a kill at any moment.

A checkpoint becomes visible in one step, by a rename, after its bytes have reached the disk. It carries a footer with
its length and SHA-256, so that a file which was cut short or damaged later is known for what it is and passed over for
the next older one. The footer follows the data, where `torch.load` does not look: each file is still an ordinary one.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

logger = logging.getLogger(__name__)

MAGIC = b"DLRVCKP1"
LENGTH_BYTES = 8
FOOTER_SIZE = hashlib.sha256().digest_size + LENGTH_BYTES + len(MAGIC)
READ_SIZE = 1 << 20

MARK_VARIABLE = "DLROVER_CHECKPOINT_MARK"
"""The variable with which `dlrover-run` names a file that gets one byte when a checkpoint has been written: a job that
got so far does not stop early when it fails. Nothing of the launcher is imported for it."""

_NAME = re.compile(r"step-(\d{12,})\.pt")
_TEMPORARY = ".step-*.tmp"


class DamagedCheckpointError(Exception):
    """The file does not hold what was saved; the message says how that was seen."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved, and after which step."""

    step: int
    state: Any


class FileOperations:
    """The operations a save is made of, in a place where a test can break in between any two of them."""

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
    """Hashes the bytes on their way to the file, so that a big state is neither copied nor read back."""

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

        When this returns the checkpoint outlives a crash of the machine. When it raises (OSError: no space, no access)
        or the process dies, the older checkpoints are as they were.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, it is {step}")
        self._make_directory()
        # Only a killed save leaves a temporary file behind, since there is one writer and it is here.
        for left_over in self.path.glob(_TEMPORARY):
            self._files.remove(left_over)
        target = self.path / f"step-{step:012d}.pt"
        temporary = self.path / f".{target.name}.{os.getpid()}.tmp"
        try:
            with self._files.create(temporary) as file:
                writer = _HashingWriter(file)
                torch.save(state, writer)  # type: ignore[arg-type]  # it needs no more of a file than write and flush
                file.write(writer.footer())
                self._files.sync_file(file)
            self._files.rename(temporary, target)
        except BaseException:
            self._files.remove(temporary)
            raise
        self._files.sync_directory(self.path)
        _leave_mark()
        # Files of later steps are not counted: they are damaged, or of a run that this one deliberately went back from.
        older = [number for number in self.steps() if number <= step]
        for number in older[: -self.keep]:
            self._files.remove(self._file_of(number))
        return target

    def steps(self) -> list[int]:
        """The steps that have a file, damaged or not, in ascending order; none when the directory does not exist."""
        return sorted(self._numbered())

    def load_latest(self, map_location: str | torch.device = "cpu") -> Checkpoint | None:
        """The newest checkpoint that is whole, or None. Each damaged one on the way is logged as a warning.

        Raises ValueError for a file that is whole but holds what `torch.load(weights_only=True)` refuses: that is no
        damage, and to go back to an older file would hide it.
        """
        tried: set[int] = set()
        # The directory is listed again each time: a file can only vanish because a newer one has been saved meanwhile.
        while left := set(self._numbered()) - tried:
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

    def _numbered(self) -> Iterator[int]:
        if not self.path.is_dir():
            return
        for name in os.listdir(self.path):
            if match := _NAME.fullmatch(name):
                yield int(match[1])

    def _file_of(self, step: int) -> Path:
        return self.path / f"step-{step:012d}.pt"

    def _make_directory(self) -> None:
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for path in missing:
            self._files.sync_directory(path.parent)


def _leave_mark() -> None:
    if path := os.environ.get(MARK_VARIABLE):
        with suppress(OSError), open(path, "wb") as mark:
            mark.write(b"1")


def _load(path: Path, map_location: str | torch.device) -> Any:
    with _bad_sectors_as_damage(), path.open("rb") as file:
        _verify(file)
        file.seek(0)
        try:
            return torch.load(file, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"the checkpoint {path} is whole but holds more than tensors and plain values: {error}"
            ) from error


@contextmanager
def _bad_sectors_as_damage() -> Iterator[None]:
    """A file that the disk cannot give back is as damaged as one with wrong bytes; other errors are not."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedCheckpointError(f"the disk cannot read it ({error.strerror})") from error


def _verify(file: BinaryIO) -> None:
    """Raise DamagedCheckpointError unless the file holds exactly the bytes that its footer speaks of."""
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
