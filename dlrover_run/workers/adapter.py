"""The torch adapter: the workers of this node as the agent's loop sees them, its reports on them, and their results."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.agent.node_state import NodeState, leave_report
from dlrover_run.agent.reconcile import Action, DesiredTask, Replace, Start, Stop, StopMode, TaskState
from dlrover_run.agent.result import JobResult, TaskResults, describe_unused, worker_results
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.bounds import MAX_TRACE, MAX_WHAT
from dlrover_run.coordination.records.plan import OVER, PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.round import Failure, RoundKey
from dlrover_run.failures import causes
from dlrover_run.failures.error_file import copy_root_cause
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.observe.page import Progress
from dlrover_run.observe.tick import Activities
from dlrover_run.processes.process import StuckProcess
from dlrover_run.workers.feature import WaitDetails
from dlrover_run.workers.reporter import EventLog, ProgressReporter
from dlrover_run.workers.round import WorkerRound
from dlrover_run.workers.round_starter import RoundStarter
from dlrover_run.workers.starter import Starter

if TYPE_CHECKING:
    from dlrover_run.job_status.stacks import NodeStacks
    from dlrover_run.output.read_back import WorkerOutput

PACKAGE = str(Path(__file__).resolve().parent.parent)
"""Where `dlrover_run.training` is, which the template imports also if it is installed as editable."""

DEVICES = "the devices of this node"
"""What the workers of two rounds cannot both have."""


class TorchAdapter(FrameworkAdapter[RoundKey]):
    """The workers of this node. One start or one stop of a round is under way at a time."""

    noun = "workers"

    def __init__(self, services: AgentServices) -> None:
        self._services = services
        self._spec = spec = services.job
        self._node_state = services.node_state
        self._shutdown = services.shutdown
        console = services.console
        self.starter = Starter(spec, console.info, ours=[PACKAGE])
        if spec.rendezvous.coordinated:
            # Ranks may be assigned at any moment.
            self.starter.prestart(os.environ, services.wake)
        self._progress = ProgressReporter(spec, console, self._wait_details)
        self._events = EventLog(spec, services.relay.write)
        self._rounds = RoundStarter(services, self.starter, self._progress, self._events)
        self._assignment = Assignment()
        self._work: asyncio.Task[None] | None = None
        self._starting: RoundKey | None = None
        self._stopping = False

    @property
    def pids(self) -> set[int]:
        return self.starter.pids | self._rounds.pids

    @property
    def running(self) -> bool:
        return self._round is not None and self._round.group.live

    async def open(self) -> None:
        self._progress.begin(self._services.run_dir)

    def accept(self, assignment: Assignment, shutting_down: bool) -> None:
        self._assignment = assignment
        self._rounds.accept(assignment, shutting_down)
        if not self._shutdown.requested:
            self._progress.update(assignment)
        if self._round is not None and self._round.key == assignment.key:
            self._round.checkpoints.follow(assignment.change)

    def desired(self) -> Sequence[DesiredTask[RoundKey]]:
        wanted = self._node_state.round
        if wanted is None and self._round is not None and self._may_outlive:
            # They wait for the next round, and need no place of their own for that.
            wanted = self._round.key
        return () if wanted is None else (DesiredTask(wanted, DEVICES, kept=self._kept),)

    def states(self) -> Sequence[TaskState[RoundKey]]:
        """The workers that run, are being started or stopped, or have ended in the desired round. Ended workers of an
        earlier round are kept for the report at the end; the next start closes them."""
        key = self._starting or (self._round.key if self._round is not None else None)
        live = self._work is not None or self.running
        if key is None or not (live or key == self._node_state.round):
            return ()
        stopping = StopMode.TERMINATE if self._stopping else None
        return (TaskState(key, DEVICES, live=live, ended=not live, stopping=stopping),)

    def carry_out(self, action: Action[RoundKey]) -> None:
        """Begin to start or to stop workers. A stop ends a start early; those that it has started are stopped next."""
        if isinstance(action, Start):
            ranks = self._node_state.ranks
            assert ranks is not None, "a round is started only with ranks"
            self._starting = action.key
            self._begin(self._rounds.restart(ranks))
        elif isinstance(action, Replace):
            self._replace(action)
        elif isinstance(action, Stop) and self._round is not None:
            if self._work is None:
                # The signal is sent here: a signal to this node from now on goes to the workers directly.
                self._round.stop(self._shutdown, self._spec.shutdown_timeout, self._assignment.restart_count)
                self._stopping = True
                self._begin(self._round.group.wait())
            else:
                self._round.cancel()

    def report(self, leaving: bool) -> NodeReport:
        return build_report(self._node_state, self._round, leaving, self.starter.is_prestarting)

    def progress(self) -> Mapping[str, Progress]:
        return {} if self._round is None or not self.running else self._round.progress.by_name()

    def stalled(self) -> Mapping[str, str]:
        if self._round is None or not self.running:
            return {}
        return {f"rank {rank}": code for rank, code in self._round.stalled.items()}

    @property
    def ended(self) -> Sequence[str]:
        if self._round is None or not self._round.group.running:
            return ()
        ended = [one.spec for one in self._round.group.ended if one.code == 0]
        return [one.name for one in sorted(ended, key=lambda spec: spec.rank)]

    async def stacks(self, rank: int | None) -> NodeStacks:
        # Imported only here: a launch does not wait for it.
        from dlrover_run.stacks.worker_stacks import node_stacks

        round_ = self._round
        asked = [] if round_ is None else [one for one in round_.group.running if rank in (None, one.spec.rank)]
        return await node_stacks({one.spec.rank: one.pid for one in asked})

    def outputs(self) -> Sequence[WorkerOutput]:
        # Imported only here: a launch does not wait for it.
        from dlrover_run.output.read_back import outputs_of

        if self._round is None:
            return ()
        placed = zip(self._round.specs.workers, self._round.specs.streams.ranks, strict=True)
        return [output for worker, one in placed for output in outputs_of(worker.rank, one, str(one.local_rank))]

    def log_progress(self, sample: Activities | None = None) -> None:
        if self._round is not None:
            if sample is None:
                self._round.progress.log_last()
            else:
                self._round.progress.log(sample)

    def stop_waiting(self) -> None:
        self._rounds.stop_waiting()

    def send(self, number: signal.Signals, delivered_at: float | None = None, only_stopping: bool = False) -> None:
        if self._round is not None and (self._stopping or not only_stopping):
            self._round.group.send(number, delivered_at)

    def forward(self, number: signal.Signals, delivered_at: float | None) -> None:
        if self._round is not None:
            self._round.group.forward(number, delivered_at)

    async def kill(self) -> None:
        # It waits: the exits of the workers are collected next.
        self.stop_waiting()
        self.send(signal.SIGKILL)
        if self._work is not None:
            await asyncio.wait([self._work])
        if self._round is not None:
            with contextlib.suppress(StuckProcess):
                await self._round.group.stop(signal.SIGKILL, 0)

    def leave_report(self, error: Exception | None) -> NodeReport | None:
        # After a success the other nodes need no round without these workers.
        if self._succeeded and self._assignment.phase not in OVER:
            return None
        return leave_report(self._node_state, error)

    async def finish(self, assignment: Assignment) -> TaskResults:
        succeeded = self._succeeded
        ends: tuple[WorkerExit, ...] = ()
        returned: dict[int, bytes] = {}
        if self._round is not None:
            await self._round.collect_exit_info(None)
            ends, returned = self._round.ends, self._round.results()
            if self._spec.rendezvous.ranked and not self._shutdown.requested:
                await self._rounds.stores.end_static(self._round.ranks, succeeded)
            self._rounds.close_round()
        results = worker_results(assignment, self._node_state.ranks, ends, succeeded, returned)
        is_unused = self._round is None and self._node_state.ranks is None
        if is_unused and assignment.phase is PlanPhase.FINISHED and not self._spec.rules.spares:
            why = "the job had all of its nodes (--nnodes), and no spare was asked for (--spares is 0)"
            return msgspec.structs.replace(results, warning=describe_unused("worker", why))
        return results

    async def close(self, assignment: Assignment, result: JobResult) -> None:
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        # The error file of the process that started this launcher gets the first failure's record (as torchrun).
        if result.root is not None and error_file and (problem := copy_root_cause(result.root, error_file)):
            self._services.console.info(problem)
        await self.starter.close()
        await self._rounds.close()
        self._events.job_ended(assignment.phase, result.restarts, result.reason)

    @property
    def _round(self) -> WorkerRound | None:
        return self._rounds.current

    def _wait_details(self) -> WaitDetails | None:
        details = (feature.wait_details for feature in self._rounds.features)
        return next((each for each in details if each is not None), None)

    @property
    def _succeeded(self) -> bool:
        """Whether all workers of this node's round have succeeded."""
        current = self._round
        return current is not None and current.key == self._node_state.round and current.group.succeeded

    @property
    def _may_outlive(self) -> bool:
        """Whether this node waits for its next round, and its workers may keep their processes in it."""
        return self.running and any(feature.may_keep(self._assignment) for feature in self._rounds.features)

    @property
    def _kept(self) -> frozenset[int] | None:
        """The workers that go on in the round of this node while others take the places of the rest."""
        ranks, current = self._node_state.ranks, self._round
        if ranks is None or current is None or not self._rounds.is_wanted(ranks):
            return None
        found = (feature.kept(current, ranks) for feature in self._rounds.features)
        return next((kept for kept in found if kept is not None), None)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = self._services.start(work)
        self._work.add_done_callback(self._note_work_done)

    def _note_work_done(self, work: asyncio.Task[None]) -> None:
        self._work = self._starting = None
        self._stopping = False
        self._services.wake()

    def _replace(self, action: Replace[RoundKey]) -> None:
        """Stop the workers that do not keep their processes; the round goes on, or the next one begins, with the
        others. Idempotent."""
        ranks, current = self._node_state.ranks, self._round
        assert ranks is not None, "workers are kept for ranks"
        assert current is not None, "they run"
        self._rounds.stop_all_but(action.kept)
        if self._work is None:
            self._starting = action.key
            self._begin(self._rounds.replace(current, ranks))
        elif self._starting != action.key:
            current.cancel()


