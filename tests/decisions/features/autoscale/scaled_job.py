"""A job in virtual time whose throughput is a given function of its size, and whose nodes report it as agents do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace
from support.virtual_torch import TorchJob, rules

from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.requests import Action
from dlrover_run.coordination.records.round import Failure, RoundKey
from dlrover_run.features.autoscale.command import CommandKey, CommandResult
from dlrover_run.features.autoscale.model import AutoscaleAssignment, AutoscaleNodeReport, AutoscaleState
from dlrover_run.features.autoscale.rules import STRONG, AutoscaleRules

LIMITS = AutoscaleRules(scaling=STRONG)
TICK = 5.0

LINEAR = {1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0}
KNEE = {1: 10.0, 2: 20.0, 3: 20.5, 4: 21.0}
FLAT = {1: 10.0, 2: 10.0, 3: 10.0, 4: 10.0}


class ScaledJob(TorchJob):
    """A job of at most four nodes; `curve` gives the steps per second of each size."""

    def __init__(
        self, curve: Mapping[int, float], limits: AutoscaleRules = LIMITS, least: int = 1, **more: Any
    ) -> None:
        super().__init__(rules(least, 4, parts=(limits,), **more))
        self.curve = curve
        self.kept: dict[str, AutoscaleState] = {}
        self.began: tuple[RoundKey, float] = (RoundKey(), 0.0)
        self.sizes: list[int] = []
        self.failing: set[int] = set()
        self.left: int | None = None
        """What is left at the first step, None if the script does not say it."""
        self.made = 0.0
        self.begun: dict[CommandKey, tuple[str, int]] = {}
        """The node that has begun each run of the command, and the number of nodes in it."""
        self.results: dict[str, CommandResult] = {}

    @property
    def state(self) -> AutoscaleState:
        return AutoscaleState.get(self.plan.parts)

    def train(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let the job train, with a report of the node with rank 0 at each tick."""
        end = self.now + seconds
        while self.now < end and not self.is_over and not until():
            self.wait(TICK)
            self.tick()

    def settle_search(self) -> None:
        """Let the job train until the search has ended, and a little longer."""
        self.train(3600, until=lambda: self.state.condition.has_settled)
        self.train(100)

    def tick(self) -> None:
        plan = self.plan
        if plan.phase is not PlanPhase.TRAINING:
            return
        if self.began[0] != plan.key:
            self.began = plan.key, self.now
            self.sizes.append(len(plan.members))
        self.made += self.curve[len(plan.members)] * TICK
        if len(plan.members) in self.failing and self.now - self.began[1] > 2 * TICK:
            self.fail_here()
            return
        for rank, name in enumerate(self.ranks):
            if name in self.away:
                continue
            part = AutoscaleAssignment.find(self.assignment(name).parts)
            if part is not None and part.known is not None:
                self.kept[name] = part.known
            found = AutoscaleNodeReport(known=self.kept.get(name), command=self.results.get(name))
            if rank == 0 and part is not None and part.interval:
                trained = self.now - self.began[1]
                steps = int(trained * self.curve[len(plan.members)])
                last = steps / self.curve[len(plan.members)]
                found = replace(found, key=plan.key, steps=steps, seconds=last, age=trained - last)
                if self.left is not None:
                    found = replace(found, left=max(0, int(self.left - self.made)))
            if found != AutoscaleNodeReport():
                self.report(name, parts=(found,))

    @property
    def requested(self) -> list[int]:
        """The numbers of nodes of the runs of the command, in their order."""
        return [nodes for _, nodes in self.begun.values()]

    def take(self, name: str) -> bool:
        """A node begins a run of the command as soon as it receives it."""
        changed = super().take(name)
        part = AutoscaleAssignment.find(self.assignment(name).parts)
        if part is not None and part.command is not None:
            key, ran = part.command.key, (name, part.command.nodes)
            assert self.begun.setdefault(key, ran) == ran, "one node begins each run"
        return changed

    def end_command(self, *, failed: bool = False) -> None:
        """The last run that was begun ends, and its node reports that."""
        key, (name, _) = list(self.begun.items())[-1]
        self.results[name] = CommandResult(key, failed)
        self.report(name, parts=(AutoscaleNodeReport(known=self.kept.get(name), command=self.results[name]),))

    def fail_here(self) -> None:
        """A worker of rank 0 fails."""
        name = self.ranks[0]
        self.report_phase(name, NodePhase.FAILED, Failure(0, name, "raised OutOfMemoryError", node_rank=0), True)

    def request_auto(self) -> None:
        """An operator gives the size back to the policy."""
        self.request(Action.SCALE)

    def take_over(self, epoch: int, with_journal: bool) -> None:
        """Another coordinator takes over, and all nodes connect to it."""
        since = self.now - self.began[1]
        self.succeed_by_another(epoch, with_journal)
        self.began = self.began[0], self.now - since
        self.come_back(*self.statuses)
        self.wait(0.1)
