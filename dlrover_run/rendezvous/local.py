"""The client with a coordinator in this process: for one node, and for `static`, where flags give the ranks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.driver import Answer, Driver, Requested
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.requests import OperatorRequest, RequestFailed
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.rendezvous.client import AskFailed, OnChange, StackSource
from dlrover_run.words.log_level import is_debug
from dlrover_run.words.reasons import render

if TYPE_CHECKING:
    from dlrover_run.job_status.stacks import JobStacks
    from dlrover_run.job_status.status import JobStatus


class LocalClient:
    """Passes this node's reports to a coordinator of its own, which decides at once.

    With `static` (`node_rank` is given) nodes do not communicate, exactly as in torchrun. The reports of the other
    nodes are simulated: each of them counts as being in the phase of this node. `log` prints one line to the console.
    `name` is that of the job.
    """

    problem: str | None = None
    is_user_error = False
    is_away = False
    is_cut_off = False

    def __init__(
        self,
        rules: JobRules,
        node_rank: int | None,
        on_change: OnChange,
        log: Callable[[str], None] = lambda line: None,
        name: str = "",
    ) -> None:
        self._name = name
        # Simulated nodes cannot be checked.
        self._rules = rules if node_rank is None else replace(rules, parts=())
        self._log = log
        self._node_rank = node_rank
        self._on_change = on_change
        self._driver: Driver | None = None
        self._lines: list[str] = []
        self._requests = 0
        self._status: NodeReport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.assignment = Assignment()
        self.stack_source: StackSource | None = None

    @property
    def pids(self) -> set[int]:
        return set()

    def report(self, report: NodeReport) -> None:
        """Take the latest report of this node; `on_change` is called if that changes the assignment."""
        if self._timer is not None and report == self._status:
            # During a check the assignment has the remaining seconds, which differ each time it is built.
            return
        self._status = report
        self._decide(report)

    async def ask(self, request: OperatorRequest | None = None) -> JobStatus:
        driver, report = self._driver, self._status
        if driver is None or report is None:
            raise AskFailed("this node has only just begun")
        now = asyncio.get_running_loop().time()
        answer = Answer()
        if request is not None:
            self._requests += 1
            driver.arrive(Requested(self._requests, request), now)
            answer = self._decide(report)[self._requests]
        if answer.refusal:
            raise AskFailed(answer.refusal)
        return msgspec.structs.replace(driver.coordinator.status(self._name, now), answer=render(answer.answer))

    async def ask_stacks(self, query: StackQuery) -> JobStacks:
        """Those of this node. With `static` the agents do not know each other, so the other nodes are disconnected."""
        from dlrover_run.job_status.stacks import StackRequest, nodes_to_ask

        driver, report = self._driver, self._status
        if driver is None or report is None or self.stack_source is None:
            raise AskFailed("this node has only just begun")
        coordinator = driver.coordinator
        try:
            nodes = nodes_to_ask(coordinator.plan, coordinator.nodes, query)
        except RequestFailed as failed:
            raise AskFailed(str(failed)) from None
        request = StackRequest(0, nodes, [report.key])
        if request.waits_for:
            from dlrover_run.rendezvous.answer_stacks import answer_stacks

            if (found := await answer_stacks(self.stack_source, query, self._log)) is not None:
                request.take(report.key, found)
        return request.result(self._name, coordinator.plan)

    async def close(self) -> None:
        self._cancel_timer()

    def _decide(self, report: NodeReport) -> Mapping[Hashable, Answer]:
        """Decide now; return the answers to requests."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._driver is None:
            self._driver = Driver(Coordinator(self._rules, now), self._lines.append, debug=is_debug(os.environ))
        driver = self._driver
        for reported in self._with_peers(report, driver.coordinator):
            driver.arrive(reported, now)
        while (writes := driver.turn(now)).plan is not None:
            driver.written(now)
        for id in writes.answers:
            driver.answered(id)
        wanted = driver.assignment(report.key, now) or self.assignment
        self._cancel_timer()
        if (due := driver.wake_at()) is not None:
            self._timer = loop.call_at(due, self._decide, report)
        lines, self._lines[:] = list(self._lines), []
        for line in lines:
            if not wanted.is_announced or line.startswith(("warning: ", "debug: ")):
                self._log(line)
        if wanted != self.assignment:
            self.assignment = wanted
            self._on_change()
        return writes.answers

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _with_peers(self, report: NodeReport, coordinator: Coordinator) -> list[NodeReport]:
        if self._node_rank is None:
            return [report]
        own_rank = self._node_rank

        def peer(rank: int) -> NodeReport:
            phase = NodePhase.RUNNING if report.phase is NodePhase.FAILED else report.phase
            simulated = msgspec.structs.replace(
                report,
                node_id=f"static-{rank}",
                incarnation="x",
                preferred_rank=rank,
                phase=phase,
                failure=None,
                activity=None,
            )
            ranks = report.ranks and coordinator.ranks(simulated.key)
            return msgspec.structs.replace(simulated, ranks=ranks)

        own = msgspec.structs.replace(report, preferred_rank=own_rank)
        return [own if rank == own_rank else peer(rank) for rank in range(self._rules.max_nodes)]
