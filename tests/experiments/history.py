"""What was trained in the end, and whether a run without faults would have trained the same.

A restore undoes what was trained after the checkpoint: of a step that was taken in two rounds the later one counts. The
rest is the effective history. Each epoch of it must be the epoch's permutation of all samples, distributed in order to
the ranks of the round: no sample is lost or used twice.

Each worker reports records, one line of JSON each. Times are of the monotonic clock, which all processes of a machine
share. `round` is a name that the workers of one round, and no others, share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec


class Report(msgspec.Struct, frozen=True, tag=str.lower, kw_only=True):
    """By one worker, at one moment."""

    at: float
    round: str
    rank: int


class Began(Report, frozen=True):
    """It has met all other workers of its round."""

    world: int
    pid: int
    node: int


class Resumed(Report, frozen=True):
    """It resumes after `step` steps, when `completed` samples of `epoch` are done; all of these are 0 without a
    checkpoint.
    """

    step: int
    epoch: int
    completed: int


class Held(Report, frozen=True):
    """It is held before a step until the test releases it."""

    step: int


class Step(Report, frozen=True):
    """It begins a step with its share of the samples."""

    step: int
    epoch: int
    world: int
    samples: tuple[int, ...]


class Done(Report, frozen=True):
    """It has finished the step, which needs all workers of the round."""

    step: int


class Saving(Report, frozen=True):
    """It begins to write the checkpoint after `step` steps."""

    step: int


class Saved(Report, frozen=True):
    """It has written that checkpoint."""

    step: int


Record = Began | Resumed | Held | Step | Done | Saving | Saved

_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Began | Resumed | Held | Step | Done | Saving | Saved)


def read(line: bytes) -> Record:
    """The record in one line. Raises msgspec.ValidationError for an invalid line."""
    return _DECODER.decode(line)


Order = Callable[[int], Sequence[int]]
"""The samples of an epoch, in the order in which all ranks together use them up."""


@dataclass
class Round:
    """The records of the workers of one round. `members` are their process and node by rank; `worked` is the index of
    the last completed step or checkpoint among all records, and `began` that of the round.
    """

    name: str
    world: int
    began: int
    members: dict[int, tuple[int, int]] = field(default_factory=dict)
    resumed: dict[int, Resumed] = field(default_factory=dict)
    steps: dict[int, dict[int, Step]] = field(default_factory=dict)
    done: dict[int, set[int]] = field(default_factory=dict)
    worked: int = -1

    @property
    def nodes(self) -> dict[int, int]:
        """The node of each rank."""
        return {rank: node for rank, (_, node) in sorted(self.members.items())}

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank."""
        return {rank: pid for rank, (pid, _) in sorted(self.members.items())}

    @property
    def is_whole(self) -> bool:
        """Whether all its workers have met."""
        return len(self.members) == self.world

    @property
    def start(self) -> int | None:
        """The steps that were done when it began, None if no worker reported it."""
        return next((resumed.step for resumed in self.resumed.values()), None)

    @property
    def end(self) -> int:
        """The steps that are done after the last one that rank 0 has reported."""
        return max((step + 1 for step, ranks in self.done.items() if 0 in ranks), default=self.start or 0)


def rounds_of(records: Sequence[Record]) -> list[Round]:
    """The rounds in the order in which they began."""
    rounds: dict[str, Round] = {}
    for number, record in enumerate(records):
        if isinstance(record, Began):
            known = rounds.setdefault(record.round, Round(record.round, record.world, number))
            known.members[record.rank] = (record.pid, record.node)
            continue
        current = rounds.get(record.round)
        if current is None:
            raise ValueError(f"rank {record.rank} tells of the round {record.round}, which it has not begun")
        if isinstance(record, Resumed):
            current.resumed[record.rank] = record
        elif isinstance(record, Step):
            current.steps.setdefault(record.step, {})[record.rank] = record
        elif isinstance(record, Done):
            current.done.setdefault(record.step, set()).add(record.rank)
        if isinstance(record, (Done, Saved)):
            current.worked = number
    return list(rounds.values())


