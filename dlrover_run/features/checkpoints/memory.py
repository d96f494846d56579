"""The checkpoints that this process holds: the pages, and who waits for what. Safe for threads.

A worker maps a file that this process has created, seals it, and fills it: nothing else can change it then. A file that
is not needed any more serves its worker again, because to find new memory takes the kernel longer than a copy, and a
device has to pin it. Nothing has a name in a file system, so the kernel frees all of it with its last owner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from dlrover_run import linux
from dlrover_run.features.checkpoints.held import HELD_STEPS, HeldFile, HeldFiles
from dlrover_run.training.saved_steps import SavedFile

SEALS = linux.F_SEAL_WRITE | linux.F_SEAL_SHRINK | linux.F_SEAL_GROW
"""Those of a file that this process has filled."""

SEALED = linux.F_SEAL_WRITE | linux.F_SEAL_FUTURE_WRITE
"""One of these is on a file that was filled. The size of each is sealed when it is created."""

RETRY_INTERVAL = 30.0
"""Seconds after which a file is tried again that the disk has refused."""

DESCRIPTOR_PAUSE = 1.0
"""Seconds until a file is tried again for which this process had no descriptor left."""

DROP_TIMEOUT = 1.0
"""Seconds at the end in which the other node is sent the names of the copies that it may drop."""

MAX_SURPLUS = 1 / 4
"""By how much of its size a state may be smaller than the memory that it is saved in again, besides MIN_SURPLUS."""

MIN_SURPLUS = 1 << 20

Number = int

Buffer = int
"""The number under which a worker first got a memory file, and by which it knows its mapping of it."""


@dataclass(frozen=True)
class Figures:
    """What a status shows: bytes that are held or reserved, the limit, and the files that are not on the disk yet."""

    used: int
    limit: int
    waiting: int
    waiting_bytes: int


@dataclass(frozen=True)
class Room:
    """Room for a file. `fd` is a descriptor that the caller closes; None if the worker has it mapped already."""

    number: Number
    buffer: Buffer
    fd: int | None


class Owner:
    """A worker that may use a memory file again, as long as it is connected. Compared by identity."""

    def __init__(self) -> None:
        self.spare: Number | None = None
        self.is_connected = True


class HeldMemory:
    """Memory files within `limit` bytes, and within what `free` returns when one is created. `on_change` is called
    with the figures after each change, in any thread."""

    def __init__(self, limit: int, free: Callable[[], int], on_change: Callable[[Figures], None]) -> None:
        self._free = free
        self._on_change = on_change
        self._changed = threading.Condition()
        self._files = HeldFiles(limit)
        self._fds: dict[Number, int] = {}
        self._left: list[int] = []
        self._mapped: dict[Number, tuple[Owner, Buffer]] = {}
        """The files that nothing but this process reads, with the worker that has each mapped."""
        self._sending: Number | None = None
        self._writing: HeldFile | None = None
        self._ends = False
        self._refused = ""

    @property
    def figures(self) -> Figures:
        with self._changed:
            waiting = self._files.waiting
            return Figures(self._files.used, self._files.limit, len(waiting), sum(each.size for each in waiting))

    def reserve(self, least: int, size: int, owner: Owner) -> Room | None:
        """Room for a file of at least `least` bytes: memory that the owner has mapped, if there is some that fits, else
        new memory of `size` bytes. None if there is none."""
        with self._changed:
            if (spare := self._take_spare(owner)) is not None:
                if self._fits(spare, least):
                    return Room(spare, self._mapped[spare][1], None)
                self._files.release(spare)
                self._close([spare])
            number, leaving = self._files.reserve(size)
            again = next((each for each in leaving if self._is_free_for(each, owner) and self._fits(each, least)), None)
            if number is not None and again is not None:
                self._rename(again, number)
                leaving.remove(again)
            self._close(leaving)
            if number is None or (again is None and not self._create(number, size)):
                return None
            self._note_change()
            if again is not None:
                return Room(number, self._mapped[number][1], None)
            return self._for_owner(number, owner)

    def prepare_spare(self, size: int, owner: Owner) -> Room | None:
        """Room for the next save of a worker, which maps it while it trains; None if it needs none, or there is no
        room."""
        with self._changed:
            if not self._wants_spare(owner):
                return None
            number, _ = self._files.reserve(size, spare=True)
            if number is None or not self._create(number, size):
                return None
            room = self._for_owner(number, owner)
            owner.spare = None if room is None else number
            return room

    def wants_spare(self, owner: Owner) -> bool:
        """Whether the next save of a worker would wait for new memory."""
        with self._changed:
            return self._wants_spare(owner)

    def buffers_of(self, owner: Owner) -> list[Buffer]:
        """The memory that the owner may use again; it unmaps all other."""
        with self._changed:
            return [buffer for mapped_by, buffer in self._mapped.values() if mapped_by is owner]

    def disconnect(self, owner: Owner) -> None:
        """A worker has ended: nothing serves it again."""
        with self._changed:
            owner.is_connected = False
            if (spare := self._take_spare(owner)) is not None:
                self._files.release(spare)
                self._close([spare])
                self._note_change()
            self._mapped = {number: mapped for number, mapped in self._mapped.items() if mapped[0] is not owner}

    def release(self, number: Number) -> None:
        """Give room back. Idempotent."""
        with self._changed:
            self._files.release(number)
            self._close([number])
            self._note_change()

    def add(self, held: HeldFile, local_ranks: int) -> bool:
        """Hold a file that its writer has sealed; whether all ranks of this node, as many as given, hold its step now.
        The memory of what leaves for it is given back by `free_left`. Raises ValueError if it is not sealed or has
        another size."""
        with self._changed:
            fd = self._fds[held.number]
            if not fcntl.fcntl(fd, linux.F_GET_SEALS) & SEALED or os.fstat(fd).st_size != held.size:
                raise ValueError("the memory of a checkpoint is not sealed, or has another size than was said")
            leaving = self._files.add(held)
            self._let_go([number for number in leaving if number != held.number])
            whole = self._files.is_whole_here(held, local_ranks)
            self._note_change()
        return whole

    def free_left(self) -> None:
        """Give the memory back of what has left. The kernel takes as long for that as for a copy, so no worker should
        wait for it."""
        with self._changed:
            left, self._left = self._left, []
        for fd in left:
            os.close(fd)

    def reserve_copy(self, size: int) -> tuple[Number, int] | None:
        """As `reserve`, for a copy of another node's file, which makes nothing leave."""
        with self._changed:
            number, _ = self._files.reserve(size, spare=True)
            if number is None:
                return None
            self._files.take_spare(number)
            if not self._create(number, size) or (fd := self._handed_out(number)) is None:
                return None
            return number, fd

    def add_copy(self, held: HeldFile, number: Number) -> None:
        """Hold a copy of another node's file, which was received whole."""
        with self._changed:
            same = self._files.find(held.directory, held.file)
            if same is not None and same.own:
                self._files.release(number)
                self._close([number])
            else:
                self._close(self._files.add(dataclasses.replace(held, number=number)))
            self._note_change()

    def drop_copy(self, directory: Path, file: SavedFile) -> None:
        """The file of another node is on the disk."""
        with self._changed:
            held = self._files.find(directory, file)
            if held is not None and not held.own:
                self._files.release(held.number)
                self._close([held.number])
                self._note_change()

    def adopt(self, numbers: Collection[Number]) -> None:
        """Write these copies to the disk: their node is gone."""
        with self._changed:
            for number in numbers:
                self._files.adopt(number)
            self._note_change()

    def next_for_peer(self) -> tuple[HeldFile, int | None]:
        """What the other node gets next, as soon as there is something: a file, with a descriptor that the caller
        closes; or without one a file whose copy it may drop."""
        with self._changed:
            while True:
                self._sending = None
                if (done := self._files.next_to_drop()) is not None:
                    self._changed.notify_all()
                    return done, None
                held = self._files.next_to_copy()
                if held is not None and (fd := self._dup(held.number)) is not None:
                    self._sending = held.number
                    return held, fd
                self._changed.wait(None if held is None else DESCRIPTOR_PAUSE)

    def note_copied(self, number: Number) -> None:
        """Note that the other node has a file."""
        with self._changed:
            self._files.note_copied(number)

    def forget_copies(self) -> None:
        """The other node is gone, or is another one now."""
        with self._changed:
            self._sending = None
            self._files.forget_copies()

    def names(self, directory: Path) -> list[str]:
        """The names of the files of a directory that are held."""
        with self._changed:
            return [file.name for file in self._files.in_directory(directory)]

    def open(self, directory: Path, file: SavedFile) -> int | None:
        """A descriptor of a file, which the caller closes; None if it is not held."""
        with self._changed:
            held = self._files.find(directory, file)
            if held is None:
                return None
            # What has been read may be mapped, so it must stay as it is.
            self._mapped.pop(held.number, None)
            return os.dup(self._fds[held.number])

    def forget(self, directory: Path, file: SavedFile) -> None:
        """Drop a file: its writer saves this step in another way. Returns when nothing writes it any more."""
        with self._changed:
            if (held := self._files.find(directory, file)) is not None:
                self._files.release(held.number)
                self._close([held.number])
            self._changed.wait_for(lambda: not self._writes(directory, file))
            self._note_change()

    def wait_until_written(self, directory: Path, file: SavedFile, timeout: float) -> bool:
        """Whether a file is on the disk, after at most `timeout` seconds; False too if the disk refuses it, or if it is
        not held."""

        def settled() -> bool:
            held = self._files.find(directory, file)
            return held is None or held.written or self._files.is_postponed(held.number)

        with self._changed:
            if (copy := self._files.find(directory, file)) is not None:
                self._files.adopt(copy.number)
            self._files.retry()
            self._changed.notify_all()
            self._changed.wait_for(settled, timeout)
            held = self._files.find(directory, file)
            return held is not None and held.written

    def next_to_write(self) -> tuple[HeldFile, int] | None:
        """The next file for the disk, and a descriptor of it that the caller closes, as soon as there is one; None
        after `drain`."""
        with self._changed:
            while True:
                if (held := self._files.next_to_write()) is not None:
                    if (fd := self._dup(held.number)) is not None:
                        self._writing = held
                        return held, fd
                    self._changed.wait(DESCRIPTOR_PAUSE)
                elif self._ends:
                    return None
                elif not self._changed.wait(RETRY_INTERVAL):
                    self._files.retry()

    def note_written(self, held: HeldFile, problem: str = "") -> bool:
        """Note that a file is on the disk, or why not; whether that problem is new."""
        with self._changed:
            self._writing = None
            if problem:
                self._files.postpone(held.number)
            else:
                self._let_go(self._files.note_written(held.number))
            is_new, self._refused = problem != self._refused, problem
            self._note_change()
        self.free_left()
        return is_new and bool(problem)

    def drain(self) -> list[HeldFile]:
        """Return when everything is on the disk that it accepts; the files that it has refused."""
        with self._changed:
            self._files.retry()
            self._ends = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._writing is None and self._files.next_to_write() is None)
            # A node that is not notified in time writes its copies once more, which changes nothing.
            self._changed.wait_for(lambda: not self._files.has_copies, DROP_TIMEOUT)
            return self._files.waiting

    def _writes(self, directory: Path, file: SavedFile) -> bool:
        writing = self._writing
        return writing is not None and (writing.directory, writing.file) == (directory, file)

    def _note_change(self) -> None:
        self._changed.notify_all()
        self._on_change(self.figures)

    def _create(self, number: Number, size: int) -> bool:
        """Create the memory of a number that was reserved; the number is given back if the machine has too little."""
        if size > self._free():
            self._files.release(number)
            return False
        try:
            fd = linux.memfd_create("dlrover-run checkpoint", linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING)
        except OSError:
            self._files.release(number)
            return False
        self._fds[number] = fd
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, linux.F_ADD_SEALS, linux.F_SEAL_SHRINK | linux.F_SEAL_GROW)
        return True

    def _for_owner(self, number: Number, owner: Owner) -> Room | None:
        if (fd := self._handed_out(number)) is None:
            return None
        self._mapped[number] = owner, number
        return Room(number, number, fd)

    def _wants_spare(self, owner: Owner) -> bool:
        if owner.spare is not None and owner.spare in self._fds:
            return False
        # With one more than is held, the oldest is free when it is needed, unless the disk is slow.
        return sum(mapped_by is owner for mapped_by, _ in self._mapped.values()) <= HELD_STEPS

    def _take_spare(self, owner: Owner) -> Number | None:
        spare, owner.spare = owner.spare, None
        return spare if spare is not None and self._files.take_spare(spare) else None

    def _fits(self, number: Number, least: int) -> bool:
        size = os.fstat(self._fds[number]).st_size
        return least <= size <= least * (1 + MAX_SURPLUS) + MIN_SURPLUS

    def _is_free_for(self, number: Number, owner: Owner) -> bool:
        """Whether only this process and the owner know the memory of a file, and nothing reads it now."""
        read = {self._sending, None if self._writing is None else self._writing.number}
        return number in self._mapped and self._mapped[number][0] is owner and number not in read

    def _rename(self, number: Number, to: Number) -> None:
        self._fds[to] = self._fds.pop(number)
        self._mapped[to] = self._mapped.pop(number)

    def _let_go(self, numbers: Collection[Number]) -> None:
        """The files with these numbers are held no more: each becomes the spare of its worker, or is closed by
        `free_left`."""
        for number in numbers:
            owner = self._mapped[number][0] if number in self._mapped else None
            if owner is not None and owner.is_connected and self._is_free_for(number, owner):
                has_spare = owner.spare is not None and owner.spare in self._fds
                size = os.fstat(self._fds[number]).st_size
                spare = None if has_spare else self._files.reserve(size, spare=True)[0]
                if spare is not None:
                    self._rename(number, spare)
                    owner.spare = spare
                    continue
            self._left += self._take_out([number])

    def _handed_out(self, number: Number) -> int | None:
        """A descriptor for the writer of a file; its room is given back where there is none left."""
        if (fd := self._dup(number)) is not None:
            return fd
        self._files.release(number)
        self._close([number])
        self._note_change()
        return None

    def _dup(self, number: Number) -> int | None:
        with contextlib.suppress(OSError):
            return os.dup(self._fds[number])
        return None

    def _take_out(self, numbers: Collection[Number]) -> list[int]:
        for number in numbers:
            self._mapped.pop(number, None)
        return [fd for number in numbers if (fd := self._fds.pop(number, None)) is not None]

    def _close(self, numbers: Collection[Number]) -> None:
        for fd in self._take_out(numbers):
            os.close(fd)
