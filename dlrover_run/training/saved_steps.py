"""Which saved step is the newest that every rank has, and which files may be removed. Pure: from the names in a
directory to names.

A file of a checkpoint that one rank saved for all is named `step-000000000020.pt`. Where each rank saves its own state
it is `step-000000000020.attempt-0002-9f3c21aa.rank-00003-of-00008.pt`. An attempt is the time from one start of all
workers to the next: files of two attempts are never part of one checkpoint, because nothing says that their ranks
computed the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

_NAME = re.compile(r"step-(\d{12,})(?:\.attempt-(\d{4,})-([0-9a-f]{8})\.rank-(\d{5,})-of-(\d{5,}))?\.pt")


class Attempt(NamedTuple):
    """One start of all workers. `number` is higher than that of each attempt before it that has left a file; `mark`
    distinguishes two attempts that could not know of each other."""

    number: int = 0
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.number:04d}-{self.mark}"


class SavedFile(NamedTuple):
    """One file of a checkpoint: that of rank `rank` of `world_size`, or the only one."""

    step: int
    attempt: Attempt = Attempt()
    rank: int = 0
    world_size: int = 1

    @property
    def name(self) -> str:
        if not self.attempt.mark:
            return f"step-{self.step:012d}.pt"
        return f"step-{self.step:012d}.attempt-{self.attempt}.rank-{self.rank:05d}-of-{self.world_size:05d}.pt"


class SavedStep(NamedTuple):
    """A checkpoint of which every rank has a file. Checkpoints sort from old to new."""

    step: int
    attempt: Attempt
    world_size: int

    @property
    def files(self) -> list[SavedFile]:
        """Its files, in the order of the ranks."""
        return [SavedFile(self.step, self.attempt, rank, self.world_size) for rank in range(self.world_size)]


def parse(name: str) -> SavedFile | None:
    """The file of a checkpoint that has this name; None if it is no such name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, number, mark, rank, world_size = match.groups()
    if mark is None:
        return SavedFile(int(step))
    file = SavedFile(int(step), Attempt(int(number), mark), int(rank), int(world_size))
    return file if file.rank < file.world_size else None


def saved_files(names: Iterable[str]) -> list[SavedFile]:
    """The files of checkpoints among these names, from old to new."""
    return sorted(file for name in names if (file := parse(name)) is not None)


def complete_steps(files: Iterable[SavedFile], damaged: Collection[SavedFile] = ()) -> list[SavedStep]:
    """The checkpoints of which every rank has a file that is not `damaged`, from old to new."""
    ranks: dict[SavedStep, set[int]] = {}
    for file in files:
        if file not in damaged:
            ranks.setdefault(SavedStep(file.step, file.attempt, file.world_size), set()).add(file.rank)
    return sorted(step for step, found in ranks.items() if len(found) == step.world_size)


def own_file(step: SavedStep, rank: int, world_size: int | None) -> SavedFile | None:
    """The file of a checkpoint that this rank of `world_size` resumes from; None if the number of ranks has changed."""
    if step.world_size == 1:
        return step.files[0]
    return step.files[rank] if world_size == step.world_size else None


def files_to_read(step: SavedStep, rank: int, world_size: int | None) -> set[SavedFile]:
    """The files of a checkpoint that a rank may read: any, if it has none of its own."""
    own = own_file(step, rank, world_size)
    return set(step.files) if own is None else {own}


def wanted_on_disk(held: Sequence[Collection[SavedFile]], reads: Sequence[Collection[SavedFile]]) -> set[SavedFile]:
    """The files that only the memory of another node has: a rank that `reads` them needs them on the disk. `held` are
    the files in the memory of each rank's node."""
    elsewhere = {file for files, here in zip(reads, held, strict=True) for file in files if file not in here}
    return elsewhere & {file for here in held for file in here}


def next_attempt_number(files: Iterable[SavedFile]) -> int:
    """A number above that of each attempt that has left a file."""
    return max((file.attempt.number for file in files), default=0) + 1


def removable(
    files: Collection[SavedFile], newest: int, keep: int, damaged: Collection[SavedFile] = ()
) -> list[SavedFile]:
    """The files that are not needed after step `newest` has been saved: those older than the `keep` newest steps that
    are complete, and those of earlier attempts at the oldest of these. Incomplete checkpoints keep nothing alive, and
    let nothing be removed.

    Later steps than `newest` are ignored: they are damaged, or of a run that this one was deliberately reset from.
    """
    complete = {each.step: each for each in complete_steps(files, damaged) if each.step <= newest}
    kept = [complete[step] for step in sorted(complete)[-keep:]]
    if len(kept) < keep:
        return []
    oldest = kept[0]
    return [file for file in files if (file.step, file.attempt) < (oldest.step, oldest.attempt)]
