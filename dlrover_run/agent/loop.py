"""The agent: one node's loop between the plan and its workers.

Everything that happens (a new plan, the end of a worker, a signal, the loss of the guard) only marks that something
happened; the loop then looks at the whole situation, asks `reconcile` for one action and carries it out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import exit_codes
from ..backends.local import LocalBoard
from ..coordination.records import Failure, NodePhase, NodeStatus, Plan, assignment
from ..spec import JobSpec, SpecError
from . import failures, guard, lifeline, lineage
from . import round as rounds
from .events import EventLog
from .group import StuckWorkers, WorkerGroup
from .outcome import WorkerEnd
from .ports import HeldPort
from .process import WorkerProcess
from .reconcile import Action, Situation, reconcile
from .refusal import explain
from .relay_client import Relay
from .starter import Starter
from .strays import StraySweep
from .streams import RunDir
from .verdict import Verdict, exit_code_of

if TYPE_CHECKING:
    from .logs_client import LogsPlugin

RESTART_DRAIN_TIMEOUT = 0.5
"""Seconds without progress after which a restart no longer waits for a slow console to show the old workers' last
lines."""

Say = Callable[[str], None]


class Agent:
    """Runs one job on this node. `say` prints one line for the person at the console."""

    def __init__(self, spec: JobSpec, run_dir: RunDir, relay: Relay, lifelines: Sequence[int], say: Say) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._relay = relay
        self._lifelines = lifelines
        self._say = say
        self._host = socket.gethostname()
        self._wake = asyncio.Event()
        self._board = LocalBoard(spec, lambda _: self._wake.set())
        self._starter = Starter(spec, say)
        self._plugin = _logs_plugin(spec)
        self._strays = StraySweep(self._own_children)
        self._memory = failures.MemoryWatch()
        self._events = EventLog(spec, relay.say)
        self._port = HeldPort()
        self._round_port: HeldPort | None = None
        self._incarnation = uuid.uuid4().hex
        self._group: WorkerGroup | None = None
        self._round: rounds.Round | None = None
        self._round_started = 0.0
        self._round_lasted = 0.0
        self._ends: tuple[WorkerEnd, ...] = ()
        self._stop_signal: signal.Signals | None = None
        self._orphaned = False
        self._starting: asyncio.Future[Any] | None = None
        self._stopping = False
        self._interrupted = False
        self._given_up: str | None = None
        self._given_up_code = exit_codes.CANNOT_START

    async def run(self) -> Verdict:
        """Take part in the job until it is over, and tell how it went."""
        self._listen()
        if self._run_dir.path is not None and not self._run_dir.keep:
            # The relay is the last to end, so the directory goes even when guard and agent are killed together.
            self._relay.remove_at_end(self._run_dir.path)
        self._board.publish(self._status(NodePhase.WAITING))
        try:
            await self._follow_plan()
        except (StuckWorkers, SpecError, OSError) as error:
            told = f"the workers could not be started: {explain(error)}" if isinstance(error, OSError) else str(error)
            self._given_up = told
            if isinstance(error, SpecError):
                self._given_up_code = exit_codes.BAD_COMMAND_LINE
            if self._group is not None:
                with contextlib.suppress(StuckWorkers):
                    await self._group.stop(signal.SIGKILL, 0)
        return await self._conclude()

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._strays.reap)
        # The pipe by which the loop wakes up is filled by a crowd of orphans that end at once. Nobody need be warned of
        # that, but a signal that finds it full must not be lost, so the others are heard of without it.
        signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)
        for number in self._spec.signals:
            # Whoever starts a launcher with nohup wants SIGHUP ignored, so what was ignored stays so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: loop.call_soon_threadsafe(self._take_signal, number))
        for fd in self._lifelines:
            lifeline.watch(fd, self._lose_launcher)
        # They were held back since before the guard forked us, so that none could come before it was awaited.
        guard.unblock()

    async def _follow_plan(self) -> None:
        while True:
            self._report()
            action = reconcile(self._situation())
            if action is Action.LEAVE:
                return
            if action is Action.START:
                await self._start_round()
            elif action is Action.STOP:
                await self._stop_workers()
            else:
                await self._wake.wait()
                self._wake.clear()

    def _situation(self) -> Situation:
        plan = self._board.plan
        return Situation(
            plan_phase=plan.phase,
            plan_round=plan.round,
            group_round=self._round.assigned.round if self._round else 0,
            live=self._group is not None and self._group.live,
            asked_to_end=self._stop_signal is not None or self._orphaned,
        )

    def _report(self) -> None:
        """Tell the coordinator what has become of the round, unless this node is on its way out and nobody may act on
        it."""
        if self._group is None or self._round is None or self._stop_signal is not None or self._orphaned:
            return
        first = self._group.first_failed
        if first is not None:
            end = rounds.describe_end(self._round, first, {}, self._memory)
            failure = Failure(first.rank, self._host, failures.describe_end(end))
            self._board.publish(self._status(NodePhase.FAILED, failure))
        else:
            self._board.publish(self._status(NodePhase.SUCCEEDED if self._group.succeeded else NodePhase.RUNNING))

    def _status(self, phase: NodePhase, failure: Failure | None = None) -> NodeStatus:
        return NodeStatus(
            node_id=str(self._spec.node_rank),
            incarnation=self._incarnation,
            address=self._spec.local_addr or "127.0.0.1",
            port=self._port.number,
            workers=self._spec.workers_per_node,
            phase=phase,
            round=self._round.assigned.round if self._round else 0,
            failure=failure,
        )

    async def _start_round(self) -> None:
        plan = self._board.plan
        assigned = assignment(plan, self._status(NodePhase.WAITING))
        if assigned is None:
            raise RuntimeError(f"round {plan.round} has no place for this node")
        if self._round is not None:
            self._strays.condemn_all()
            await self._finish_round(RESTART_DRAIN_TIMEOUT)
            self._say_restart(plan)
            self._group = self._round = None
        placed = None
        if self._plugin is not None:
            contract = rounds.contract(self._spec, assigned, os.environ)
            self._starting = asyncio.ensure_future(self._plugin.ask(contract))
            try:
                placed = await self._starting
            except asyncio.CancelledError:
                return  # A signal came, and the loop sees that there is nothing to stop.
            finally:
                self._starting = None
        self._take_port(assigned.store_port)
        self._round = rounds.prepare(self._spec, assigned, os.environ, self._run_dir.path, self._relay, placed)
        self._group = WorkerGroup(self._round.starts, self._note_end)
        self._memory.begin()
        self._round_started = time.monotonic()
        with self._strays.paused():
            self._starting = asyncio.ensure_future(self._start_workers(self._group, self._round))
            try:
                await self._starting
            except asyncio.CancelledError:
                # A signal came while the template was still importing; the loop sees that and stops what was started.
                pass
            finally:
                self._starting = None
                rounds.release(self._round)
        self._starter.learn_later()
        self._events.round_started(assigned)

    async def _start_workers(self, group: WorkerGroup, round_: rounds.Round) -> None:
        await self._starter.prepare(round_.starts)
        await group.start(self._starter.start)

    def _take_port(self, number: int) -> None:
        """Keep the port of the round that starts and hold another for the one after it."""
        if self._round_port is not None:
            self._round_port.release()
        if number == self._port.number:
            self._round_port = self._port
            self._port = HeldPort()
        elif self._spec.node_rank == 0:
            try:
                self._round_port = HeldPort(number)
            except OSError as error:
                raise SpecError(
                    f"--master-port: port {number} cannot be had on this host ({error.strerror}); name another one."
                ) from None

    async def _stop_workers(self) -> None:
        if self._group is None:
            return
        self._stopping = True
        try:
            if self._orphaned:
                await self._group.stop(signal.SIGKILL, 0)
            else:
                await self._group.stop(self._stop_signal or signal.SIGTERM, self._spec.shutdown_timeout)
        finally:
            self._stopping = False

    async def _finish_round(self, patience: float | None) -> None:
        """Gather the evidence of a round whose workers have all ended.

        A console that is stuck gets `patience` seconds; None is as long as nobody asks this node to end.
        """
        if self._round is None or self._group is None:
            return
        keys = [str(worker.local_rank) for worker in self._group.ended]
        drained = await self._relay.end_round(keys, timeout=patience)
        self._ends = rounds.describe_ends(self._round, self._group.ended, drained.tails, self._memory)

    def _say_restart(self, plan: Plan) -> None:
        from ..console.report import render_restart

        # Our own evidence says more than the plan does: it was made before a traceback had been read.
        root = failures.root_cause(self._ends)
        reason = f"rank {root.rank} {failures.describe_end(root)}" if root else plan.reason
        self._say(render_restart(reason, plan.restart_count, self._spec.max_restarts, self._round_lasted))

    async def _conclude(self) -> Verdict:
        # Who reads our output in a pager takes the time that he likes, as he would with a worker's own. What dead
        # workers left behind does not wait for him; at a usual end the sweep after this function finds it sooner.
        sweep = asyncio.get_running_loop().call_later(lineage.STRAY_GRACE, self._strays.condemn_all)
        await self._finish_round(None)
        sweep.cancel()
        root = failures.root_cause(self._ends)
        if root is not None:
            self._pass_on(root)
        await self._starter.close()
        if self._plugin is not None:
            await self._plugin.close()
        self._strays.close()
        plan = self._board.plan
        code = exit_code_of(plan, root, self._stop_signal, self._spec.compat_exit_codes)
        if self._given_up is not None:
            code = self._given_up_code
        results = {}
        if self._round is not None and self._round.results is not None:
            results = {end.rank: self._round.results.read(end.local_rank) for end in self._ends if end.code == 0}
        self._events.job_ended(plan)
        return Verdict(code, plan.reason, plan.restart_count, self._ends, root, self._given_up, results)

    def _pass_on(self, root: WorkerEnd) -> None:
        """Hand the first failure's record to whoever started this launcher and gave it an error file, as torchrun
        does."""
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            problem = failures.copy_root_cause(root, error_file)
            if problem is not None:
                self._say(problem)

    def _own_children(self) -> set[int]:
        plugin = self._plugin.pids if self._plugin is not None else set()
        return self._starter.pids | {self._relay.pid} | plugin | (self._group.pids if self._group else set())

    def _note_end(self, worker: WorkerProcess) -> None:
        self._round_lasted = time.monotonic() - self._round_started
        self._wake.set()
        self._strays.reap()
        if worker.code == 0 and self._group is not None and self._group.live:
            # At the end of the round, which a failure brings about, all goes, whatever session it hides in.
            self._strays.condemn_session(worker.pid)

    def _take_signal(self, received: int) -> None:
        number = signal.Signals(received)
        self._wake.set()
        self._relay.hurry()
        if self._starting is not None:
            self._starting.cancel()
        first = self._stop_signal is None
        # Somebody at the keyboard who presses Ctrl-C again does not want to wait for anyone's grace.
        insists = self._interrupted and number is signal.SIGINT
        self._interrupted = self._interrupted or number is signal.SIGINT
        if first:
            self._stop_signal = number
            self._say(f"{number.name} received: the workers are told and get {self._spec.shutdown_timeout:g} s to end")
        # The first one is passed on by the stop that follows it, unless a stop is under way already.
        if self._group is not None and (self._stopping or not first):
            self._group.forward(signal.SIGKILL if insists else number)

    def _lose_launcher(self) -> None:
        self._orphaned = True
        self._wake.set()
        self._relay.hurry()
        if self._starting is not None:
            self._starting.cancel()
        if self._group is not None:
            self._group.forward(signal.SIGKILL)


def _logs_plugin(spec: JobSpec) -> LogsPlugin | None:
    if spec.logs.plugin is None:
        return None
    from .logs_client import LogsPlugin

    return LogsPlugin(spec.logs)
