"""The agent: one node's loop between the plan and its workers.

Everything that happens (a new plan, the end of a worker, a signal, the loss of the watchdog) only marks that something
happened; the loop then looks at the whole situation, asks `reconcile` for one action and carries it out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dlrover_run import failures
from dlrover_run.agent.events import EventLog
from dlrover_run.agent.health_check import HealthCheckRunner
from dlrover_run.agent.node_state import NodeState, build_report, leave_report
from dlrover_run.agent.progress_reporter import ProgressReporter
from dlrover_run.agent.reconcile import Action, Situation, reconcile
from dlrover_run.agent.result import JobEnd, JobResult, resolve_result
from dlrover_run.agent.shutdown import ShutdownRequest, received_text
from dlrover_run.agent.starter import Starter
from dlrover_run.agent.worker_round import WorkerRound
from dlrover_run.agent.worker_specs import Worker, build_worker_specs, launcher_environments
from dlrover_run.console.console import Console
from dlrover_run.console.rounds import render_shutdown
from dlrover_run.coordination.model import OVER, RankAssignment
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.output.health_file import HealthFile
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.output.streams import RunDir
from dlrover_run.process_tree import tree
from dlrover_run.process_tree.orphans import OrphanKiller
from dlrover_run.rendezvous.client import OnChange, RendezvousClient
from dlrover_run.spec import JobSpec, SpecError
from dlrover_run.supervisor.process import StuckProcess

if TYPE_CHECKING:
    from dlrover_run.output.logs_specs import LogsDestinations, LogsSpecsClient

RESTART_DRAIN_TIMEOUT = 0.5
"""Seconds without progress after which a restart no longer waits for a console to print the old workers' output."""


