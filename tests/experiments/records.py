"""What a worker of an experiment tells of its training, one line of JSON each.

Times are of the monotonic clock, which all processes of a machine share. `round` is a name that the workers of one
round have in common and nobody else.
"""

from __future__ import annotations

import msgspec


class Told(msgspec.Struct, frozen=True, tag=str.lower, kw_only=True):
    """By one worker, at one moment."""

    at: float
    round: str
    rank: int


class Began(Told, frozen=True):
    """It has met all others of its round."""

    world: int
    pid: int
    node: int


class Resumed(Told, frozen=True):
    """It goes on after `step` steps, when `completed` samples of `epoch` are done; all of these are 0 without a
    checkpoint."""

    step: int
    epoch: int
    completed: int


class Held(Told, frozen=True):
    """It stands still before a step until the test lets it go on."""

    step: int


class Step(Told, frozen=True):
    """It begins a step with its share of the samples."""

    step: int
    epoch: int
    world: int
    samples: tuple[int, ...]


class Done(Told, frozen=True):
    """It has taken the step, which needs all workers of the round."""

    step: int


class Saving(Told, frozen=True):
    """It begins to write the checkpoint after `step` steps."""

    step: int


class Saved(Told, frozen=True):
    """That checkpoint is written."""

    step: int


Record = Began | Resumed | Held | Step | Done | Saving | Saved

_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Began | Resumed | Held | Step | Done | Saving | Saved)


def read(line: bytes) -> Record:
    """The record in one line. Raises msgspec.ValidationError for a line that is none."""
    return _DECODER.decode(line)
