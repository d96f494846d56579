"""What a job that chooses its own numbers of workers and parameter servers knows and wants: a part of the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from dlrover_run.coordination.records.bounds import Count, Total
from dlrover_run.coordination.records.size_choice import DesiredServers, SizeChoice
from dlrover_run.features.autoscale import model as autoscale
from dlrover_run.features.autoscale.model import AutoscaleState, Log, Measurement, Spread, Time
from dlrover_run.words.reasons import BoundedReasons, render
from tf_ps_runner.cluster.size_text import ServersCode, of_workers

CHIEFS = 1
"""The sizes of the autoscaler count the tasks that train: the chief, and the workers."""

MAX_PERCENT = 1000

Percent = Annotated[int, Meta(ge=0, le=MAX_PERCENT)]
"""A task without a limit may use more than its share."""


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The throughput of `size` tasks that train with that many `servers`, before one was added for the processors of
    these: the natural logarithm of the work per second, and its standard error."""

    servers: Count
    size: Count
    rate: Log
    error: Spread


class ServersChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known and wanted of the servers.

    `target` is how many the job should have, 0 as long as it wants no other number than the least. `processor` and
    `memory` are what the busiest node and server use, None before a report. They are the limit since `busy_since`, in
    the version `version`. `baseline` is what the last addition for the processors has still to be compared with. None
    is added for the processors before `quiet_until`, after `refusals` additions in succession that were not worth it.
    `lacking` is the number that is wanted and for which there is no room, 0 if there is none.
    """

    target: Count = 0
    reasons: BoundedReasons = (ServersCode.FIRST(),)
    version: Total = 0
    processor: Percent | None = None
    memory: Percent | None = None
    busy_since: Time | None = None
    baseline: Baseline | None = None
    quiet_until: Time = 0.0
    refusals: Count = 0
    lacking: Count = 0

    @property
    def lasting(self) -> ServersChoice:
        """What is worth keeping when a coordinator without a journal takes over."""
        return replace(self, version=0, processor=None, memory=None, busy_since=None)


class ReplicaChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the job knows and wants. The throughputs in `workers` were measured with `measured_with` servers, 0 before
    the first."""

    workers: AutoscaleState = AutoscaleState()
    servers: ServersChoice = ServersChoice()
    measured_with: Count = 0

    @property
    def lasting(self) -> ReplicaChoice | None:
        """What each node keeps for a coordinator without a journal; None if there is nothing to keep."""
        if not self.workers.changed_at:
            return None
        return ReplicaChoice(self.workers.lasting, self.servers.lasting, self.measured_with)

    @property
    def wanted_workers(self) -> int | None:
        """How many workers are wanted beside the chief; None for as many as fit."""
        return max(0, self.workers.target - CHIEFS) if self.workers.target else None


def recovered(choice: ReplicaChoice) -> ReplicaChoice:
    """What a node has kept, in the job time of a coordinator that has just begun to count."""
    before, quiet_until = choice.workers, choice.servers.quiet_until
    left = max(0.0, quiet_until - before.changed_at)
    return replace(choice, workers=autoscale.recovered(before), servers=replace(choice.servers, quiet_until=left))


def search_again(state: AutoscaleState) -> AutoscaleState:
    """The state without the throughputs that were measured, because they do not hold any more."""
    failed = tuple(one for one in state.table if not one.blocks)
    return replace(state, table=failed, measurement=Measurement(), changes=0, quiet_until=0.0, confirmed=0)


def size_choice(choice: ReplicaChoice, fixed: Mapping[str, int]) -> SizeChoice:
    """The choice for an operator, in numbers of workers beside the chief; `fixed` are the numbers that an operator has
    fixed, by the name of the role."""
    shown = choice.workers.size_choice
    reasons = of_workers(shown.reasons)
    servers = choice.servers
    return msgspec.structs.replace(
        shown,
        noun="worker",
        wanted_nodes=max(choice.wanted_workers or 0, choice.workers.wish - CHIEFS),
        chosen_nodes=choice.wanted_workers or 0,
        reason=render(reasons),
        reasons=reasons,
        paused="worker" in fixed,
        sizes=tuple(replace(one, nodes=one.nodes - CHIEFS) for one in shown.sizes),
        servers=DesiredServers(
            wanted=servers.lacking or servers.target,
            reason=render(servers.reasons),
            reasons=servers.reasons,
            paused="ps" in fixed,
            processor=servers.processor,
            memory=servers.memory,
        ),
    )
