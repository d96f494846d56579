"""The agent: one node's loop between the order of the cluster and its tasks.

Everything that happens (a new order, the end of a task, a word of one, a signal, the loss of the watchdog) only marks
that something happened; the loop then looks at the whole situation, asks `reconcile` for steps and carries them out.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

import msgspec

from dlrover_run.agent.departure import Departure, received_words
from dlrover_run.agent.node_state import NodeState
from dlrover_run.agent.starter import Starter
from dlrover_run.console.console import Console
from dlrover_run.console.rounds import render_shutdown
from dlrover_run.coordination.records import OVER, Assignment, NodePhase, NodeReport, Waiting
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.output.streams import RunDir
from dlrover_run.policies.parameter_servers.model import DesiredReplicas, NodeOrder, NodeTasks, Role
from dlrover_run.process_tree import tree
from dlrover_run.process_tree.orphans import OrphanKiller
from dlrover_run.rendezvous.client import OnChange, RendezvousClient
from dlrover_run.spec import SpecError
from dlrover_run.supervisor.process import StuckProcess
from tf_ps_runner.agent.channel import TaskChannel
from tf_ps_runner.agent.queue_server import Membership
from tf_ps_runner.agent.queue_service import Queues
from tf_ps_runner.agent.reconcile import ReconcileInput, Terminate, reconcile
from tf_ps_runner.agent.report import EventPrinter, JobEnd, JobResult, resolve_result
from tf_ps_runner.agent.scale_server import ScaleServer
from tf_ps_runner.agent.supervisor import TaskSupervisor
from tf_ps_runner.agent.task_start import PACKAGE
from tf_ps_runner.scale_protocol import Reply
from tf_ps_runner.spec import PsJobSpec

MOVE_TIMEOUT = 2.0
"""Seconds that a node which was asked to leave gives the coordinator to begin with moving its tasks to others. What has
begun by then has `--shutdown-timeout` to come to its end; if nothing has, nobody has room, and the tasks are ended."""

NO_TASKS = NodeOrder(version=0)
"""The order of a node that hosts nothing."""


class Agent:
    """Runs one node's part of a job. `console` speaks to the person at the console."""

    def __init__(
        self,
        spec: PsJobSpec,
        run_dir: RunDir,
        relay: RelayClient,
        parent_pipes: Sequence[int],
        console: Console,
        open_client: Callable[[OnChange, Callable[[str], None]], RendezvousClient],
    ) -> None:
        job = spec.job
        assert job.rules.cluster is not None, "such a job has rules for its cluster"
        self._spec = spec
        self._run_dir = run_dir
        self._relay = relay
        self._parent_pipes = parent_pipes
        self._console = console
        self._wake = asyncio.Event()
        self._starter = Starter(job, console.info, ours=[str(PACKAGE)])
        self._orphans = OrphanKiller(self._own_children)
        self._events = EventPrinter(console.info)
        self._standing = NodeState(job)
        self._queues = Queues(self._membership())
        self._channel = TaskChannel(lambda key, event: self._tasks.on_event(key, event), self._queues)
        self._tasks = TaskSupervisor(
            spec, run_dir, relay, self._starter, self._orphans, self._channel, self._wake.set, self._events
        )
        # What the template imports takes longer than anything else.
        self._tasks.warm()
        self._departure = Departure(job, self._take_signal, self._forward_signal, self._lose_launcher)
        self._board = open_client(self._hear, self._print_job_line)
        self._scale_server = ScaleServer(job.run_id, self._request_scale)
        self._wish: DesiredReplicas | None = None
        self._wishes = 0
        self._waiting: Waiting | None = None
        self._moving = False
        self._over = False

    @property
    def pids_to_spare(self) -> set[int]:
        """Processes that outlive this agent on purpose."""
        return self._board.pids

    async def run(self) -> JobResult:
        """Take part in the job until it is over, and tell how it went."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._orphans.reap)
        self._departure.listen(self._parent_pipes)
        if self._run_dir.path is not None and self._run_dir.keep:
            self._console.info(f"logs in {self._run_dir.path}")
        try:
            self._channel.open()
            await self._queues.listen()
            problem = await self._scale_server.open(alone=self._spec.job.backend == "memory")
            if problem is not None:
                self._console.info(problem)
            await self._follow_plan()
        except (StuckProcess, SpecError, OSError) as error:
            self._tasks.send(signal.SIGKILL)
            return await self._conclude(error)
        return await self._conclude()

    async def _follow_plan(self) -> None:
        while True:
            self._wake.clear()
            wanted = self._board.assignment
            self._take(wanted)
            order = wanted.cluster or NO_TASKS
            self._queues.follow(order)
            for step in reconcile(self._situation(wanted)):
                if isinstance(step, Terminate):
                    self._tasks.terminate(step.key, *self._farewell)
                else:
                    self._tasks.carry_out(step, order)
            self._tasks.follow(order)
            self._publish()
            if self._tasks.problem is not None:
                raise self._tasks.problem
            if (self._is_over or self._departure.wanted) and not self._tasks.live:
                return
            await self._wake.wait()

    def _situation(self, wanted: Assignment) -> ReconcileInput:
        return ReconcileInput(
            order=wanted.cluster,
            known=self._tasks.known,
            over=self._is_over,
            departing=self._departure.wanted and not self._moving,
            sparse=self._spec.sparse,
        )

    @property
    def _farewell(self) -> tuple[signal.Signals, float, float | None]:
        """The signal that ends a task when this node goes, or all is over, the seconds that it gets after that, and
        when it got the signal from elsewhere (see `ManagedProcess.send`)."""
        if self._departure.orphaned:
            return signal.SIGKILL, 0.0, None
        if self._departure.signal is not None:
            return self._departure.stop_signal, self._spec.job.shutdown_timeout, self._departure.told_at
        return signal.SIGTERM, self._spec.grace, None

    @property
    def _is_over(self) -> bool:
        return self._board.assignment.phase in OVER or self._board.problem is not None

    def _hear(self) -> None:
        """Something of the board has changed."""
        self._wake.set()

    def _take(self, wanted: Assignment) -> None:
        """Take what the coordinator wants."""
        if not self._departure.wanted:
            # A node that goes takes nothing more; it stays what it is until its tasks have ended.
            self._standing.accept(wanted)
        if not self._goes_alone:
            self._show_waiting(wanted)
            self._events.follow(wanted)
        if wanted.cluster is not None:
            order = wanted.cluster
            self._scale_server.answer_up_to(
                order.scale_answered, Reply(granted=not order.scale_refused, text=order.scale_answer)
            )

    @property
    def _goes_alone(self) -> bool:
        """Whether this is the only node, and is told to go: nobody is left who could wait for what its end leaves no
        room for."""
        return self._departure.wanted and self._spec.job.backend == "memory"

    def _print_job_line(self, line: str) -> None:
        if not self._goes_alone:
            self._console.info(line)

    def _show_waiting(self, wanted: Assignment) -> None:
        waiting = wanted.waiting if wanted.phase not in OVER else None
        if waiting == self._waiting:
            return
        self._waiting = waiting
        if waiting is None:
            self._console.clear_waiting()
        else:
            self._console.show_waiting(waiting.text, waiting.seconds)

    def _publish(self) -> None:
        if not self._over:
            self._board.report(self._status(self._phase))

    @property
    def _phase(self) -> NodePhase:
        if self._departure.wanted:
            return NodePhase.LEAVING
        return NodePhase.RUNNING if self._tasks.known else NodePhase.WAITING

    def _status(self, phase: NodePhase) -> NodeReport:
        tasks = tuple(
            msgspec.structs.replace(task, queue_port=self._queues.port, queue_key=self._queues.key)
            if task.key.role is Role.CHIEF
            else task
            for task in self._tasks.statuses
        )
        hosting = NodeTasks(
            capacity=self._spec.capacity, tasks=tasks, scale_request=self._wish, scale_request_number=self._wishes
        )
        return msgspec.structs.replace(self._standing.report(phase), cluster=hosting)

    def _membership(self) -> Membership | None:
        """What shows other nodes that this one belongs to the job; None if it is the only one."""
        job = self._spec.job
        if job.backend == "memory":
            return None
        return Membership(job.run_id, job.master.token if job.master is not None else "")

    def _request_scale(self, wish: DesiredReplicas) -> int:
        """Pass a wish on, together with what was wished before and is not decided yet."""
        order = self._board.assignment.cluster
        decided = order is not None and order.scale_answered >= self._wishes
        before = DesiredReplicas() if decided or self._wish is None else self._wish
        self._wish = DesiredReplicas(
            ps=before.ps if wish.ps is None else wish.ps,
            workers=before.workers if wish.workers is None else wish.workers,
        )
        self._wishes += 1
        self._wake.set()
        return self._wishes

    async def _conclude(self, gave_up: Exception | None = None) -> JobResult:
        wanted, problem = self._board.assignment, self._board.problem
        self._over = True
        self._console.clear_waiting()
        self._board.report(self._status(NodePhase.LEFT))
        await self._scale_server.close()
        self._channel.close()
        await self._queues.close()
        await self._tasks.close()
        # Who reads our output in a pager takes the time that he likes; what dead tasks have left does not wait for him.
        sweep = asyncio.get_running_loop().call_later(tree.ORPHAN_GRACE, self._orphans.kill_orphans)
        await self._relay.end_round((), timeout=None)
        sweep.cancel()
        verdict = resolve_result(
            JobEnd(
                wanted=wanted,
                ends=tuple(self._tasks.ends),
                host=self._standing.host,
                stopped_by=self._departure.signal,
                problem=problem,
                gave_up=gave_up,
                mistaken=self._board.is_user_error,
            ),
            self._spec.job.compat_exit_codes,
        )
        await self._starter.close()
        self._orphans.close()
        await self._board.close()
        self._standing.close()
        return verdict

    def _own_children(self) -> set[int]:
        return {self._relay.pid} | self._starter.pids | self._tasks.pids | self._board.pids

    def _take_signal(self, number: signal.Signals, meant: signal.Signals, told_at: float | None) -> None:
        if self._departure.signal is None:
            self._standing.leave_signal = number.name
        self._hurry()
        if self._departure.signal is None:
            seconds, key = self._spec.job.shutdown_timeout, number is signal.SIGINT
            if key:
                self._console.break_line()
            live = seconds if self._tasks.live else None
            then = render_shutdown("tasks", live, alone=self._spec.job.alone, again=key)
            if self._tasks.live and number is signal.SIGTERM and self._spec.job.backend in ("master", "etcd"):
                # Whoever evicts a node says it like this, and what it hosts may go on elsewhere with nothing lost.
                self._moving = True
                asyncio.get_running_loop().call_later(MOVE_TIMEOUT, self._look_at_move)
                then = f"what runs here is moved to other nodes if they have room, within {seconds:g} s"
            self._console.info(f"{received_words(number, meant)}: {then}")
            # The next look at the situation passes it on.
            return
        self._moving = False
        self._tasks.send(meant, told_at)

    def _forward_signal(self, number: signal.Signals, told_at: float | None) -> None:
        self._tasks.forward(number, told_at)

    def _look_at_move(self) -> None:
        order = self._board.assignment.cluster
        if order is not None:
            wanted = {task.key for task in order.tasks}
            left = {one.key for one in self._tasks.known if one.live} - wanted
            if left or order.next_servers or order.pause:
                rest = max(0.0, self._spec.job.shutdown_timeout - MOVE_TIMEOUT)
                asyncio.get_running_loop().call_later(rest, self._move_no_more)
                return
        self._move_no_more()

    def _move_no_more(self) -> None:
        self._moving = False
        self._wake.set()

    def _lose_launcher(self) -> None:
        self._moving = False
        self._hurry()
        self._tasks.send(signal.SIGKILL)

    def _hurry(self) -> None:
        """Wait no longer for what may take its time."""
        self._wake.set()
        self._relay.stop_waiting()
