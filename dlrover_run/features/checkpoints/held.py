"""Which checkpoint files a node holds in memory, which are written next, and which leave for others. Pure: the bytes
are elsewhere, and each file is known here by a number.

A file leaves memory only when it is on the disk, and then only when two newer ones of its rank are held, or when its
room is needed. So the limit never costs a step: a save that finds no room is written to the disk at once instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from dlrover_run.training.saved_steps import SavedFile

HELD_STEPS = 2
"""Steps of each rank that stay in memory after they are on the disk. The newest may be one that another rank lacks."""


@dataclass(frozen=True)
class HeldFile:
    """One file in memory. `keep` is how many steps its directory keeps, `damaged` what its ranks have found damaged
    there. A file of which this node has only a copy is not `own`: its own node writes it. Numbers grow with time."""

    number: int
    directory: Path
    file: SavedFile
    size: int
    keep: int = 1
    damaged: frozenset[SavedFile] = field(default=frozenset(), repr=False)
    own: bool = True
    written: bool = False


class HeldFiles:
    """The files of a node, within `limit` bytes. Room is reserved before a file is filled; a spare is room that was
    filled with empty memory in advance, and leaves first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._last = 0
        self._reserved: dict[int, int] = {}
        self._spares: set[int] = set()
        self._held: dict[int, HeldFile] = {}
        self._postponed: set[int] = set()
        self._copied: dict[int, HeldFile] = {}
        """What another node has a copy of, until it is sent the order to drop it."""
        self._copying: tuple[Path, int] | None = None

    @property
    def used(self) -> int:
        """Bytes that are held or reserved."""
        return sum(self._reserved.values()) + sum(each.size for each in self._held.values())

    @property
    def waiting(self) -> list[HeldFile]:
        """The own files that are not on the disk yet, from old to new."""
        return [each for each in self._held.values() if each.own and not each.written]

    def next_to_copy(self) -> HeldFile | None:
        """The own file that another node gets a copy of next: of the newest step that is not on the disk, but a step
        that was begun is finished. Steps between two copies are left out if the network is slow."""
        missing = [each for each in self.waiting if each.number not in self._copied]
        if not missing:
            return None
        same = [each for each in missing if (each.directory, each.file.step) == self._copying]
        following = min(same or [max(missing, key=_age)], key=_age)
        self._copying = (following.directory, following.file.step)
        return following

    def note_copied(self, number: int) -> None:
        """Note that another node has a copy of this file."""
        if number in self._held:
            self._copied[number] = self._held[number]

    def next_to_drop(self) -> HeldFile | None:
        """A file that has a copy on another node, and needs it no more: it is on the disk, or was replaced. Each is
        named once."""
        waiting = {each.number for each in self.waiting}
        for number, held in self._copied.items():
            if number not in waiting:
                del self._copied[number]
                # Not if the copy is of a later state of the same step by now.
                return held if self.find(held.directory, held.file) in (None, self._held.get(number)) else None
        return None

    @property
    def has_copies(self) -> bool:
        """Whether another node has a copy that it was not sent an order to drop."""
        return bool(self._copied)

    def forget_copies(self) -> None:
        """No other node has a copy any more."""
        self._copied.clear()

    def adopt(self, number: int) -> None:
        """Write a copy of another node's file as if it were an own one."""
        if number in self._held and not self._held[number].own:
            self._held[number] = replace(self._held[number], own=True, written=False)

    def reserve(self, size: int, spare: bool = False) -> tuple[int | None, list[int]]:
        """Room for a file of this size: its number, None if there is none; and the numbers that leave for it. A spare
        makes nothing else leave."""
        leaving: list[int] = []
        missing = self.used + size - self.limit
        for number in [] if spare else self._in_order_of_leaving():
            if missing <= 0:
                break
            missing -= self._size_of(number)
            leaving.append(number)
        if missing > 0:
            return None, []
        for number in leaving:
            self.release(number)
        self._last += 1
        self._reserved[self._last] = size
        if spare:
            self._spares.add(self._last)
        return self._last, leaving

    def take_spare(self, number: int) -> bool:
        """Use a spare as room for a file; False if it has left."""
        if number not in self._spares:
            return False
        self._spares.remove(number)
        return True

    def add(self, held: HeldFile) -> list[int]:
        """Hold a file for which room was reserved under its number. The numbers that leave because of it: an earlier
        state of the same step, and steps that are on the disk and have newer ones."""
        del self._reserved[held.number]
        leaving = [each.number for each in self._held.values() if _place(each) == _place(held)]
        self._held[held.number] = held
        self._postponed.clear()
        return self._leave([*leaving, *self._superseded()])

    def release(self, number: int) -> None:
        """Forget this number. Idempotent."""
        self._reserved.pop(number, None)
        self._held.pop(number, None)
        self._spares.discard(number)
        self._postponed.discard(number)

    def next_to_write(self) -> HeldFile | None:
        """The oldest own file that is to be written to the disk now."""
        return next((each for each in self.waiting if each.number not in self._postponed), None)

    def note_written(self, number: int) -> list[int]:
        """Note that a file is on the disk; the numbers that leave because of it."""
        if number in self._held:
            self._held[number] = replace(self._held[number], written=True)
        return self._leave(self._superseded())

    def postpone(self, number: int) -> None:
        """Try this file again when another one comes, or when `retry` is called: the disk has refused it."""
        self._postponed.add(number)

    def is_postponed(self, number: int) -> bool:
        """Whether the disk has refused this file."""
        return number in self._postponed

    def retry(self) -> None:
        """Try the files again that the disk has refused."""
        self._postponed.clear()

    def find(self, directory: Path, file: SavedFile) -> HeldFile | None:
        """The file that is held of this name."""
        return next((each for each in self._held.values() if _place(each) == (directory, file)), None)

    def in_directory(self, directory: Path) -> list[SavedFile]:
        """The files of one directory that are held, from old to new."""
        return sorted(each.file for each in self._held.values() if each.directory == directory)

    def is_whole_here(self, held: HeldFile, local_ranks: int) -> bool:
        """Whether the ranks of this node, as many as given, hold this step."""
        file = held.file
        ranks = {
            each.rank
            for each in self.in_directory(held.directory)
            if (each.step, each.attempt, each.world_size) == (file.step, file.attempt, file.world_size)
        }
        return len(ranks) >= min(local_ranks, file.world_size)

    def _superseded(self) -> list[int]:
        """Files on the disk of whose rank enough newer ones are held."""
        of_rank: dict[tuple[Path, int, bool, bool], list[HeldFile]] = {}
        for each in self._held.values():
            of_rank.setdefault((each.directory, each.file.rank, each.file.world_size > 1, each.own), []).append(each)
        old = (sorted(files, key=_age)[:-HELD_STEPS] for files in of_rank.values())
        return [each.number for files in old for each in files if each.written]

    def _in_order_of_leaving(self) -> Iterable[int]:
        yield from sorted(self._spares)
        for own in (False, True):
            yield from (
                each.number for each in sorted(self._held.values(), key=_age) if each.written and each.own == own
            )

    def _size_of(self, number: int) -> int:
        return self._reserved[number] if number in self._reserved else self._held[number].size

    def _leave(self, numbers: list[int]) -> list[int]:
        for number in numbers:
            self.release(number)
        return numbers


def _place(held: HeldFile) -> tuple[Path, SavedFile]:
    return held.directory, held.file


def _age(held: HeldFile) -> tuple[int, int]:
    return held.file.step, held.number
