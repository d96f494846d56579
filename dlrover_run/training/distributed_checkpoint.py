"""`torch.distributed.checkpoint` in a `CheckpointDirectory`: sharded states that any number of ranks can load.

torch writes the shards of each rank, and a description of all of them, to files in memory; those of a rank are its own
state in the directory. So a step counts when all ranks have theirs whole, has checksums, and may be held in memory.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter

from dlrover_run.training.checkpoint import Checkpoint, CheckpointDirectory

METADATA = ".metadata"
"""The file that describes the shards of all ranks, as torch calls it. Rank 0 writes it, as the last one."""


def save(checkpoints: CheckpointDirectory, step: int, state_dict: dict[str, Any], *, memory: bool = False) -> None:
    """Save a sharded state as the checkpoint after `step` steps. Every rank calls it; `checkpoints` has `rank` and
    `world_size`, and `memory` is as in `CheckpointDirectory.save`."""
    files = _Files()
    state_dict_saver.save(state_dict, storage_writer=_Writer(files))
    checkpoints.save(step, {name: file.tensor for name, file in files.written.items()}, memory=memory)


def load(checkpoints: CheckpointDirectory, state_dict: dict[str, Any]) -> int | None:
    """Load the newest checkpoint that counts into `state_dict`, as `torch.distributed.checkpoint.load` does, and return
    its step; None without one, and then nothing is changed. Every rank calls it, also another number of ranks."""
    newest = checkpoints.load_latest(every_state=True)
    if newest is None:
        return None
    state_dict_loader.load(state_dict, storage_reader=_Reader(_Files(_saved_files(newest))))
    return newest.step


def _saved_files(checkpoint: Checkpoint) -> Callable[[str], bytes]:
    """The content of a file by its name. A rank reads the states of those ranks whose shards it needs."""
    states: dict[int, Any] = {}

    def read(name: str) -> bytes:
        # `__3_0.distcp` is a file of rank 3.
        rank = 0 if name == METADATA else int(name.split("_")[2])
        if rank not in states:
            is_own = dist.get_world_size() == checkpoint.world_size and rank == dist.get_rank()
            states[rank] = checkpoint.state if is_own else checkpoint.state_of(rank)
        return bytes(states[rank][name].numpy().data)

    return read


class _File(io.BytesIO):
    """A file in memory whose bytes stay when torch closes it."""

    def close(self) -> None:
        pass

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, without a copy; pickled as bytes they would be copied."""
        view = self.getbuffer()
        # A rank without shards has an empty file, of which torch makes no tensor.
        return torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)


class _Files(FileSystemBase):
    """Files in memory: those that are written, and those that `read` finds."""

    def __init__(self, read: Callable[[str], bytes] | None = None) -> None:
        self.written: dict[str, _File] = {}
        self._read = read

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode == "rb":
            assert self._read is not None, "what is written is not read"
            yield io.BytesIO(self._read(str(path)))
        else:
            yield self.written.setdefault(str(path), _File())

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.written[str(new_path)] = self.written.pop(str(path))

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return str(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return str(path) in self.written

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self.written.pop(str(path), None)


class _Writer(FileSystemWriter):
    """Writes to files in memory. Nothing is synced there."""

    def __init__(self, files: _Files) -> None:
        super().__init__("", sync_files=False)
        self.fs = files  # type: ignore[assignment]  # torch declares the class that it uses by default


class _Reader(FileSystemReader):
    """Reads from files in memory."""

    def __init__(self, files: _Files) -> None:
        super().__init__("")
        self.fs = files  # type: ignore[assignment]
