"""A directory of checkpoints that is consistent after a kill at any moment, saved by one rank or by each one.

Each file is written as `whole_files` says. The footer follows the data, where `torch.load` does not read: each file is
still an ordinary checkpoint. `saved_steps` decides which checkpoint is the newest that counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrover_run.observe import page
from dlrover_run.training import peers
from dlrover_run.training.last_step import STOP_SIGNALS, LastStep
from dlrover_run.training.memory_line import MemoryLine, NotHeld
from dlrover_run.training.peer_copies import PeerCopies
from dlrover_run.training.reports import mark_checkpoint
from dlrover_run.training.saved_steps import (
    Attempt,
    SavedFile,
    complete_steps,
    files_to_read,
    next_attempt_number,
    own_file,
    parse,
    removable,
    saved_files,
    wanted_on_disk,
)
from dlrover_run.training.whole_files import DamagedCheckpointError, FileOperations, verify, write_whole

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

STOP_LOCK = ".stop.lock"
STOP_LOCK_TIMEOUT = 10.0
"""Seconds that the last save of a rank waits for that of another rank. After that it saves too, which is safe."""
STOP_LOCK_INTERVAL = 0.05


@dataclass(frozen=True)
class Checkpoint:
    """A saved state, and the step after which it was saved.

    `files` has the file of each rank, where each rank saves its own state. `state` is that of the rank that loads it,
    and None if the number of ranks has changed: then `state_of` gives that of each rank which saved.
    """

    step: int
    state: Any
    files: tuple[Path, ...] = ()
    _read: Callable[[Path, str | torch.device], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def world_size(self) -> int:
        """The number of ranks that have saved it."""
        return len(self.files)

    def state_of(self, rank: int, map_location: str | torch.device = "cpu") -> Any:
        """The state that this rank has saved. Raises DamagedCheckpointError if its file was damaged meanwhile."""
        assert self._read is not None, "a checkpoint with files comes from a directory"
        return self._read(self.files[rank], map_location)


class CheckpointDirectory:
    """The newest `keep` checkpoints of one job, in `path`.

    Without `rank` and `world_size`, one process at a time may call `save`, by convention rank 0, and its state stands
    for all ranks. With them, every rank calls `save` with its own state, and a checkpoint counts when all of them have
    it. `path` is the same directory for all ranks. Any process may call `load_latest` at any time. A checkpoint holds
    what `torch.load(weights_only=True)` accepts: tensors, numbers, strings, lists, tuples and dicts.

    `attempt` distinguishes this start of the workers from all others; the ranks agree on it themselves if they have a
    process group. With `peer_copy`, what is saved in memory and is not on the disk yet is also in the memory of one
    other node; every rank calls `load_latest` then, after `init_process_group`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep: int = 3,
        files: FileOperations | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        attempt: Attempt | None = None,
        peer_copy: bool = False,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        if (rank is None) != (world_size is None):
            raise ValueError("give both rank and world_size, or neither")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to {world_size - 1}, not {rank}")
        self.path = Path(path)
        self.keep = keep
        self._files = FileOperations() if files is None else files
        self._of_ranks = rank is not None
        self._rank = rank or 0
        self._world_size = world_size or 1
        self._attempt = attempt
        self._damaged: set[SavedFile] = set()
        """Files that were found damaged: they are not counted among those to keep."""
        self._place = Path(os.path.realpath(path))
        """The name of the directory for other processes."""
        self._memory = MemoryLine(copies=self._files.copies)
        self._was_held = True
        self._agrees = False
        """Whether all ranks have agreed on the step that they resume from."""
        self._copies = PeerCopies(self._memory) if peer_copy else None

    def save(self, step: int, state: object, *, memory: bool = False) -> Path:
        """Write `state` as the checkpoint after `step` steps and return its file.

        When this returns, the file survives a crash of the machine. If it raises (OSError: no space, no access) or the
        process dies, the older checkpoints are unchanged.

        With `memory`, this returns as soon as the launcher on this node holds the state in memory. It survives the end
        of the workers then, and the launcher writes it to the file soon after, while they train. If there is no room,
        the state is written at once, as without it.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, it is {step}")
        with page.during(page.Phase.SAVING):
            file = self._file(step)
            self._make_directory()
            if memory and self._hold(file, state):
                return self.path / file.name
            self._memory.forget(self._place, file)
            for left_over in self._left_over():
                self._files.remove(left_over)
            return self._write(file, state, f".{file.name}.{os.getpid()}.tmp")

    def save_at_stop(
        self, state: Callable[[], tuple[int, object]], signals: Sequence[int] = STOP_SIGNALS, *, memory: bool = False
    ) -> LastStep:
        """Save the last completed step when this worker is about to end: because another rank has ended, or because it
        is stopped. `state` returns the number of completed steps and the state after them.

            with checkpoints.save_at_stop(lambda: (step, model.state_dict())) as last:
                for batch in batches:
                    train(batch)
                    step += 1
                    last.check()

        Every rank enters the block, in the main thread. `LastStep` has the rules. `memory` is as in `save`.
        """
        if memory:
            self._memory.connect()
        return LastStep(partial(self._save_last, memory=memory), state, signals)

    def steps(self) -> list[int]:
        """The steps with a checkpoint of which no rank's file is missing, damaged or not, in ascending order; empty if
        the directory does not exist."""
        return sorted({each.step for each in complete_steps(self._saved_files())})

    def load_latest(
        self, map_location: str | torch.device = "cpu", *, together: bool = False, every_state: bool = False
    ) -> Checkpoint | None:
        """The newest checkpoint that every rank has whole, or None. Each damaged file is logged as a warning.

        With `together`, all ranks call it after `init_process_group`, and get the same step, whatever the memory of
        each node holds. It is always so with `rank` and `world_size`, if there is a process group. With `every_state`,
        any rank can read the state of any other with `state_of`: what only the memory of another node has is written
        to the disk first, as it always is after a change of the number of ranks.

        Raises ValueError for an undamaged file that `torch.load(weights_only=True)` refuses: falling back to an older
        file would hide that error.
        """
        if self._copies is not None:
            self._copies.offer()
        together = (together or self._of_ranks) and peers.has_group()
        rank, size = (self._rank, self._world_size) if self._of_ranks or not together else peers.rank_and_size()
        if together and self._of_ranks:
            peers.check_size(rank, size)
            # Now, because the store may have ended with its rank when the last step has to be saved.
            self._file(0)
        self._agrees = together
        unusable: set[SavedFile] = set()
        of_all: Callable[[Any], list[Any]] = peers.of_all if together else lambda value: [value]
        # The directory is listed again each time: a file disappears only if a newer one has been saved meanwhile.
        while True:
            # Before the list of the disk: what leaves memory then is on that list.
            held = [set(files) for files in of_all(self._memory.held(self._place))]
            # One list for all, because a rank may see a file of another node later than that node.
            found: list[SavedFile] = of_all(self._saved_files() if rank == 0 or not together else [])[0]
            in_memory = set().union(*held)
            complete = complete_steps({*found, *in_memory}, unusable)
            if not complete:
                return None
            newest = complete[-1]
            world_size = self._world_size if self._of_ranks else None
            ranks = range(size) if together else [rank]
            reads = [set(newest.files) if every_state else files_to_read(newest, each, world_size) for each in ranks]
            bad: set[SavedFile] = set()
            if wanted := wanted_on_disk(held, reads):
                # Each node has it written what other nodes have to read.
                here = wanted & held[rank if together else 0]
                written = {file for file in here if self._memory.write(self._place, file)}
                bad = wanted.difference(*of_all(written))
            state: Any = None
            if not bad:
                own = own_file(newest, rank, world_size)
                share = newest.files[rank::size] if together else newest.files
                state, bad = self._read(own, set(share) - in_memory, map_location)
            for other in of_all(bad):
                bad = bad | other
            if not bad:
                files = tuple(self.path / file.name for file in newest.files)
                return Checkpoint(newest.step, state, files, self._load)
            unusable |= bad

    def _read(
        self, own: SavedFile | None, to_verify: set[SavedFile], map_location: str | torch.device
    ) -> tuple[Any, set[SavedFile]]:
        """The state of the file `own`, and which of these files cannot be used."""
        state: Any = None
        bad: set[SavedFile] = set()
        for file in sorted(to_verify if own is None else to_verify | {own}):
            path = self.path / file.name
            try:
                if file == own:
                    state = self._load(path, map_location)
                else:
                    with _disk_errors_are_damage(), path.open("rb") as opened:
                        verify(opened)
            except FileNotFoundError:
                bad.add(file)
            except DamagedCheckpointError as error:
                bad.add(file)
                self._damaged.add(file)
                logger.warning("Skip damaged checkpoint %s: %s; trying the next older one", path, error)
        return state, bad

    def _load(self, path: Path, map_location: str | torch.device) -> Any:
        """The state in a file, from the memory of this node if that holds it."""
        file = parse(path.name)
        held = None if file is None else self._memory.open(self._place, file)
        try:
            with _disk_errors_are_damage(), held or path.open("rb") as opened:
                if held is not None:
                    return self._files.load_from_memory(opened, map_location)
                verify(opened)
                opened.seek(0)
                return self._files.load(opened, map_location)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"the checkpoint {path} is not damaged but holds more than tensors and plain values: {error}"
            ) from error

    def _hold(self, file: SavedFile, state: object) -> bool:
        """Have the launcher hold a state; False, with one warning, if it does not."""
        try:
            if self._memory.has_other_nodes and not self._agrees:
                # Nodes that do not ask each other would resume from different steps.
                raise NotHeld("the job may have several nodes; have all ranks call load_latest(together=True) before")
            if self._copies is not None:
                self._copies.connect()
            dump = partial(self._files.dump_to_memory, state)
            whole = self._memory.save(self._place, file, dump, self._files.fit, self.keep, self._damaged)
        except NotHeld as why:
            if self._was_held:
                logger.warning("The checkpoint of step %d is written to the disk at once: %s", file.step, why)
            self._was_held = False
            return False
        self._was_held = True
        self._damaged.discard(file)
        if whole:
            mark_checkpoint(file.step)
        return True

    def _save_last(self, step: int, state: object, memory: bool) -> bool:
        """Save the last step of a worker that ends; whether this rank had to. Where one state stands for all ranks, one
        of those that are left saves it."""
        if self._of_ranks:
            self.save(step, state, memory=memory)
            return True
        with page.during(page.Phase.SAVING):
            self._make_directory()
            with _stop_lock(self.path / STOP_LOCK) as locked:
                file = self._file(step)
                if self._is_whole(file) or file in self._memory.held(self._place):
                    return False
                if memory and self._hold(file, state):
                    return True
                if locked:
                    for left_over in self.path.glob(".stop-*.tmp"):
                        self._files.remove(left_over)
                # Not the name of an ordinary save: rank 0 may be in one, and removes what such saves have left over.
                self._write(file, state, f".stop-{step}-{os.urandom(4).hex()}.tmp")
        return True

    def _write(self, file: SavedFile, state: object, temporary: str) -> Path:
        target = self.path / file.name
        write_whole(self._files, self.path / temporary, target, partial(self._files.dump, state))
        self._damaged.discard(file)
        found = self._saved_files()
        complete = any(each.step == file.step and each.attempt == file.attempt for each in complete_steps(found))
        if complete:
            mark_checkpoint(file.step)
        if self._rank == 0:
            for old in removable(found, file.step, self.keep, self._damaged):
                self._files.remove(self.path / old.name)
        return target

    def _file(self, step: int) -> SavedFile:
        """The file of this rank for a step."""
        if not self._of_ranks:
            return SavedFile(step)
        if self._attempt is None:
            if not peers.has_group():
                raise ValueError("call torch.distributed.init_process_group before save, or give attempt")
            known = [*self._saved_files(), *self._memory.held(self._place)]
            proposal = Attempt(next_attempt_number(known), os.urandom(4).hex())
            number, mark = peers.first_proposal(f"attempt/{self.path.name}", str(proposal)).split("-")
            self._attempt = Attempt(int(number), mark)
        return SavedFile(step, self._attempt, self._rank, self._world_size)

    def _saved_files(self) -> list[SavedFile]:
        return saved_files(os.listdir(self.path) if self.path.is_dir() else [])

    def _make_directory(self) -> None:
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for path in missing:
            self._files.sync_directory(path.parent)

    def _left_over(self) -> Iterator[Path]:
        """The temporary files of saves that were killed: those of this rank, which has one writer, this process, and on
        rank 0 those of earlier attempts, whose ranks may be more."""
        for path in self.path.glob(".step-*.tmp"):
            file = parse(path.name[1:].rsplit(".", 2)[0])
            if file is None or bool(file.attempt.mark) != self._of_ranks:
                continue
            if file.rank == self._rank or (self._rank == 0 and file.attempt != self._attempt):
                yield path

    def _is_whole(self, file: SavedFile) -> bool:
        try:
            with (self.path / file.name).open("rb") as opened:
                verify(opened)
        except (OSError, DamagedCheckpointError):
            return False
        return True


@contextlib.contextmanager
def _disk_errors_are_damage() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedCheckpointError(f"the disk cannot read it ({error.strerror})") from error


@contextlib.contextmanager
def _stop_lock(path: Path) -> Iterator[bool]:
    """Hold a lock that the kernel releases when its holder dies; False where the file system has none, or another rank
    holds it for too long."""
    deadline = time.monotonic() + STOP_LOCK_TIMEOUT
    with path.open("a") as file:
        locked = False
        while not locked and time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except BlockingIOError:
                time.sleep(STOP_LOCK_INTERVAL)
            except OSError:
                break
        yield locked
