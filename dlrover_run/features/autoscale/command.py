"""When `--scale-command` runs, on which node, and for how many nodes. Pure.

Each run is part of the plan before any node learns of it, and names the one process that may begin it. So two nodes
never run the command for the same wanted size, whichever node has rank 0 by then, and whichever coordinator decides: a
run whose node is lost is not given to another one. The command names a whole number of nodes, so the next run makes up
for a lost one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from dlrover_run.coordination.records.bounds import Count, Total
from dlrover_run.coordination.records.round import NodeKey

END_MARGIN = 30.0
"""Seconds after the time limit of a run in which its node must have reported its end. Then the next one may begin: the
node is lost, or cut off, and has ended the command itself."""

Time = Annotated[float, Meta(ge=0, le=1e12)]


class CommandKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which run: its number, from 1, and the epoch of the coordinator that has decided it."""

    epoch: int = 0
    number: Total = 0


class CommandRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of the command with that number of nodes, by the process `node`, which stops it after `seconds`. `at` is
    the job time of the decision. `failed` is None until the node has reported the end."""

    key: CommandKey
    nodes: Count
    node: NodeKey
    seconds: Time
    at: Time = 0.0
    failed: bool | None = None


class CommandResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node reports of the last run that it has begun, once that has ended."""

    key: CommandKey
    failed: bool = False


class Demand(msgspec.Struct, frozen=True):
    """How many nodes the job should have in all, None where there is nothing to request now, and how many are here."""

    nodes: int | None
    present: int


def follow_result(run: CommandRun | None, result: CommandResult | None) -> CommandRun | None:
    """The run after what its node has reported."""
    if run is None or result is None or result.key != run.key or run.failed is not None:
        return run
    return replace(run, failed=result.failed)


def next_run(
    before: CommandRun | None, demand: Demand, node: NodeKey, epoch: int, seconds: float, retry: float, now: float
) -> CommandRun | None:
    """The run that follows, on the node with rank 0; `before` itself while there is none to follow.

    One run ends before the next one begins. The same number is requested again only after `retry` seconds, while
    another number of nodes is here.
    """
    wanted = demand.nodes
    if wanted is None:
        return before
    if before is not None:
        if before.failed is None and now - before.at < before.seconds + END_MARGIN:
            return before
        is_due = wanted != demand.present and now - before.at >= retry
        if wanted == before.nodes and not is_due:
            return before
    elif wanted == demand.present:
        return None
    number = 1 if before is None else before.key.number + 1
    return CommandRun(CommandKey(epoch, number), wanted, node, seconds, now)
