"""Nodes of a torch job: `NodeState`, `build_report` and `reconcile` of the product, with simulated workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from support.policy_parts import check_part, check_rules

from dlrover_run.agent.node_state import leave_report
from dlrover_run.agent.reconcile import DesiredTask, Start, TaskState, reconcile
from dlrover_run.coordination.records.plan import OVER
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.spec import JobSpec
from dlrover_run.workers.adapter import build_report
from dlrover_run.workers.starter import Starter
from simulation.nodes import Node
from simulation.torch.checks import CheckPart
from simulation.torch.preparation import LONGEST, REACTION, Draw, start_preparing, watch_report
from simulation.torch.workers import Group

if TYPE_CHECKING:
    from simulation.torch.program import TorchProgram


class TorchNode(Node):
    """One agent with the workers of a round."""

    def __init__(self, program: TorchProgram, spec: JobSpec, host: str, incarnation: str) -> None:
        self._program = program
        self.group: Group | None = None
        self._epoch = 0
        self._busy = False
        self.draw: Draw
        self._starter: Starter | None = None
        self._starting: tuple[RoundKey, asyncio.Task[None]] | None = None
        self._reports_preparing = False
        super().__init__(program.scenario.place, spec, host, incarnation)

    @property
    def works(self) -> bool:
        return self.group is not None and self.group.live and self.group.key == self._state.round

    @property
    def ranked_in(self) -> RoundKey | None:
        """The round in which the node has ranks."""
        return self._state.round

    @property
    def is_preparing(self) -> bool:
        """Whether workers that were started now would wait for what is imported for them."""
        return self._starter is not None and self._starter.is_prestarting

    def _begin(self, spec: JobSpec) -> None:
        self._check = CheckPart(self, self._program.health, self.address, lambda: self._receive())
        self._prepare(spec)
        super()._begin(spec)
        if check_rules(spec.rules).check:
            self._check.begin()

    def note_ready(self) -> None:
        """What its template imports is there, or will never be."""
        self.note("is ready")
        self._program.invariants.newcomers.note_ready(self.key)
        watch_report(self, REACTION, lambda: self._reports_preparing, "a node that is ready reports it")

    def _prepare(self, spec: JobSpec) -> None:
        """Begin to prepare, in a run in which nodes do."""
        self.preparation = preparation = self._program.preparation
        if preparation.is_here:
            self.draw = preparation.draw(self)
            self._starter = start_preparing(self, spec, self._receive)
            watch_report(self, LONGEST + REACTION, lambda: self._reports_preparing, "no node prepares for ever")
            preparation.befall(self, self.draw, lambda: self.is_preparing)

    def _receive(self) -> None:
        # Also while workers start or end, an assignment is accepted and reported.
        self.call_soon(self._report)
        self._wake()

    def _wake(self) -> None:
        if not self._busy:
            self.call_soon(self._follow)

    def _end_tasks(self) -> None:
        if self.group is not None:
            self.group.stop()

    def _report(self) -> None:
        if self.left:
            return
        wanted = self.rendezvous.assignment
        if not self._leaving:
            self._program.invariants.taking(self.key, wanted)
            if wanted.epoch != self._epoch:
                self._epoch = wanted.epoch
                self.note(f"obeys the coordinator of epoch {wanted.epoch}")
            self._state.accept(wanted)
            self._check.follow(check_part(wanted).check_task)
            if self.group is not None and self.group.key == wanted.key:
                self.group.change = wanted.change
            if wanted.drains:
                self.note("is drained")
                self._begin_to_leave()
        if self._starting is not None and (self._ends or self._starting[0] != self._state.round):
            # As `WorkerRound.cancel`: a template may import for minutes, and a stop does not wait for it.
            self._starting[1].cancel()
        report = build_report(self._state, cast(Any, self.group), self._leaving, self.is_preparing)
        self._reports_preparing = report.preparing
        self.rendezvous.report(self._add_to_report(self._check.add_to_report(report)))

    def _add_to_report(self, report: NodeReport) -> NodeReport:
        """Return the report with what other parts of the agent add."""
        return report

    def _follow(self) -> None:
        if self._busy or self.left:
            return
        self._report()
        group = self.group
        ends = self._ends
        live, wanted = group is not None and group.live, self._state.round
        if ends and not live:
            self._leave()
            return
        desired = [] if wanted is None else [DesiredTask(wanted, "devices")]
        states = [] if group is None else [TaskState(group.key, "devices", live=live, ended=not live)]
        here = [state for state in states if live or state.key == wanted]
        for action in reconcile(desired, here, ends):
            if isinstance(action, Start):
                self._start()
            else:
                assert group is not None, "only workers can be stopped"
                random = self.timeline.random
                self._after(random.uniform(0, self._program.slow_stop) * random.random(), group.stop)

    @property
    def _ends(self) -> bool:
        return self._leaving or self._is_over or self.rendezvous.problem is not None

    @property
    def _is_over(self) -> bool:
        wanted = self.rendezvous.assignment
        dismissed = check_part(wanted).health is not None and check_part(wanted).health.dismissed
        return wanted.phase in OVER or (dismissed and self.key not in self._program.health.stubborn)

    def _start(self) -> None:
        ranks = self._state.ranks
        assert ranks is not None, "workers start only with ranks"
        self._state.take_port()
        group = self.group = Group(self._program.workers, ranks, self._note_end, lambda: self.run(self._receive))

        def start() -> None:
            if self._state.round == ranks.key and not self._leaving:
                self.note(f"starts the workers of round {ranks.key.number}, rank {ranks.node_rank} of {ranks.nodes}")
                group.start()

        delay = self.timeline.random.uniform(0.01, self._program.slow_start)
        if self._starter is None:
            self._after(delay, start)
        else:
            self._busy = True
            task = self.create_task(self._start_when_ready(self._starter, delay, start))
            self._starting = ranks.key, task
            task.add_done_callback(lambda _: self._end_start())

    async def _start_when_ready(self, starter: Starter, delay: float, start: Callable[[], None]) -> None:
        await starter.prepare([{}])
        await asyncio.sleep(delay)
        start()

    def _end_start(self) -> None:
        self._busy, self._starting = False, None
        self._wake()

    def _after(self, delay: float, act: Callable[[], None]) -> None:
        def go_on() -> None:
            act()
            self._busy = False
            self._wake()

        self._busy = True
        self.call_later(delay, go_on)

    def _note_end(self) -> None:
        group = self.group
        assert group is not None, "workers that end were started"
        if group.succeeded:
            self._program.invariants.succeeding(self.key, group.ranks)
        self.note("its workers succeed" if group.succeeded else "a worker fails")
        self.run(self._receive)

    def _leave(self) -> None:
        self.note(f"leaves: {self.rendezvous.problem or self.rendezvous.assignment.reason}")
        over = self._is_over
        if over or self.group is None or not self.group.succeeded:
            gave_up = None if over or self._leaving else RuntimeError(self.rendezvous.problem)
            self.rendezvous.report(leave_report(self._state, gave_up))
        self._close()
