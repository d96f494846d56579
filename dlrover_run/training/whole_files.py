"""Files that are whole or absent after a kill at any moment, and whose damage is found.

A file becomes visible atomically, by a rename, after its bytes have reached the disk. It has a footer with its length
and SHA-256, so that a file that was truncated or damaged later is detected.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from dlrover_run.training.device_copies import TORCH_COPIES, DeviceCopies

if TYPE_CHECKING:
    import torch

    from dlrover_run.training.state_plan import StatePlan

MAGIC = b"DLRVCKP1"
LENGTH_BYTES = 8
FOOTER_SIZE = hashlib.sha256().digest_size + LENGTH_BYTES + len(MAGIC)
READ_SIZE = 1 << 20


class DamagedCheckpointError(Exception):
    """The file is not what was saved; the message is the evidence."""


class FileOperations:
    """The file operations of a save and a load; a test can interrupt between any two of those of a save."""

    @property
    def copies(self) -> DeviceCopies:
        """How what `dump_to_memory` has planned is copied."""
        return TORCH_COPIES

    def dump(self, state: object, file: StateWriter) -> None:
        import torch

        torch.save(state, file)  # type: ignore[arg-type]  # it only calls write and flush

    def dump_to_memory(self, state: object, plan: StatePlan) -> None:
        """As `dump`, without torch's checksum of each tensor, which takes as long as the copy: nothing can change the
        memory, and the file gets a checksum of its own."""
        import torch

        with _no_crc():
            torch.save(state, plan, pickle_module=plan.pickle_module)  # type: ignore[arg-type]  # it only calls write and flush

    def fit(self, plan: StatePlan, size: int) -> None:
        """Make what `dump_to_memory` has planned as long as the memory that it is copied to."""
        plan.fit_archive(size)

    def load(self, file: BinaryIO, map_location: str | torch.device) -> Any:
        import torch

        return torch.load(file, map_location=map_location, weights_only=True)

    def load_from_memory(self, file: BinaryIO, map_location: str | torch.device) -> Any:
        """As `load`, for a memory file that nothing changes: its tensors are a mapping of it, and not copied."""
        import torch

        path = f"/proc/self/fd/{file.fileno()}"
        return torch.load(path, map_location=map_location, weights_only=True, mmap=True)

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


class StateWriter(Protocol):
    """What a state is written to."""

    def write(self, data: bytes | memoryview) -> int: ...

    def flush(self) -> None: ...


@contextlib.contextmanager
def _no_crc() -> Iterator[None]:
    # A state without tensors needs no torch; and torch before 2.6 cannot leave the checksums out.
    serialization: Any = sys.modules.get("torch.serialization")
    if not hasattr(serialization, "set_crc32_options"):
        yield
        return
    before = serialization.get_crc32_options()
    serialization.set_crc32_options(False)
    try:
        yield
    finally:
        serialization.set_crc32_options(before)


class HashingWriter:
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


def write_whole(files: FileOperations, temporary: Path, target: Path, write: Callable[[HashingWriter], None]) -> None:
    """Write `target` by way of `temporary`, in the same directory; `write` gets the file. When this returns, it
    survives a crash of the machine. If it raises, `target` is as it was."""
    try:
        with files.create(temporary) as file:
            writer = HashingWriter(file)
            write(writer)
            file.write(writer.footer())
            files.sync_file(file)
        files.rename(temporary, target)
    except BaseException:
        files.remove(temporary)
        raise
    files.sync_directory(target.parent)


def verify(file: BinaryIO) -> None:
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