def effective_steps(rounds: Sequence[Round]) -> Iterator[tuple[Round, int]]:
    """The steps that no later round has undone, with the round that took them."""
    keep = None
    kept: list[tuple[Round, int]] = []
    for each in reversed(rounds):
        if each.start is None:
            continue
        end = each.end if keep is None else min(keep, each.end)
        kept += [(each, step) for step in reversed(range(each.start, end))]
        keep = each.start if keep is None else min(keep, each.start)
    return reversed(kept)


def find_faults(records: Sequence[Record], size: int, epochs: int, order: Order) -> list[str]:
    """What is wrong with a history that should be `epochs` whole epochs of `size` samples; empty if nothing is."""
    rounds = rounds_of(records)
    return [*_in_two_worlds(rounds), *_resumed_wrongly(records, rounds), *_trained_wrongly(rounds, size, epochs, order)]


def _in_two_worlds(rounds: Sequence[Round]) -> Iterator[str]:
    for old, new in pairwise(rounds):
        if old.worked > new.began:
            yield f"the round {old.name} still trained when the round {new.name} had begun"


def _resumed_wrongly(records: Sequence[Record], rounds: Sequence[Round]) -> Iterator[str]:
    for each in rounds:
        places = {(resumed.step, resumed.epoch, resumed.completed) for resumed in each.resumed.values()}
        if len(places) > 1:
            yield f"the workers of the round {each.name} went on from different places: {sorted(places)}"
        before = records[: each.began]
        saved = max((record.step for record in before if isinstance(record, Saved)), default=0)
        # A worker that was killed after it wrote a checkpoint and before it reported it has saved it all the same.
        possible = {saved, *(record.step for record in before if isinstance(record, Saving) and record.step > saved)}
        if each.start is not None and each.start not in possible:
            yield f"the round {each.name} went on from step {each.start}, and the newest checkpoint was of step {saved}"


def _trained_wrongly(rounds: Sequence[Round], size: int, epochs: int, order: Order) -> Iterator[str]:
    epoch, completed = 0, 0
    for due, (each, step) in enumerate(effective_steps(rounds)):
        if step != due:
            yield f"step {due} is missing: step {step} of the round {each.name} follows"
            return
        if completed == size:
            epoch, completed = epoch + 1, 0
        if wrong := _step_wrong(each, step, epoch, completed, order(epoch)):
            yield f"step {step} of the round {each.name}: {wrong}"
            return
        completed += sum(len(share.samples) for share in each.steps[step].values())
    if (epoch, completed) != (epochs - 1, size):
        yield f"the training ended in epoch {epoch} after {completed} of {size} samples, and {epochs} epochs were due"


def _step_wrong(each: Round, step: int, epoch: int, completed: int, order: Sequence[int]) -> str | None:
    shares = each.steps.get(step, {})
    if sorted(shares) != list(range(each.world)):
        return f"of {each.world} ranks {sorted(shares)} took part"
    if {share.world for share in shares.values()} != {each.world}:
        return f"the sampler dealt to another number of ranks than {each.world}"
    if {share.epoch for share in shares.values()} != {epoch}:
        return f"it is of epoch {sorted({share.epoch for share in shares.values()})}, and epoch {epoch} is not done"
    count = sum(len(share.samples) for share in shares.values())
    batch = order[completed : completed + count]
    if count == 0:
        return "it has no samples"
    for rank, share in shares.items():
        if (due := tuple(batch[rank :: each.world])) != share.samples:
            return f"rank {rank} trained {share.samples}, and {due} were due"
    resumed = each.resumed.get(0)
    if resumed is not None and resumed.step == step and (resumed.epoch, resumed.completed) != (epoch, completed):
        # At the end of an epoch the checkpoint still names that epoch.
        if (resumed.epoch, resumed.completed) == (epoch - 1, len(order)) and completed == 0:
            return None
        return f"it was resumed with {resumed.completed} samples of epoch {resumed.epoch}, {completed} of {epoch} were"
    return None
