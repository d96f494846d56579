"""What an operator reads of a feature that chooses the size of a job."""

from __future__ import annotations

import msgspec

from dlrover_run.words.reasons import Reasons


class MeasuredSize(msgspec.Struct, frozen=True, kw_only=True):
    """One size. `throughput` is the work per second of all its nodes, None if it was not measured, and `error` its
    standard error as a share of it. `efficiency` is the share of the nodes beyond the next smaller size in the table
    that has become throughput, 1 if twice the nodes do twice the work; None for the smallest. `blocks` is how many
    intervals were measured. `failures` counts the rounds of this size in which workers failed before it was measured.
    """

    nodes: int
    throughput: float | None = None
    error: float | None = None
    efficiency: float | None = None
    blocks: int = 0
    failures: int = 0


class DesiredServers(msgspec.Struct, frozen=True, kw_only=True):
    """How many parameter servers a feature wants, 0 for the least, and why; `paused` while a number that an operator
    has fixed holds instead. `processor` and `memory` are what the busiest of them use, in percent of what they may."""

    wanted: int
    reason: str = ""
    reasons: Reasons = ()
    paused: bool = False
    processor: int | None = None
    memory: int | None = None


class SizeChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What a feature wants. `wanted_nodes` is how many nodes the job would make use of now, 0 as long as that is not
    known, and `chosen_nodes` how many the round is to have: fewer, where the job does not wait for the others.
    `condition` is a word for the state of its search, `measuring` how many blocks of the size that trains are measured
    so far, and `paused` is set while the size that an operator has fixed holds instead. `reason` renders `reasons`.
    `command_failed` says that the last run of the command that starts nodes has failed. `sizes` are those that were
    tried.

    Sizes count nodes, or what `noun` names. A job with parameter servers chooses its workers beside the chief, and its
    `servers`."""

    noun: str = "node"
    wanted_nodes: int
    chosen_nodes: int
    condition: str
    reason: str = ""
    reasons: Reasons = ()
    paused: bool = False
    command_failed: bool = False
    measuring: int = 0
    sizes: tuple[MeasuredSize, ...] = ()
    servers: DesiredServers | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether `wanted_nodes` is a size that was chosen. A job may do without workers beside its chief."""
        return self.wanted_nodes > 0 or (self.noun != "node" and self.condition != "Start")

    @property
    def is_measuring(self) -> bool:
        """Whether the size that trains has not been measured yet."""
        return not any(one.nodes == self.chosen_nodes and one.blocks for one in self.sizes)
