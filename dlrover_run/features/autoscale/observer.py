"""The autoscaler of a job with rounds: nodes' reports become a view of the job, and what is decided its size."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from dlrover_run.coordination.decision import DeadlineReason, deadline_if
from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.observer import Observation, Observer
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.round import NodeKey, RankAssignment
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.features.autoscale.command import CommandRun, Demand, follow_result, next_run
from dlrover_run.features.autoscale.decide import decide, find_record, spares_until
from dlrover_run.features.autoscale.measure import remaining_seconds
from dlrover_run.features.autoscale.model import (
    AutoscaleAssignment,
    AutoscaleNodeReport,
    AutoscaleState,
    FailureAtSize,
    Measurement,
    RoundClock,
    SizeView,
    StepsReport,
    recovered,
)
from dlrover_run.features.autoscale.rules import AutoscaleRules
from dlrover_run.words.reasons import render

KEEPERS = 3
"""Nodes that keep what was found, for a coordinator that has lost its records: those with the first ranks."""

REPORTS_PER_BLOCK = 2
"""Reports of the steps in one block of a measurement."""

BLOCKS_PER_REPORT = 3
"""Blocks of that length between two reports once the size was measured: then they only show whether it changes."""


class AutoscaleObserver(Observer):
    """Measures the sizes that the job has, and chooses the next one. After the end of a round it looks at once, as that
    may have been a failure of its size: the next round is formed with the size that is wanted then."""

    def __init__(self, rules: JobRules) -> None:
        self.rules = rules
        self.limits = AutoscaleRules.get(rules.parts)
        self.sizes = self.limits.allowed(rules.min_nodes, rules.max_nodes, rules.node_unit)

    def observe(self, plan: Plan, nodes: Nodes, now: float) -> Observation:
        before = AutoscaleState.get(plan.parts)
        view: SizeView | None = None
        if plan.desired is not None and plan.desired.fixed:
            # What is measured again later begins with a round of its own.
            after = replace(before, measurement=Measurement(), paused_at=None, short_since=None, clock=RoundClock())
        else:
            before_round = replace(before, clock=_clock(before, plan, nodes, now))
            view = job_view(before_round, plan, nodes)
            remaining = remaining_seconds(self.limits, before_round, view.size, view.progress)
            after = decide(self.limits, self.sizes, before_round, replace(view, remaining=remaining), now)
        if self.limits.command:
            view = view or job_view(before, plan, nodes)
            after = replace(after, command=self._command(after, view, plan, nodes, now))
        until = spares_until(self.limits, after) if after.target and plan.phase is PlanPhase.TRAINING else None
        # A time that has passed is no deadline: the coordinator would decide again at once, and for ever.
        deadlines = deadline_if(None if until is None or until <= now else until, DeadlineReason.FEATURE)
        if after == before:
            return Observation(deadlines=deadlines)
        if after.lasting != before.lasting:
            after = replace(after, changed_at=now, epoch=plan.epoch)
        is_news = (after.target, after.condition) != (before.target, before.condition)
        lines = (f"autoscale: {after.condition}: {render(after.reasons)}",) if is_news else ()
        return Observation(after, deadlines, lines)

    def _command(
        self, state: AutoscaleState, view: SizeView, plan: Plan, nodes: Nodes, now: float
    ) -> CommandRun | None:
        """The run of the command that is under way, or begins now."""
        run = state.command
        if run is not None and (holder := nodes.get(run.node)) is not None:
            part = AutoscaleNodeReport.find(holder.report.parts)
            run = follow_result(run, None if part is None else part.command)
        if not view.size or view.busy:
            return run
        demand = Demand(self._nodes_in_all(state, plan, view), view.present)
        seconds, retry = self.limits.command_timeout, self.limits.retry
        return next_run(run, demand, plan.members[0].key, plan.epoch, seconds, retry, now)

    def _nodes_in_all(self, state: AutoscaleState, plan: Plan, view: SizeView) -> int | None:
        """How many nodes there should be, with the spares that the user wants; None while none is to come or to go."""
        if plan.desired is not None and plan.desired.fixed:
            return plan.desired.max_nodes + self.rules.spares
        wanted = max(state.target, state.wish)
        if not state.target or (wanted <= view.present and not state.condition.is_quiet):
            # A search may need again the nodes that it does not need now.
            return None
        return wanted + self.rules.spares

    def recovered(self, plan: Plan, nodes: Nodes) -> AutoscaleState | None:
        """What the nodes have kept."""
        parts = (AutoscaleNodeReport.find(state.report.parts) for state in nodes.values())
        kept = [part.known for part in parts if part is not None and part.known is not None]
        if not kept:
            return None
        latest = max(kept, key=lambda state: (state.epoch, state.changed_at))
        return recovered(latest)

    def orders(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, AutoscaleAssignment]:
        """The node with rank 0 reports its steps, the first ones keep what was found, and one may run the command."""
        if not ranks:
            return {}
        state = AutoscaleState.get(plan.parts)
        record = find_record(state, len(plan.members))
        interval = self.limits.block / REPORTS_PER_BLOCK
        if record is not None and record.blocks:
            interval = self.limits.block * BLOCKS_PER_REPORT
        known = state.lasting if state.changed_at else None
        given = {
            member.key: AutoscaleAssignment(interval if rank == 0 else 0.0, known)
            for rank, member in enumerate(plan.members[:KEEPERS])
        }
        run = state.command
        if run is not None and run.failed is None:
            given[run.node] = replace(given.get(run.node, AutoscaleAssignment()), command=run)
        return given


def job_view(state: AutoscaleState, plan: Plan, nodes: Nodes) -> SizeView:
    """The input of a decision: the job as it is now."""
    trains = plan.phase is PlanPhase.TRAINING
    leaving = {*plan.draining, *plan.to_drain}
    size = len(plan.members)
    failed = plan.phase is PlanPhase.GATHERING and plan.failure is not None
    return SizeView(
        round=plan.key.number,
        size=size if trains else 0,
        present=sum(one.is_available and key not in leaving for key, one in nodes.items()),
        progress=_progress(state, plan, nodes),
        failure=FailureAtSize(plan.key.number, size) if failed else None,
        busy=trains and _is_busy(plan, nodes),
    )


def _is_busy(plan: Plan, nodes: Nodes) -> bool:
    """Whether a member has succeeded, or is about to be lost or to fail."""
    for member in plan.members:
        state = nodes.get(member.key)
        if member.done or state is None or not state.connected or state.succeeded_in(plan.key):
            return True
        if state.report.phase is NodePhase.FAILED and state.report.in_round(plan.key):
            return True
    return False


def _report(plan: Plan, nodes: Nodes) -> AutoscaleNodeReport | None:
    """What the node with rank 0 reports of the round that runs."""
    if plan.phase is not PlanPhase.TRAINING:
        return None
    state = nodes.get(plan.members[0].key)
    part = None if state is None else AutoscaleNodeReport.find(state.report.parts)
    return part if part is not None and part.steps and part.key == plan.key else None


def _clock(state: AutoscaleState, plan: Plan, nodes: Nodes, now: float) -> RoundClock:
    """When the steps of the round began, by the first report of them, which has just been received."""
    part = _report(plan, nodes)
    if part is None or state.clock.key == plan.key:
        return state.clock
    return RoundClock(plan.key, round(now - part.age - part.seconds, 3))


def _progress(state: AutoscaleState, plan: Plan, nodes: Nodes) -> StepsReport | None:
    part = _report(plan, nodes)
    if part is None or state.clock.key != plan.key:
        return None
    return StepsReport(part.steps, max(0.0, round(state.clock.began + part.seconds, 3)), part.samples, part.left)


OBSERVER = AutoscaleObserver
