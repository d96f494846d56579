"""The agent: one node's loop between the coordinator's assignment and the tasks of this node.

Each event (an assignment, the end of a process, a message of a task, a signal, the loss of the watchdog) wakes the
loop; only a signal for tasks that are being stopped, and SIGKILL after the loss of the watchdog, are sent at once. The
loop then asks `reconcile` for the actions that bring the tasks to what is desired, begins them, and reports.
No action blocks the loop but the end of orphans, 5 s at most. What the tasks are is known to the adapter of the
framework.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dlrover_run import linux
from dlrover_run.agent.framework import AdapterFactory, AgentServices
from dlrover_run.agent.node_feature import NodeFeatures
from dlrover_run.agent.node_state import NodeState
from dlrover_run.agent.reconcile import reconcile
from dlrover_run.agent.result import JobEnd, JobResult, NodeRefused, resolve_result
from dlrover_run.agent.shutdown import ShutdownRequest, received_text
from dlrover_run.background import Group
from dlrover_run.console.console import Console
from dlrover_run.console.rounds import render_shutdown
from dlrover_run.coordination.records.activity import NodeActivity
from dlrover_run.coordination.records.bounds import MAX_WHAT
from dlrover_run.coordination.records.plan import OVER
from dlrover_run.events.event_log import AssignmentEvents, log_opened
from dlrover_run.events.live import LiveLedger
from dlrover_run.events.records import NO_EVENTS, AgentEnded, Events, StopRequested, WatchFailed
from dlrover_run.events.stream import EventStream
from dlrover_run.failures.guard import guarded
from dlrover_run.observe.activity_report import REFRESH_INTERVAL, ActivityReport, with_activity
from dlrover_run.observe.tick import EARLY, RETRY_INTERVAL, SAMPLE_INTERVAL, Activities, Tick
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.output.run_directory import RunDir
from dlrover_run.processes import tree
from dlrover_run.processes.orphans import OrphanKiller
from dlrover_run.processes.process import StuckProcess
from dlrover_run.rendezvous import backends
from dlrover_run.rendezvous.client import OnChange, RendezvousClient
from dlrover_run.spec import JobSpec, SpecError
from dlrover_run.words.log_level import internal_error, log_frames
from dlrover_run.workers.environment import requeue_count

if TYPE_CHECKING:
    from dlrover_run.coordination.records.activity import PhaseTimes
    from dlrover_run.coordination.records.requests import OperatorRequest
    from dlrover_run.job_status.questions import LogRequest, StackQuery
    from dlrover_run.job_status.stacks import JobStacks, NodeStacks
    from dlrover_run.job_status.status import JobStatus
    from dlrover_run.output.read_back import WorkerLogs

OpenClient = Callable[[OnChange, Callable[[str], None]], RendezvousClient]
"""Opens the rendezvous client, which gets a listener and a function that prints a line about the job."""


class Agent:
    """Runs one node's part of a job. `console` shows messages to the user."""

    def __init__(
        self,
        job: JobSpec,
        run_dir: RunDir,
        relay: RelayClient,
        parent_pipes: Sequence[int],
        console: Console,
        open_client: OpenClient,
        make_adapter: AdapterFactory,
        events: Events = NO_EVENTS,
    ) -> None:
        self._kept_events = events
        self._ledger: LiveLedger | None = None
        if job.rendezvous.coordinated:
            events = self._ledger = LiveLedger(log_opened(job), events)
        stream = events = EventStream(events)
        self._times: PhaseTimes | None = None
        self._logs: WorkerLogs | None = None
        self._job = job
        self._relay = relay
        self._parent_pipes = parent_pipes
        self._console = console
        self._events = events
        self._assignment_events = AssignmentEvents(events, lambda: self._adapter.log_progress())
        self._wake = asyncio.Event()
        self._orphans = OrphanKiller(self._own_children)
        self._node_state = NodeState(job)
        self._shutdown = ShutdownRequest(
            job, self._on_stop_signal, lambda *received: self._adapter.forward(*received), self._on_parent_lost
        )
        # The adapter begins to import what tasks import, which takes longer than anything else. So it comes before the
        # client, which imports as well.
        self._background = Group()
        self._features = NodeFeatures()
        self._tick = Tick(lambda: self._adapter.progress(), self._note_failed_consumer)
        self._failed_consumers: set[str] = set()
        self._services = AgentServices(
            job=job,
            run_dir=run_dir,
            relay=relay,
            console=console,
            orphans=self._orphans,
            node_state=self._node_state,
            shutdown=self._shutdown,
            wake=self._wake.set,
            start=lambda work: self._background.create_task(work),
            features_of=self._features.of,
            tick=self._tick,
            events=stream,
            ask=self._ask,
            ask_stacks=self._ask_stacks,
            read_activity=self._read_activity,
            end_logs=self._end_logs,
        )
        self._adapter = make_adapter(self._services)
        self._client = open_client(self._wake.set, self._print_job_line)
        self._client.stack_source = self._read_workers
        self._activity = ActivityReport(backends.of(job.rendezvous).refresh or REFRESH_INTERVAL)

    @property
    def pids_to_spare(self) -> set[int]:
        """The pids of processes that outlive this agent on purpose."""
        return self._client.pids

    def collect_masters(self) -> None:
        """Wait a bounded time for the end of the master that this node has started, if it is the last node. It blocks,
        and is called last: the result of the job does not wait for it."""
        if masters := self._client.pids:
            # Imported only here: most nodes have started no master.
            from dlrover_run.rendezvous.master_client import end as master_end

            if master_end.is_last_node(self._client.assignment, self._node_state.ranks):
                master_end.collect_masters(masters)

    async def run(self) -> JobResult:
        """Take part in the job until it is over, and return its result."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._orphans.reap)
        self._begin_to_observe()
        self._shutdown.listen(self._parent_pipes)
        if not linux.has_pidfd():
            self._console.info(linux.NO_PIDFD)
        if requeues := requeue_count(os.environ):
            self._console.info(
                f"attempt {requeues + 1} of job {self._job.display_name}: its scheduler has started it again"
            )
        try:
            async with self._background:
                # As one of its tasks: the group has their errors in the order in which they came, the cause first.
                self._background.create_task(self._take_part())
        except (StuckProcess, SpecError, NodeRefused, OSError) as error:
            await self._adapter.kill()
            return await self._conclude(error)
        return await self._conclude(None)

    async def _take_part(self) -> None:
        await self._adapter.open()
        self._begin_features()
        await self._reconcile_until_done()

    async def _reconcile_until_done(self) -> None:
        while True:
            await self._shutdown.until_decided()
            self._wake.clear()
            if self._client.assignment.drains:
                self._shutdown.drain()
            adapter, leaving = self._adapter, self._shutdown.requested
            assignment, over = self._client.assignment, self._is_over
            self._assignment_events.follow(assignment)
            if not leaving:
                # A leaving node accepts no new ranks; it stays a member of its round until its tasks have ended.
                self._node_state.accept(assignment)
            self._begin_features()
            self._features.follow(assignment, over or leaving)
            adapter.accept(assignment, over or leaving)
            shutting_down = over or (leaving and not adapter.migrating)
            for action in reconcile(adapter.desired(), adapter.states(), shutting_down):
                adapter.carry_out(action)
            report = self._features.add_to_report(adapter.report(leaving))
            self._activity.follow_round(self._node_state.round, adapter.running)
            report = with_activity(report, self._activity.current, self._times)
            self._client.report(report)
            self._tick.follow(self._node_state.round, adapter.running)
            if (over or leaving) and adapter.idle:
                return
            await self._wake.wait()

    async def _ask(self, request: OperatorRequest | None) -> JobStatus:
        """The status of the job after a request. While the coordinator is away, a stop ends this node alone."""
        from msgspec.structs import replace

        from dlrover_run.coordination.records.requests import Action

        if request is None or request.action is not Action.STOP or not self._client.is_away:
            return await self._client.ask(request)
        status = await self._client.ask()
        self._console.info(f"{request}, and the master is away: this node stops")
        self._shutdown.drain()
        return replace(status, answer="the master is away, so only this node stops; repeat it on the others")

    async def _ask_stacks(self, query: StackQuery) -> JobStacks:
        if query.logs is None or not self._is_over:
            return await self._client.ask_stacks(query)
        # The coordinator may be gone, and its plan has no ranks any more: a reader that follows gets the last lines.
        from dlrover_run.job_status.stacks import JobStacks

        found = await self._read_workers(query.rank, query.logs)
        return JobStacks(job=self._job.display_name, round=0, nodes=1, logs=found.logs)

    async def _read_workers(self, rank: int | None, logs: LogRequest | None = None) -> NodeStacks:
        """The stacks of the workers here, or of that with the rank, or their output."""
        if logs is None:
            return await self._adapter.stacks(rank)
        from dlrover_run.job_status.stacks import NodeStacks
        from dlrover_run.output.read_back import WorkerLogs

        if self._logs is None:
            self._logs = WorkerLogs(self._adapter.outputs, self._relay.kept)
        return NodeStacks(logs=await self._logs.read(logs))

    async def _end_logs(self) -> None:
        if self._logs is not None:
            await self._logs.end()

    def _begin_to_observe(self) -> None:
        """Have samples of the tasks taken for the event log and for the reports of this node."""
        takers = [("the figures of the event log", self._log_sample)] if self._kept_events is not NO_EVENTS else []
        takers.append(("the progress of workers", self._take_activity))
        for name, take in takers:
            self._tick.add(name, take, first=SAMPLE_INTERVAL, early=EARLY * SAMPLE_INTERVAL)

    def _log_sample(self, sample: Activities) -> float:
        self._adapter.log_progress(sample)
        return SAMPLE_INTERVAL

    def _take_activity(self, sample: Activities) -> float:
        own = self._add_to_activity(NodeActivity(()))
        is_news = self._activity.take(
            sample,
            self._adapter.stalled(),
            time.monotonic(),
            own.memory,
            own.watch_problem,
            self._adapter.ended,
            own.use,
            own.awaited,
        )
        if self._follow_phases(is_news) or is_news:
            self._wake.set()
        return SAMPLE_INTERVAL

    def _note_failed_consumer(self, name: str, error: Exception) -> None:
        self._events.emit(WatchFailed(what=f"{name}: {error!r}"[:MAX_WHAT]))
        if name not in self._failed_consumers:
            self._failed_consumers.add(name)
            self._console.info(
                f"warning: {name} cannot be read: {internal_error(error)}; the launcher tries again every "
                f"{RETRY_INTERVAL:.0f} s"
            )
            log_frames(self._console.info, error)

    def _note_failed_close(self, name: str, error: Exception) -> None:
        self._console.info(f"warning: {name} cannot be ended: {internal_error(error)}")
        log_frames(self._console.info, error)

    def _begin_features(self) -> None:
        self._features.begin(self._services, self._adapter, self._client.assignment)

    async def _read_activity(self) -> NodeActivity | None:
        """What this node does now, for the socket of operators; None if it cannot be read."""
        await self._features.look()
        return guarded("the activity", lambda: self._add_to_activity(NodeActivity(())), None)

    def _add_to_activity(self, activity: NodeActivity) -> NodeActivity:
        return self._features.add_to_activity(self._adapter.add_to_activity(activity))

    def _follow_phases(self, at_once: bool = False) -> bool:
        """Have the next report say where the time went if a phase may have begun, or `at_once`. Not after each event:
        no report and no message of a failure waits for it, and between two rounds the last figures go on."""
        if self._ledger is None or not (self._ledger.is_behind or at_once):
            return False
        self._times = self._ledger.times()
        return True

    @property
    def _is_over(self) -> bool:
        assignment = self._client.assignment
        dismissed = assignment.dismissal is not None
        return dismissed or assignment.phase in OVER or self._client.problem is not None

    async def _conclude(self, error: Exception | None) -> JobResult:
        assignment, problem = self._client.assignment, self._client.problem
        self._tick.close()
        self._console.clear_waiting()
        # The other nodes form their next round after this report; what follows may wait for the console.
        if (last := self._adapter.leave_report(error)) is not None:
            if self._times is not None:
                self._follow_phases()
            self._client.report(with_activity(last, None, self._times))
        # The console may block (a pager), so draining it has no timeout. Orphans of the tasks are killed meanwhile;
        # usually `tree.end_children` after this function finds them sooner.
        kill_orphans = asyncio.get_running_loop().call_later(tree.ORPHAN_GRACE, self._orphans.kill_orphans)
        tasks = await self._adapter.finish(assignment)
        kill_orphans.cancel()
        end = JobEnd(
            assignment=assignment,
            tasks=tasks,
            noun=self._adapter.noun,
            stopped_by=self._shutdown.signal or (signal.SIGKILL if self._shutdown.orphaned else None),
            drained=self._shutdown.drained,
            orphaned=self._shutdown.orphaned,
            problem=problem,
            is_user_error=self._client.is_user_error,
            is_cut_off=self._client.is_cut_off,
            error=error,
        )
        result = resolve_result(end, self._job.exit_codes)
        self._assignment_events.follow(assignment)
        await self._adapter.close(assignment, result)
        await self._features.close(result, self._note_failed_close)
        self._orphans.close()
        await self._client.close()
        self._node_state.close()
        what = (result.error or result.reason)[:MAX_WHAT]
        self._events.emit(AgentEnded(exit_code=result.exit_code, reason=result.exit_reason, what=what))
        return result

    def _own_children(self) -> set[int]:
        return {self._relay.pid} | self._adapter.pids | self._features.pids | self._client.pids

    def _print_job_line(self, line: str) -> None:
        # A node that leaves, and is the only one, ends its job: no other node waits for the room that it leaves.
        if not (self._shutdown.requested and self._job.rendezvous.alone):
            self._console.info(line)

    def _on_stop_signal(self, number: signal.Signals, for_tasks: signal.Signals, delivered_at: float | None) -> None:
        first = self._shutdown.signal is None
        drained = first and self._shutdown.drained
        if first:
            # A node that is drained leaves as it was asked to; a signal ends it.
            self._node_state.leave_signal = "" if drained else number.name
            self._events.emit(StopRequested(signal=number.name, drained=drained))
        self._stop_waiting()
        if first:
            key = number is signal.SIGINT
            if key:
                self._console.break_line()
            then = self._adapter.begin_move(number)
            if then is None:
                seconds = self._shutdown.grace if self._adapter.running else None
                then = render_shutdown(self._adapter.noun, seconds, alone=self._job.single_node, again=key)
            self._console.info(f"{received_text(number, for_tasks, self._job.preemption, drained)}: {then}")
        # After the first signal, the next turn of the loop stops the tasks with it; those that it finds stopping
        # already would not get it.
        self._adapter.send(for_tasks, delivered_at, only_stopping=first)

    def _on_parent_lost(self) -> None:
        # A watchdog that had a choice would have passed on the signal that ends it.
        self._node_state.leave_signal = self._node_state.leave_signal or signal.SIGKILL.name
        self._stop_waiting()
        self._adapter.send(signal.SIGKILL)

    def _stop_waiting(self) -> None:
        """Report that this node leaves, and stop waiting for what only serves a user or another node."""
        self._wake.set()
        self._relay.stop_waiting()
        self._adapter.stop_waiting()
        # Afterwards the request has its signal, which says how long each feature has.
        asyncio.get_running_loop().call_soon(self._features.stop_waiting)