def build_report(state: NodeState, current: WorkerRound | None, leaving: bool, preparing: bool = False) -> NodeReport:
    """The report on the round in which this node takes part; `current` is the round whose workers it has started.

    A failure is reported only when its cause is known, a moment after the worker's end. `preparing`: workers that were
    started now would wait for what is imported for them.
    """
    if current is None or current.key != state.round:
        # The workers of an earlier round may still be ending; they do not count any more.
        report = state.report(NodePhase.LEAVING if leaving else NodePhase.WAITING)
        return msgspec.structs.replace(report, preparing=True) if preparing and state.ranks is None else report
    if current.group.succeeded:
        # Also when this node leaves: its workers are done, and the other nodes need no round without them.
        return state.report(NodePhase.SUCCEEDED, progressed=True)
    if leaving:
        return state.report(NodePhase.LEAVING)
    end = current.failure
    if end is None:
        marked = current.checkpoints
        return msgspec.structs.replace(state.report(NodePhase.RUNNING), saves=marked.saves, saved_for=marked.saved_for)
    return state.report(NodePhase.FAILED, build_failure(end, state.host), current.has_trained)


def build_failure(end: WorkerExit, host: str) -> Failure:
    """The record of the failure of a worker on the node `host`, cut to the limits of a report."""
    return Failure(
        rank=end.rank,
        host=host,
        exit_text=causes.describe_exit(end)[:MAX_WHAT],
        lost_peer=causes.lost_peer(end),
        trace=_clipped(causes.trace_lines(end)),
        exit_status=end.exit_status,
    )


def _clipped(trace: list[str]) -> str:
    """At most MAX_TRACE characters: the heading, and the end of the rest, where the cause is."""
    text = "\n".join(trace)
    if len(text) <= MAX_TRACE:
        return text
    heading = trace[0][:100] + "\n"
    return heading + text[len(heading) - MAX_TRACE :]