class Agent:
    """Runs one job on this node. `console` shows messages to the user."""

    def __init__(
        self,
        spec: JobSpec,
        run_dir: RunDir,
        relay: RelayClient,
        parent_pipes: Sequence[int],
        console: Console,
        open_client: Callable[[OnChange], RendezvousClient],
    ) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._relay = relay
        self._parent_pipes = parent_pipes
        self._console = console
        self._wake = asyncio.Event()
        self._starter = Starter(spec, console.info)
        if spec.backend in ("master", "etcd"):
            # Ranks may be assigned at any moment. The imports of the template take longer than anything else, so they
            # begin before the rendezvous client imports what it needs.
            self._starter.warm(os.environ)
        self._client = open_client(self._on_change)
        self._node_state = NodeState(spec)
        self._plugin = _logs_plugin(spec)
        self._plugin_answer: asyncio.Future[LogsDestinations] | None = None
        self._orphans = OrphanKiller(self._own_children)
        find_problems = partial(_severe_node_problems, spec, console.info)
        self._health_check = HealthCheckRunner(
            spec, self._starter, self._orphans.paused, self._wake.set, find_problems, console.info
        )
        self._progress = ProgressReporter(spec, console)
        self._check_file = HealthFile(run_dir, console.info)
        self._events = EventLog(spec, relay.write)
        self._shutdown = ShutdownRequest(spec, self._on_stop_signal, self._on_forwarded_signal, self._on_parent_lost)
        self._round: WorkerRound | None = None
        self._stopping = False
        self._reporting: asyncio.Handle | None = None
        self._over = False

    @property
    def pids_to_spare(self) -> set[int]:
        """The pids of processes that outlive this agent on purpose."""
        return self._client.pids

    async def run(self) -> JobResult:
        """Take part in the job until it is over, and return its result."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._orphans.reap)
        self._shutdown.listen(self._parent_pipes)
        self._progress.begin(self._run_dir)
        try:
            await self._reconcile_until_done()
        except (StuckProcess, SpecError, OSError) as error:
            if self._round is not None:
                with contextlib.suppress(StuckProcess):
                    await self._round.group.stop(signal.SIGKILL, 0)
            return await self._conclude(error)
        return await self._conclude()

    async def _reconcile_until_done(self) -> None:
        while True:
            self._report()
            situation = self._situation()
            action = reconcile(situation)
            if action is Action.LEAVE:
                return
            if action is Action.START:
                await self._start_round()
            elif action is Action.STOP:
                await self._stop_workers()
            else:
                if situation.wanted is None:
                    # No worker runs, so the devices are free.
                    self._health_check.update(self._client.assignment.check_task, self._client.assignment.health)
                await self._wake.wait()
                self._wake.clear()

    def _situation(self) -> Situation:
        return Situation(
            over=self._is_over,
            wanted=self._node_state.round,
            started=self._round.key if self._round else None,
            live=self._round is not None and self._round.group.live,
            leaving=self._shutdown.wanted,
        )

    @property
    def _is_over(self) -> bool:
        wanted = self._client.assignment
        dismissed = wanted.health is not None and wanted.health.dismissed
        return dismissed or wanted.phase in OVER or self._client.problem is not None

    def _on_change(self) -> None:
        """The assignment or the state of the rendezvous client has changed."""
        self._wake.set()
        if self._reporting is None:
            # The loop may be waiting for the end of workers; the report does not wait for that. It is not sent
            # immediately, because the client may call this while it takes a report.
            self._reporting = asyncio.get_running_loop().call_soon(self._report_meanwhile)

    def _report_meanwhile(self) -> None:
        with contextlib.suppress(OSError):
            # The loop gets the same error, and ends with a message.
            self._report()

    def _report(self) -> None:
        """Accept the latest assignment, and report the state of this node."""
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        if self._over:
            return
        wanted = self._client.assignment
        if not self._shutdown.wanted:
            # A leaving node accepts no new ranks; it stays a member of its round until its workers have ended.
            self._node_state.accept(wanted)
            self._progress.update(wanted)
            self._check_file.follow(wanted, self._health_check.devices)
        if self._round is not None and (self._is_over or self._round.key != self._node_state.round):
            self._round.cancel()
        self._client.report(
            self._health_check.add_to_report(build_report(self._node_state, self._round, self._shutdown.wanted))
        )

    async def _start_round(self) -> None:
        seat = self._node_state.seat
        assert seat is not None, "a round is started only with ranks"
        await self._health_check.suspend()
        if not self._is_wanted(seat):
            return
        if self._round is not None:
            await self._finish_round(self._round, seat)
            if not self._is_wanted(seat):
                return
            self._round.close()
            self._round = None
        placed = None
        if self._plugin is not None:
            placed = await self._ask_plugin(self._plugin, seat)
            if placed is None or not self._is_wanted(seat):
                return
        port = self._node_state.take_port()
        specs = build_worker_specs(self._spec, seat, os.environ, self._run_dir.path, self._relay, placed)
        self._progress.begin_round(seat)
        self._round = WorkerRound(specs, port, self._relay, self._on_worker_end, self._wake.set)
        with self._orphans.paused():
            await self._round.start(self._starter)
        self._starter.learn_later()
        self._events.round_started(seat)

    def _is_wanted(self, seat: RankAssignment) -> bool:
        """Whether these are still this node's ranks after a wait."""
        return not self._shutdown.wanted and self._node_state.round == seat.key

    async def _finish_round(self, ended: WorkerRound, seat: RankAssignment) -> None:
        """Collect the exits of an ended round, and print why there is another one."""
        if self._spec.backend == "static":
            # The next round needs the same port, on which a child of the ended rank 0 may still listen.
            tree.end_children(self._own_children())
        else:
            self._orphans.kill_orphans()
        await ended.collect_exit_info(RESTART_DRAIN_TIMEOUT)
        if self._is_wanted(seat):
            self._progress.end_round(ended, self._client.assignment, seat)

    async def _ask_plugin(self, plugin: LogsSpecsClient, seat: RankAssignment) -> LogsDestinations | None:
        """The plugin's answer where the output goes; None if a signal was received before it answered."""
        self._plugin_answer = asyncio.ensure_future(plugin.ask(launcher_environments(self._spec, seat, os.environ)))
        try:
            return await self._plugin_answer
        except asyncio.CancelledError:
            return None
        finally:
            self._plugin_answer = None

    async def _stop_workers(self) -> None:
        if self._round is None:
            return
        self._stopping = True
        try:
            if self._shutdown.orphaned:
                await self._round.group.stop(signal.SIGKILL, 0)
            else:
                stop_signal, delivered_at = self._shutdown.stop_signal, self._shutdown.delivered_at
                await self._round.group.stop(stop_signal, self._spec.shutdown_timeout, delivered_at)
        finally:
            self._stopping = False

    async def _conclude(self, gave_up: Exception | None = None) -> JobResult:
        wanted, problem = self._client.assignment, self._client.problem
        # The other nodes form their next round after this report; what follows may wait for the console.
        succeeded = self._report_leaving(gave_up)
        await self._health_check.close()
        ends: tuple[WorkerExit, ...] = ()
        results: dict[int, bytes] = {}
        if self._round is not None:
            # The console may block (a pager), so draining it has no timeout. Orphans of the workers are killed
            # meanwhile; usually `tree.end_children` after this function finds them sooner.
            kill_orphans = asyncio.get_running_loop().call_later(tree.ORPHAN_GRACE, self._orphans.kill_orphans)
            await self._round.collect_exit_info(None)
            kill_orphans.cancel()
            ends, results = self._round.ends, self._round.results()
            self._round.close()
        ending = JobEnd(
            wanted,
            self._node_state.seat,
            ends,
            succeeded,
            results,
            self._shutdown.signal,
            problem,
            gave_up,
            self._client.is_user_error,
        )
        verdict = resolve_result(ending, self._spec.compat_exit_codes)
        if verdict.root is not None:
            self._copy_error_file(verdict.root)
        await self._starter.close()
        if self._plugin is not None:
            await self._plugin.close()
        self._orphans.close()
        await self._client.close()
        self._node_state.close()
        self._events.job_ended(wanted.phase, verdict.restarts, verdict.reason)
        return verdict

    def _report_leaving(self, gave_up: Exception | None) -> bool:
        """Report that this node has left; returns whether all its workers had succeeded."""
        self._over = True
        self._progress.end()
        current = self._round
        succeeded = current is not None and current.key == self._node_state.round and current.group.succeeded
        if not succeeded or self._client.assignment.phase in OVER:
            self._client.report(leave_report(self._node_state, gave_up))
        # Otherwise its last report is their success, and the other nodes need no round without them.
        return succeeded

    def _copy_error_file(self, root: WorkerExit) -> None:
        """Copy the record of the first failure to the error file of the process that started this launcher (as
        torchrun)."""
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            problem = failures.copy_root_cause(root, error_file)
            if problem is not None:
                self._console.info(problem)

    def _own_children(self) -> set[int]:
        plugin = self._plugin.pids if self._plugin is not None else set()
        workers = self._round.group.pids if self._round is not None else set()
        return {self._relay.pid} | self._starter.pids | self._health_check.pids | plugin | workers | self._client.pids

    def _on_worker_end(self, worker: Worker) -> None:
        self._wake.set()
        self._orphans.reap()
        if self._round is not None and self._round.group.live:
            # At the end of the round all orphans are killed, whatever their session.
            self._orphans.kill_session(worker.pid)

    def _on_stop_signal(self, number: signal.Signals, for_workers: signal.Signals, delivered_at: float | None) -> None:
        if self._shutdown.signal is None:
            self._node_state.leave_signal = number.name
        self._stop_waiting()
        if self._shutdown.signal is None:
            live = self._round is not None and self._round.group.live
            seconds = self._spec.shutdown_timeout if live else None
            key = number is signal.SIGINT
            if key:
                self._console.break_line()
            then = render_shutdown("workers", seconds, alone=self._spec.single_node, again=key)
            self._console.info(f"{received_text(number, for_workers)}: {then}")
            if not self._stopping:
                # The stop that follows sends the signal to the workers.
                return
        if self._round is not None:
            self._round.group.send(for_workers, delivered_at)

    def _on_forwarded_signal(self, number: signal.Signals, delivered_at: float | None) -> None:
        if self._round is not None:
            self._round.group.forward(number, delivered_at)

    def _on_parent_lost(self) -> None:
        self._stop_waiting()
        if self._round is not None:
            self._round.group.send(signal.SIGKILL)

    def _stop_waiting(self) -> None:
        """Report immediately that this node leaves, and stop waiting for slow operations."""
        self._on_change()
        self._relay.stop_waiting()
        if self._plugin_answer is not None:
            self._plugin_answer.cancel()
        if self._round is not None:
            self._round.cancel()


async def _severe_node_problems(spec: JobSpec, say: Callable[[str], None]) -> Sequence[str]:
    # Imported only here: a job without a health check does not load a driver library.
    from dlrover_run.agent.node_problems import severe_node_problems

    return await severe_node_problems(spec, say)


def _logs_plugin(spec: JobSpec) -> LogsSpecsClient | None:
    if spec.logs.plugin is None:
        return None
    from dlrover_run.output.logs_specs import LogsSpecsClient

    return LogsSpecsClient(spec.logs)
