"""The seam between the workers of a node and a feature: what happens to each round."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from dlrover_run.agent.node_feature import NodeFeature
from dlrover_run.console.console import DrawTable
from dlrover_run.coordination.records.assignment import Assignment, Waiting
from dlrover_run.coordination.records.round import RankAssignment, RoundKey

if TYPE_CHECKING:
    from dlrover_run.workers.round import WorkerRound
    from dlrover_run.workers.specs import Worker, WorkerSpec


class WaitDetails(Protocol):
    """What a feature prints around the line about a wait (`workers.reporter`)."""

    def before(self, assignment: Assignment) -> None:
        """Print what comes before that line, for each assignment."""

    def table(self, waiting: Waiting) -> DrawTable | None:
        """What is drawn below the line, if anything."""

    def news(self, waiting: Waiting) -> None:
        """Print what has changed while this node waits."""

    def after(self, assignment: Assignment) -> None:
        """Print what comes after that line, for each assignment."""


class WorkersFeature(NodeFeature):
    """What a node does for a feature of a job with rounds of workers. Here each method does nothing.

    Of several features each is called in the order of `features.FEATURES`. In a turn of the agent's loop:
    `NodeFeature.follow`, `wait_details`, `may_keep` where the node has no ranks, else `kept`,
    `NodeFeature.add_to_report`. `RoundStarter` calls the others. If all workers start anew: `before_cleanup` (not at
    the first round), the end of what was left behind, `before_round`, `round_ends` (not at the first round),
    `environment` of each worker, `round_begins`, the start of the processes (`prepared` for each), `round_runs`. If
    some are replaced: `before_round`, the end of those that were stopped, `before_cleanup`, `environment`,
    `round_ends`, `round_begins`, the start of the others, `round_runs`. At the end of the job: `round_ends`,
    `NodeFeature.close`. `worker_ended` and `store_reached` may come at any time between.

    `meets_elsewhere`: the workers do not meet at the store of their round. `wait_details` is used by the
    `ProgressReporter`.
    """

    meets_elsewhere = False
    wait_details: WaitDetails | None = None

    @property
    def needs_devices(self) -> bool:
        """Whether the devices of this node, which no worker uses, have to stay as they are for now. A feature that
        uses them asks in each turn of the agent's loop, before it does."""
        return False

    def environment(self, key: RoundKey, local_rank: int) -> Mapping[str, str]:
        """Variables of a worker that is about to start for that round. Called for each of them, before
        `round_begins`."""
        return {}

    async def before_cleanup(self) -> None:
        """What the workers that have ended left behind is ended next, or, if others go on, has been ended but for what
        holds something that the new ones need. It may wait; the start of the new ones does too."""

    async def before_round(self, ranks: RankAssignment, is_wanted: Callable[[], bool]) -> None:
        """The workers of a round start next, if they still are to start: `is_wanted` says so, also after a wait. Called
        again for the same round when workers are replaced in it. It may wait; the start does too. Raises what ends the
        node."""

    def round_begins(self, workers: WorkerRound) -> None:
        """The workers of this round start now, those that it has taken over excepted."""

    async def prepared(self, spec: WorkerSpec, until: Future[Any] | None) -> int | None:
        """The pid of a process that waited for this and becomes the worker of `spec`, which begins when `until` is
        done; None if there is none, so that one is forked or spawned. `RoundStarter` asks for each worker that starts;
        the first answer counts. Raises nothing."""
        return None

    def round_runs(self, workers: WorkerRound) -> None:
        """They have been started. Raises OSError, which ends the node."""

    def round_ends(self) -> None:
        """What was opened for the workers of the last round is closed next, or belongs to another round. Idempotent."""

    def worker_ended(self, worker: Worker) -> None:
        """A worker has ended, by itself or stopped. Called at once, before its output is collected."""

    def store_reached(self, key: RoundKey, address: str) -> None:
        """The first client has connected, from that address, to the store of the round, which this node serves."""

    def may_keep(self, assignment: Assignment) -> bool:
        """Whether running workers may go on in a round that has not formed yet. `TorchAdapter` asks while they run and
        this node has no ranks; they are stopped if no feature says so."""
        return False

    def kept(self, current: WorkerRound, ranks: RankAssignment) -> frozenset[int] | None:
        """The local ranks of the workers of `current` that go on in the round of these ranks, where others take the
        places of the rest; None if all workers are started anew, or if the round is complete. `TorchAdapter` asks in
        each turn in which this node has ranks and workers; the first answer counts."""
        return None
