"""The TensorFlow adapter: the tasks of this node, the job's data queues, and the move of tasks to other nodes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dlrover_run.agent.framework import AgentServices, FrameworkAdapter
from dlrover_run.agent.reconcile import Action, DesiredTask, TaskState
from dlrover_run.agent.result import JobResult, TaskResults
from dlrover_run.coordination.records.activity import NodeActivity
from dlrover_run.coordination.records.assignment import Assignment, Waiting
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.plan import OVER
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.observe.page import Progress
from dlrover_run.workers.starter import Starter
from tf_ps_runner.agent.channel import TaskChannel
from tf_ps_runner.agent.desired import desired_tasks, task_states
from tf_ps_runner.agent.pace import PaceReport
from tf_ps_runner.agent.queue_server import Membership
from tf_ps_runner.agent.queue_service import Queues
from tf_ps_runner.agent.report import EventPrinter, task_results
from tf_ps_runner.agent.supervisor import TaskSupervisor
from tf_ps_runner.agent.task_start import PACKAGE
from tf_ps_runner.cluster.model import Role, TaskKey
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.cluster.reports import NodeTasks
from tf_ps_runner.cluster.rules import ClusterRules
from tf_ps_runner.spec import PsJobSpec

if TYPE_CHECKING:
    from dlrover_run.job_status.stacks import NodeStacks
    from dlrover_run.output.read_back import WorkerOutput

MOVE_TIMEOUT = 2.0
"""Seconds that a node which was asked to leave gives the coordinator to begin moving its tasks to other nodes. A move
that has begun by then gets `--shutdown-timeout` to finish. If none has, no node has room, and the tasks are ended."""

NO_TASKS = NodeOrder(version=0)
"""The order of a node without tasks."""


class TensorFlowAdapter(FrameworkAdapter[TaskKey]):
    """The tasks of this node."""

    noun = "tasks"

    def __init__(self, spec: PsJobSpec, services: AgentServices) -> None:
        assert ClusterRules.find(spec.job.rules.parts) is not None, "such a job has rules for its cluster"
        self._spec = spec
        self._services = services
        self._console = services.console
        self._shutdown = services.shutdown
        self.starter = Starter(spec.job, services.console.info, ours=[str(PACKAGE)])
        self._events = EventPrinter(services.console.info)
        job = spec.job
        several_nodes = job.rendezvous.coordinated
        self._queues = Queues(Membership(job.run_id, job.rendezvous.secret) if several_nodes else None)
        self._channel = TaskChannel(lambda key, event: self._tasks.on_event(key, event), self._queues)
        self._tasks = TaskSupervisor(spec, services, self.starter, self._channel, self._events, self._fail)
        self._tasks.prestart()
        unread = partial(self._events.show_internal_error, "the steps and the load of this node's tasks cannot be read")
        self._pace = PaceReport(lambda: self._tasks.seen, services.wake, unread)
        self._assignment = Assignment()
        self._waiting: Waiting | None = None
        self._error: Exception | None = None

    @property
    def pids(self) -> set[int]:
        return self.starter.pids | self._tasks.pids

    @property
    def running(self) -> bool:
        return self._tasks.live

    async def open(self) -> None:
        run_dir = self._services.run_dir
        if run_dir.path is not None and run_dir.keep:
            self._console.info(f"logs in {run_dir.path}")
        self._channel.open()
        await self._queues.listen()

    def accept(self, assignment: Assignment, shutting_down: bool) -> None:
        if self._error is not None:
            raise self._error
        self._assignment = assignment
        if not (self._shutdown.requested and self._spec.job.rendezvous.alone):
            # If this is the only node, its shutdown ends the job, and no line about other nodes or restarts is true.
            self._show_waiting(assignment)
            self._events.follow(assignment)
        self._queues.follow(self._order)
        self._tasks.follow(self._order, shutting_down)
        self._pace.follow(self._order, shutting_down)

    def desired(self) -> Sequence[DesiredTask[TaskKey]]:
        return desired_tasks(self._order, self._tasks.here, self._spec.sparse)

    def states(self) -> Sequence[TaskState[TaskKey]]:
        return task_states(self._order, self._tasks.here)

    def carry_out(self, action: Action[TaskKey]) -> None:
        self._tasks.carry_out(action, self._order)

    def report(self, leaving: bool) -> NodeReport:
        if leaving:
            return self._report(NodePhase.LEAVING)
        return self._report(NodePhase.RUNNING if self._tasks.here else NodePhase.WAITING)

    def progress(self) -> Mapping[str, Progress]:
        return self._tasks.progress

    def stalled(self) -> Mapping[str, str]:
        return self._tasks.stalled

    def add_to_activity(self, activity: NodeActivity) -> NodeActivity:
        problem = self._tasks.watch_problem
        return msgspec.structs.replace(activity, watch_problem=problem) if problem else activity

    async def stacks(self, rank: int | None) -> NodeStacks:
        # Imported only here: a launch does not wait for it. Without ranks no question names one.
        from dlrover_run.stacks.worker_stacks import node_stacks

        return await node_stacks(dict(self._tasks.processes))

    def outputs(self) -> Sequence[WorkerOutput]:
        return self._tasks.outputs

    def begin_move(self, number: signal.Signals) -> str | None:
        """Begin to move the tasks, if a cluster manager evicts this node: it sends SIGTERM or a preemption notice, and
        the tasks may continue elsewhere with nothing lost."""
        job = self._spec.job
        evicts = number is signal.SIGTERM or (job.preemption is not None and number is job.preemption.signal)
        if not self._tasks.live or not evicts or not job.rendezvous.coordinated:
            return None
        self.migrating = True
        asyncio.get_running_loop().call_later(MOVE_TIMEOUT, self._check_move)
        return f"what runs here is moved to other nodes if they have room, within {self._shutdown.grace:g} s"

    def send(self, number: signal.Signals, delivered_at: float | None = None, only_stopping: bool = False) -> None:
        self.migrating = self.migrating and only_stopping
        self._tasks.send(number, delivered_at, only_stopping)

    def forward(self, number: signal.Signals, delivered_at: float | None) -> None:
        self._tasks.forward(number, delivered_at)

    async def kill(self) -> None:
        self._tasks.send(signal.SIGKILL)

    def leave_report(self, error: Exception | None) -> NodeReport | None:
        return self._report(NodePhase.LEFT)

    async def finish(self, assignment: Assignment) -> TaskResults:
        self._channel.close()
        self._pace.close()
        await self._queues.close()
        await self._tasks.close()
        await self._services.relay.end_round((), timeout=None)
        return task_results(assignment, tuple(self._tasks.ends), self._services.node_state.host)

    async def close(self, assignment: Assignment, result: JobResult) -> None:
        await self.starter.close()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._services.wake()

    @property
    def _order(self) -> NodeOrder:
        return NodeOrder.find(self._assignment.parts) or NO_TASKS

    def _report(self, phase: NodePhase) -> NodeReport:
        tasks = tuple(
            msgspec.structs.replace(task, queue_port=self._queues.port, queue_key=self._queues.key)
            if task.key.role is Role.CHIEF
            else task
            for task in self._tasks.statuses
        )
        node_tasks = self._pace.add_to(NodeTasks(capacity=self._spec.capacity, tasks=tasks))
        report = self._services.node_state.report(phase)
        return msgspec.structs.replace(report, parts=with_part(report.parts, node_tasks))

    def _show_waiting(self, assignment: Assignment) -> None:
        waiting = assignment.waiting if assignment.phase not in OVER else None
        if waiting == self._waiting:
            return
        self._waiting = waiting
        if waiting is None:
            self._console.clear_waiting()
        else:
            self._console.show_waiting(waiting.text, waiting.seconds)

    def _check_move(self) -> None:
        order = NodeOrder.find(self._assignment.parts)
        if order is not None:
            wanted = {task.key for task in order.tasks}
            left = {one.key for one in self._tasks.here if one.live} - wanted
            if left or order.next_servers or order.pause:
                rest = max(0.0, self._shutdown.grace - MOVE_TIMEOUT)
                asyncio.get_running_loop().call_later(rest, self._end_move)
                return
        self._end_move()

    def _end_move(self) -> None:
        self.migrating = False
        self._services.wake()
