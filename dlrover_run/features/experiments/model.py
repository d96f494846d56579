"""What is known of the failures of a job: a record of each round that failed, and of what it can follow."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.bounds import Count, Name, NodeId, Total
from dlrover_run.features.experiments.kinds import Kind

MAX_TRIALS = 32
"""Rounds of a job that are remembered: no verdict takes half as many."""

AT_ONCE = 3
"""Steps of a round within which a failure comes at once, so that all that happens at a start has the same step."""

Device = Annotated[str, Meta(max_length=80, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]


class Alike(enum.StrEnum):
    """Which workers failed in the same way in one round."""

    ONE = "one"
    NODE = "node"
    """Several, all on one node as far as is known."""
    NODES = "nodes"
    """Workers of several nodes."""


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A round that a failure of this kind ended, and where the first worker failed: its rank, its node and its device,
    which is empty where a worker has none of its own.

    `workers` are those of the round, `local` those of the node. `depth` is how many steps the worker had made in the
    round, None if it reports none; `resumed` the checkpoint from which it began, None if that is not known.
    """

    round: Total
    kind: Kind
    rank: Total
    local_rank: Count
    node: NodeId
    host: Name
    device: Device = ""
    workers: Total = 1
    local: Count = 1
    alike: Alike = Alike.ONE
    depth: Total | None = None
    resumed: Total | None = None

    @property
    def step(self) -> int | None:
        """The step at which it failed, counted from that of its checkpoint; None if it reports no steps."""
        return None if self.depth is None else self.depth + (self.resumed or 0)

    @property
    def at_once(self) -> bool:
        return self.depth is None or self.depth <= AT_ONCE


class Passed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A round that came further than the failure of this kind before it, from the checkpoint `resumed`."""

    round: Total
    kind: Kind
    resumed: Total | None = None


class Cause(enum.StrEnum):
    """What a failure may follow."""

    GPU = "gpu"
    NODE = "node"
    RANK = "rank"
    CHECKPOINT = "checkpoint"
    CODE = "code"
    CHANCE = "chance"


class Suspect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thing that a failure may follow; what does not name it is empty."""

    cause: Cause
    node: Annotated[str, Meta(max_length=128)] = ""
    device: Device = ""
    number: Total = 0
    """The rank, or the step of the checkpoint."""


class Change(enum.StrEnum):
    """The one thing that the next round changes."""

    DEVICES = "devices"
    """The workers of the suspect's node have other devices."""
    NODES = "nodes"
    """The suspect's node exchanges its ranks with another one."""
    CHECKPOINT = "checkpoint"
    """The workers begin from an earlier checkpoint."""
