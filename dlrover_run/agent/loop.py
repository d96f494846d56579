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
from dlrover_run.agent.departure import Departure, received_words
from dlrover_run.agent.events import EventLog
from dlrover_run.agent.health_check import HealthCheckRunner
from dlrover_run.agent.node_state import NodeState, build_report, leave_report
from dlrover_run.agent.progress_reporter import ProgressReporter
from dlrover_run.agent.reconcile import Action, Situation, reconcile
from dlrover_run.agent.result import JobEnd, JobResult, resolve_result
from dlrover_run.agent.starter import Starter
from dlrover_run.agent.worker_round import WorkerRound
from dlrover_run.agent.worker_specs import Worker, build_worker_specs, launcher_environments
from dlrover_run.console.console import Console
from dlrover_run.console.rounds import render_shutdown
from dlrover_run.coordination.records import OVER, RankAssignment
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
"""Seconds without progress after which a restart no longer waits for a slow console to show the old workers' end."""


class Agent:
    """Runs one job on this node. `console` shows messages to the user."""

    def __init__(
        self,
        spec: JobSpec,
        run_dir: RunDir,
        relay: RelayClient,
        parent_pipes: Sequence[int],
        console: Console,
        open_board: Callable[[OnChange], RendezvousClient],
    ) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._relay = relay
        self._parent_pipes = parent_pipes
        self._console = console
        self._wake = asyncio.Event()
        self._starter = Starter(spec, console.info)
        if spec.backend in ("master", "etcd"):
            # Its place may come at any moment. What the template imports takes longer than anything else, so it begins
            # before the board imports what it needs.
            self._starter.warm(os.environ)
        self._board = open_board(self._hear)
        self._standing = NodeState(spec)
        self._plugin = _logs_plugin(spec)
        self._asking: asyncio.Future[LogsDestinations] | None = None
        self._orphans = OrphanKiller(self._own_children)
        find_problems = partial(_severe_node_problems, spec, console.info)
        self._check = HealthCheckRunner(
            spec, self._starter, self._orphans.paused, self._wake.set, find_problems, console.info
        )
        self._narration = ProgressReporter(spec, console)
        self._check_file = HealthFile(run_dir, console.info)
        self._events = EventLog(spec, relay.write)
        self._departure = Departure(spec, self._take_signal, self._forward_signal, self._lose_launcher)
        self._round: WorkerRound | None = None
        self._stopping = False
        self._reporting: asyncio.Handle | None = None
        self._over = False

    @property
    def pids_to_spare(self) -> set[int]:
        """Processes that outlive this agent on purpose."""
        return self._board.pids

    async def run(self) -> JobResult:
        """Take part in the job until it is over, and tell how it went."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._orphans.reap)
        self._departure.listen(self._parent_pipes)
        self._narration.begin(self._run_dir)
        try:
            await self._follow_plan()
        except (StuckProcess, SpecError, OSError) as error:
            if self._round is not None:
                with contextlib.suppress(StuckProcess):
                    await self._round.group.stop(signal.SIGKILL, 0)
            return await self._conclude(error)
        return await self._conclude()

    async def _follow_plan(self) -> None:
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
                    # And no worker runs: the devices are free.
                    self._check.update(self._board.assignment.check_task, self._board.assignment.health)
                await self._wake.wait()
                self._wake.clear()

    def _situation(self) -> Situation:
        return Situation(
            over=self._is_over,
            wanted=self._standing.round,
            started=self._round.key if self._round else None,
            live=self._round is not None and self._round.group.live,
            leaving=self._departure.wanted,
        )

    @property
    def _is_over(self) -> bool:
        wanted = self._board.assignment
        dismissed = wanted.health is not None and wanted.health.dismissed
        return dismissed or wanted.phase in OVER or self._board.problem is not None

    def _hear(self) -> None:
        """Something of the board has changed."""
        self._wake.set()
        if self._reporting is None:
            # The loop may be waiting for the end of workers, and the others need not wait for that too. Not at once,
            # because the board may be speaking of what is just being put on it.
            self._reporting = asyncio.get_running_loop().call_soon(self._report_meanwhile)

    def _report_meanwhile(self) -> None:
        with contextlib.suppress(OSError):
            # The loop meets the same, and ends with a sentence.
            self._report()

    def _report(self) -> None:
        """Take what the coordinator wants, and tell it what has become of that."""
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        if self._over:
            return
        wanted = self._board.assignment
        if not self._departure.wanted:
            # A node that goes takes no further seat; it stays a member of its round until its workers have ended.
            self._standing.accept(wanted)
            self._narration.update(wanted)
            self._check_file.follow(wanted, self._check.devices)
        if self._round is not None and (self._is_over or self._round.key != self._standing.round):
            self._round.cancel()
        self._board.report(self._check.add_to_report(build_report(self._standing, self._round, self._departure.wanted)))

    async def _start_round(self) -> None:
        seat = self._standing.seat
        assert seat is not None, "only a seat is a reason to start"
        await self._check.suspend()
        if not self._is_wanted(seat):
            return
        if self._round is not None:
            await self._leave_behind(self._round, seat)
            if not self._is_wanted(seat):
                return
            self._round.close()
            self._round = None
        placed = None
        if self._plugin is not None:
            placed = await self._ask_plugin(self._plugin, seat)
            if placed is None or not self._is_wanted(seat):
                return
        port = self._standing.take_port()
        specs = build_worker_specs(self._spec, seat, os.environ, self._run_dir.path, self._relay, placed)
        self._narration.begin_round(seat)
        self._round = WorkerRound(specs, port, self._relay, self._note_end, self._wake.set)
        with self._orphans.paused():
            await self._round.start(self._starter)
        self._starter.learn_later()
        self._events.round_started(seat)

    def _is_wanted(self, seat: RankAssignment) -> bool:
        """Whether that is still this node's place; what it waited for may have taken a while."""
        return not self._departure.wanted and self._standing.round == seat.key

    async def _leave_behind(self, ended: WorkerRound, seat: RankAssignment) -> None:
        """Be done with a round that is over, and say why there is another one."""
        if self._spec.backend == "static":
            # The next round needs the very port that a child of the dead rank 0 may still listen on.
            tree.end_children(self._own_children())
        else:
            self._orphans.kill_orphans()
        await ended.collect_exit_info(RESTART_DRAIN_TIMEOUT)
        if self._is_wanted(seat):
            self._narration.end_round(ended, self._board.assignment, seat)

    async def _ask_plugin(self, plugin: LogsSpecsClient, seat: RankAssignment) -> LogsDestinations | None:
        """A plugin's word on where the output goes; None when a signal came before it answered."""
        self._asking = asyncio.ensure_future(plugin.ask(launcher_environments(self._spec, seat, os.environ)))
        try:
            return await self._asking
        except asyncio.CancelledError:
            return None
        finally:
            self._asking = None

    async def _stop_workers(self) -> None:
        if self._round is None:
            return
        self._stopping = True
        try:
            if self._departure.orphaned:
                await self._round.group.stop(signal.SIGKILL, 0)
            else:
                stop_signal, told_at = self._departure.stop_signal, self._departure.told_at
                await self._round.group.stop(stop_signal, self._spec.shutdown_timeout, told_at)
        finally:
            self._stopping = False

    async def _conclude(self, gave_up: Exception | None = None) -> JobResult:
        wanted, problem = self._board.assignment, self._board.problem
        # The others form their next round as soon as they know; what follows may wait for somebody at the console.
        succeeded = self._say_goodbye(gave_up)
        await self._check.close()
        ends: tuple[WorkerExit, ...] = ()
        results: dict[int, bytes] = {}
        if self._round is not None:
            # Who reads our output in a pager takes the time that he likes, as he would with a worker's own. What dead
            # workers left behind does not wait for him; at a usual end the sweep after this function finds it sooner.
            sweep = asyncio.get_running_loop().call_later(tree.ORPHAN_GRACE, self._orphans.kill_orphans)
            await self._round.collect_exit_info(None)
            sweep.cancel()
            ends, results = self._round.ends, self._round.results()
            self._round.close()
        ending = JobEnd(
            wanted,
            self._standing.seat,
            ends,
            succeeded,
            results,
            self._departure.signal,
            problem,
            gave_up,
            self._board.is_user_error,
        )
        verdict = resolve_result(ending, self._spec.compat_exit_codes)
        if verdict.root is not None:
            self._pass_on(verdict.root)
        await self._starter.close()
        if self._plugin is not None:
            await self._plugin.close()
        self._orphans.close()
        await self._board.close()
        self._standing.close()
        self._events.job_ended(wanted.phase, verdict.restarts, verdict.reason)
        return verdict

    def _say_goodbye(self, gave_up: Exception | None) -> bool:
        """Tell the others that this node takes no part any more; whether all its workers had succeeded."""
        self._over = True
        self._narration.end()
        current = self._round
        succeeded = current is not None and current.key == self._standing.round and current.group.succeeded
        if not succeeded or self._board.assignment.phase in OVER:
            self._board.report(leave_report(self._standing, gave_up))
        # Else its last word is that they have, and the others need no round without them.
        return succeeded

    def _pass_on(self, root: WorkerExit) -> None:
        """Hand the first failure's record to whoever started this launcher with an error file (as torchrun)."""
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            problem = failures.copy_root_cause(root, error_file)
            if problem is not None:
                self._console.info(problem)

    def _own_children(self) -> set[int]:
        plugin = self._plugin.pids if self._plugin is not None else set()
        workers = self._round.group.pids if self._round is not None else set()
        return {self._relay.pid} | self._starter.pids | self._check.pids | plugin | workers | self._board.pids

    def _note_end(self, worker: Worker) -> None:
        self._wake.set()
        self._orphans.reap()
        if self._round is not None and self._round.group.live:
            # At the end of the round all that is left goes, whatever session it hides in.
            self._orphans.kill_session(worker.pid)

    def _take_signal(self, number: signal.Signals, meant: signal.Signals, told_at: float | None) -> None:
        if self._departure.signal is None:
            self._standing.leave_signal = number.name
        self._hurry()
        if self._departure.signal is None:
            live = self._round is not None and self._round.group.live
            seconds = self._spec.shutdown_timeout if live else None
            key = number is signal.SIGINT
            if key:
                self._console.break_line()
            then = render_shutdown("workers", seconds, alone=self._spec.single_node, again=key)
            self._console.info(f"{received_words(number, meant)}: {then}")
            if not self._stopping:
                # The stop that follows now passes it on.
                return
        if self._round is not None:
            self._round.group.send(meant, told_at)

    def _forward_signal(self, number: signal.Signals, told_at: float | None) -> None:
        if self._round is not None:
            self._round.group.forward(number, told_at)

    def _lose_launcher(self) -> None:
        self._hurry()
        if self._round is not None:
            self._round.group.send(signal.SIGKILL)

    def _hurry(self) -> None:
        """Say at once that this node goes, and wait no longer for what may take its time."""
        self._hear()
        self._relay.stop_waiting()
        if self._asking is not None:
            self._asking.cancel()
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
