"""Torch jobs that scale themselves: the nodes report steps by the product's own `ThroughputReport`, each by a clock of
its own."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from msgspec.structs import replace

from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import NodeKey, RoundKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.autoscale.command import CommandKey, CommandResult, CommandRun
from dlrover_run.features.autoscale.model import AutoscaleAssignment, AutoscaleNodeReport, AutoscaleState
from dlrover_run.features.autoscale.node import ThroughputReport
from dlrover_run.features.autoscale.rules import STRONG, AutoscaleRules
from dlrover_run.features.autoscale.search import MAX_CRASHES
from dlrover_run.observe.page import Phase, Progress, StepSource
from dlrover_run.observe.tick import Tick
from dlrover_run.spec import JobSpec
from simulation.nodes import job_spec
from simulation.timeline import demand
from simulation.torch.invariants import TorchInvariants
from simulation.torch.nodes import TorchNode
from simulation.torch.program import TorchProgram

RETRY = 60.0
"""Seconds until nodes that did not come are requested again."""


class ScaledInvariants(TorchInvariants):
    """The invariants of torch jobs, and those of the autoscaler: each state can be stored, failures are excused a few
    times only, and the command that starts nodes runs once for each wish, and never twice at a time."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.runs: list[CommandRun] = []
        self._run_until = 0.0
        self.excused: dict[int, int] = {}
        self.targets: set[int] = set()

    def excuses(self, plan: Plan) -> bool:
        size = len(plan.members)
        self.excused[size] = self.excused.get(size, 0) + 1
        return size == plan.wanted_nodes

    def shown_size(self, requested: int) -> str:
        """A size stops the search, also the largest one."""
        return str(requested)

    def beginning(self, node: NodeKey, run: CommandRun, until: float, now: float) -> None:
        """Check a run of the command that a node begins, and that lasts until then."""
        demand(run.node == node, "the command runs on the node that the plan names")
        demand(all(run.key != other.key for other in self.runs), "no run of the command is repeated")
        demand(now >= self._run_until, "the command never runs twice at a time")
        last = self.runs[-1] if self.runs else None
        if self._durable and last is not None and last.nodes == run.nodes:
            demand(run.at >= last.at + RETRY, "the command runs once for each wish")
        self.runs.append(run)
        self._run_until = until

    def ending(self, node: NodeKey, now: float) -> None:
        """Note that a node is killed, or leaves, which ends its command."""
        if self.runs and self.runs[-1].node == node:
            self._run_until = min(self._run_until, now)

    def storing(self, before: Plan | None, after: Plan, now: float) -> None:
        super().storing(before, after, now)
        state = AutoscaleState.get(after.parts)
        rules = self._rules
        if state.target:
            self.targets.add(state.target)
            fits = rules.min_nodes <= state.target <= rules.max_nodes and state.target % rules.node_unit == 0
            demand(fits, f"{state.target} nodes are wanted, which the job may not have")
        for record in state.table:
            demand(record.crashes <= MAX_CRASHES or not record.blocks, "a size that was measured has not failed before")


class ScaledNode(TorchNode):
    """An agent that reports the steps of its workers."""

    _throughput: ThroughputReport | None = None
    _tick: Tick
    _begun: CommandKey | None = None
    _result: CommandResult | None = None

    def _begin(self, spec: JobSpec) -> None:
        self._offset = Random(f"clock {self.key}").randint(0, 10**15)
        self._since: tuple[RoundKey, float] = (RoundKey(), 0.0)
        super()._begin(spec)

    def _now(self) -> int:
        return self._offset + int(self.timeline.now * 1e9)

    def _runs(self, key: RoundKey) -> bool:
        return self.group is not None and self.group.live and self.group.key == key

    def _read(self) -> Mapping[str, Progress]:
        group = self.group
        if group is None or not group.live or not group.has_trained:
            return {}
        if self._since[0] != group.key:
            self._since = group.key, self.timeline.now
        trained = self.timeline.now - self._since[1]
        program = self._program
        assert isinstance(program, ScaledProgram)
        steps = 1 + int(trained * program.steps_per_second(group.ranks.nodes))
        return {"rank 0": Progress(steps, 0, 0.0, self._now(), StepSource.REPORT, Phase.TRAINING)}

    def _fail(self, name: str, error: Exception) -> None:
        raise error

    def _add_to_report(self, report: NodeReport) -> NodeReport:
        if self._throughput is None:
            self._tick = Tick(self._read, self._fail)
            self._throughput = ThroughputReport(self._tick, self._runs, lambda: self.run(self._receive), self._now)
        self._tick.follow(None, running=True)
        self._throughput.follow(self.rendezvous.assignment, self._leaving or self._is_over)
        self._follow_command()
        report = self._throughput.add_to_report(report)
        if self._result is None:
            return report
        part = replace(AutoscaleNodeReport.get(report.parts), command=self._result)
        return replace(report, parts=with_part(report.parts, part))

    def _follow_command(self) -> None:
        """Begin the run of the command that is assigned to this node, as `features/autoscale/scale_command` does."""
        part = AutoscaleAssignment.find(self.rendezvous.assignment.parts)
        run = None if part is None or self._leaving or self._is_over else part.command
        if run is None or run.key == self._begun:
            return
        self._begun, random = run.key, Random(f"command {run.key}")
        seconds = min(run.seconds, random.expovariate(0.5))
        assert isinstance(self._program, ScaledProgram)
        self._program.invariants.beginning(self.key, run, self.timeline.now + seconds, self.timeline.now)

        def end() -> None:
            self._result = CommandResult(run.key, random.random() < 0.3)
            self._receive()

        self.call_later(seconds, end)

    def _leave(self) -> None:
        assert isinstance(self._program, ScaledProgram)
        self._program.invariants.ending(self.key, self.timeline.now)
        if self._throughput is not None:
            self._throughput.close()
            self._tick.close()
        super()._leave()


class ScaledProgram(TorchProgram):
    """The same jobs, which scale themselves in seconds."""

    flag = " --scaled"

    def rules(self, random: Random) -> JobRules:
        rules = super().rules(random)
        drawn = Random(f"throughput {self._seed}")
        self._knee = drawn.uniform(1, 8)
        limits = AutoscaleRules(scaling=STRONG, block=0.5, warm_up=0.5, tolerance=0.1, node_timeout=5.0, retry=RETRY)
        limits = replace(limits, command=1, command_timeout=5.0)
        return replace(rules, parts=with_part(rules.parts, limits))

    def steps_per_second(self, nodes: int) -> float:
        """Return the throughput of a round with that many nodes."""
        return 20.0 * min(nodes, self._knee)

    def make_invariants(self, durable: bool, nodes_stay: bool) -> ScaledInvariants:
        self.invariants: ScaledInvariants = ScaledInvariants(self.scenario.rules, durable, nodes_stay, self.health)
        return self.invariants

    def new_node(self, name: str, number: int, is_return: bool) -> ScaledNode:
        random, rules = self.timeline.random, self.scenario.rules
        spec = job_spec(name, f"10.1.0.{number}", random.randint(1, 4), "default", None, rules)
        return ScaledNode(self, spec, f"{name}.{number}" if is_return else name, f"i{number}")
