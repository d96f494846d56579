"""The agent: the loop between one node's order and its tasks.

Each event (a new order, the end of a task, a message of one, a signal, the loss of the watchdog) only wakes the loop.
The loop then looks at the whole situation, asks `reconcile` for actions and carries them out.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

import msgspec

from dlrover_run.agent.node_state import NodeState
from dlrover_run.agent.shutdown import ShutdownRequest, received_text
from dlrover_run.agent.starter import Starter
from dlrover_run.console.console import Console
from dlrover_run.console.rounds import render_shutdown
from dlrover_run.coordination.model import OVER, Assignment, NodePhase, NodeReport, Waiting
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
"""Seconds that a node which was asked to leave gives the coordinator to begin moving its tasks to other nodes. A move
that has begun by then gets `--shutdown-timeout` to finish. If none has, no node has room, and the tasks are ended."""

NO_TASKS = NodeOrder(version=0)
"""The order of a node without tasks."""


class Agent:
    """Runs one node's part of a job. `console` shows messages to the user."""

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
        self._node_state = NodeState(job)
        self._queues = Queues(self._membership())
        self._channel = TaskChannel(lambda key, event: self._tasks.on_event(key, event), self._queues)
        self._tasks = TaskSupervisor(
            spec, run_dir, relay, self._starter, self._orphans, self._channel, self._wake.set, self._events
        )
        # Importing takes the template longer than anything else.
        self._tasks.warm()
        self._shutdown = ShutdownRequest(job, self._on_stop_signal, self._on_forwarded_signal, self._on_parent_lost)
        self._client = open_client(self._on_change, self._print_job_line)
        self._scale_server = ScaleServer(job.run_id, self._request_scale)
        self._desired: DesiredReplicas | None = None
        self._scale_requests = 0
        self._waiting: Waiting | None = None
        self._moving = False
        self._over = False

    @property
    def pids_to_spare(self) -> set[int]:
        """Processes that outlive this agent on purpose."""
        return self._client.pids

    async def run(self) -> JobResult:
        """Take part in the job until it is over, and return its result."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._orphans.reap)
        self._shutdown.listen(self._parent_pipes)
        if self._run_dir.path is not None and self._run_dir.keep:
            self._console.info(f"logs in {self._run_dir.path}")
        try:
            self._channel.open()
            await self._queues.listen()
            problem = await self._scale_server.open(alone=self._spec.job.backend == "memory")
            if problem is not None:
                self._console.info(problem)
            await self._reconcile_until_done()
        except (StuckProcess, SpecError, OSError) as error:
            self._tasks.send(signal.SIGKILL)
            return await self._conclude(error)
        return await self._conclude()

    async def _reconcile_until_done(self) -> None:
        while True:
            self._wake.clear()
            wanted = self._client.assignment
            self._take(wanted)
            order = wanted.cluster or NO_TASKS
            self._queues.follow(order)
            for action in reconcile(self._situation(wanted)):
                if isinstance(action, Terminate):
                    self._tasks.terminate(action.key, *self._stop_signal)
                else:
                    self._tasks.carry_out(action, order)
            self._tasks.follow(order)
            self._publish()
            if self._tasks.problem is not None:
                raise self._tasks.problem
            if (self._is_over or self._shutdown.wanted) and not self._tasks.live:
                return
            await self._wake.wait()

    def _situation(self, wanted: Assignment) -> ReconcileInput:
        return ReconcileInput(
            order=wanted.cluster,
            known=self._tasks.known,
            over=self._is_over,
            departing=self._shutdown.wanted and not self._moving,
            sparse=self._spec.sparse,
        )

    @property
    def _stop_signal(self) -> tuple[signal.Signals, float, float | None]:
        """The signal that ends a task when this node leaves or the job is over, the grace period after it, and when the
        task got the signal from elsewhere (see `ManagedProcess.send`)."""
        if self._shutdown.orphaned:
            return signal.SIGKILL, 0.0, None
        if self._shutdown.signal is not None:
            return self._shutdown.stop_signal, self._spec.job.shutdown_timeout, self._shutdown.delivered_at
        return signal.SIGTERM, self._spec.grace, None

    @property
    def _is_over(self) -> bool:
        return self._client.assignment.phase in OVER or self._client.problem is not None

    def _on_change(self) -> None:
        """The assignment or the state of the connection has changed."""
        self._wake.set()

    def _take(self, wanted: Assignment) -> None:
        """Take the coordinator's assignment."""
        if not self._shutdown.wanted:
            # A node that leaves takes nothing more; it keeps its state until its tasks have ended.
            self._node_state.accept(wanted)
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
        """Whether this is the only node and is asked to leave: no other node can wait for the room that it leaves."""
        return self._shutdown.wanted and self._spec.job.backend == "memory"

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
            self._client.report(self._status(self._phase))

    @property
    def _phase(self) -> NodePhase:
        if self._shutdown.wanted:
            return NodePhase.LEAVING
        return NodePhase.RUNNING if self._tasks.known else NodePhase.WAITING

    def _status(self, phase: NodePhase) -> NodeReport:
        tasks = tuple(
            msgspec.structs.replace(task, queue_port=self._queues.port, queue_key=self._queues.key)
            if task.key.role is Role.CHIEF
            else task
            for task in self._tasks.statuses
        )
        node_tasks = NodeTasks(
            capacity=self._spec.capacity,
            tasks=tasks,
            scale_request=self._desired,
            scale_request_number=self._scale_requests,
        )
        return msgspec.structs.replace(self._node_state.report(phase), cluster=node_tasks)

    def _membership(self) -> Membership | None:
        """What shows other nodes that this one belongs to the job; None if it is the only one."""
        job = self._spec.job
        if job.backend == "memory":
            return None
        return Membership(job.run_id, job.master.token if job.master is not None else "")

    def _request_scale(self, request: DesiredReplicas) -> int:
        """Pass a scale request on, together with earlier ones that are not decided yet."""
        order = self._client.assignment.cluster
        decided = order is not None and order.scale_answered >= self._scale_requests
        before = DesiredReplicas() if decided or self._desired is None else self._desired
        self._desired = DesiredReplicas(
            ps=before.ps if request.ps is None else request.ps,
            workers=before.workers if request.workers is None else request.workers,
        )
        self._scale_requests += 1
        self._wake.set()
        return self._scale_requests

    async def _conclude(self, gave_up: Exception | None = None) -> JobResult:
        wanted, problem = self._client.assignment, self._client.problem
        self._over = True
        self._console.clear_waiting()
        self._client.report(self._status(NodePhase.LEFT))
        await self._scale_server.close()
        self._channel.close()
        await self._queues.close()
        await self._tasks.close()
        # The console may block (a pager), so draining it has no timeout; orphans of dead tasks are killed meanwhile.
        sweep = asyncio.get_running_loop().call_later(tree.ORPHAN_GRACE, self._orphans.kill_orphans)
        await self._relay.end_round((), timeout=None)
        sweep.cancel()
        verdict = resolve_result(
            JobEnd(
                wanted=wanted,
                ends=tuple(self._tasks.ends),
                host=self._node_state.host,
                stopped_by=self._shutdown.signal,
                problem=problem,
                gave_up=gave_up,
                mistaken=self._client.is_user_error,
            ),
            self._spec.job.compat_exit_codes,
        )
        await self._starter.close()
        self._orphans.close()
        await self._client.close()
        self._node_state.close()
        return verdict

    def _own_children(self) -> set[int]:
        return {self._relay.pid} | self._starter.pids | self._tasks.pids | self._client.pids

    def _on_stop_signal(self, number: signal.Signals, for_workers: signal.Signals, delivered_at: float | None) -> None:
        if self._shutdown.signal is None:
            self._node_state.leave_signal = number.name
        self._stop_waiting()
        if self._shutdown.signal is None:
            seconds, key = self._spec.job.shutdown_timeout, number is signal.SIGINT
            if key:
                self._console.break_line()
            live = seconds if self._tasks.live else None
            then = render_shutdown("tasks", live, alone=self._spec.job.single_node, again=key)
            if self._tasks.live and number is signal.SIGTERM and self._spec.job.backend in ("master", "etcd"):
                # A cluster manager that evicts a node sends SIGTERM, and the node's tasks may continue elsewhere with
                # nothing lost.
                self._moving = True
                asyncio.get_running_loop().call_later(MOVE_TIMEOUT, self._check_move)
                then = f"what runs here is moved to other nodes if they have room, within {seconds:g} s"
            self._console.info(f"{received_text(number, for_workers)}: {then}")
            # The next turn of the loop forwards it.
            return
        self._moving = False
        self._tasks.send(for_workers, delivered_at)

    def _on_forwarded_signal(self, number: signal.Signals, delivered_at: float | None) -> None:
        self._tasks.forward(number, delivered_at)

    def _check_move(self) -> None:
        order = self._client.assignment.cluster
        if order is not None:
            wanted = {task.key for task in order.tasks}
            left = {one.key for one in self._tasks.known if one.live} - wanted
            if left or order.next_servers or order.pause:
                rest = max(0.0, self._spec.job.shutdown_timeout - MOVE_TIMEOUT)
                asyncio.get_running_loop().call_later(rest, self._end_move)
                return
        self._end_move()

    def _end_move(self) -> None:
        self._moving = False
        self._wake.set()

    def _on_parent_lost(self) -> None:
        self._moving = False
        self._stop_waiting()
        self._tasks.send(signal.SIGKILL)

    def _stop_waiting(self) -> None:
        """End all waits that only serve a user or another node."""
        self._wake.set()
        self._relay.stop_waiting()
