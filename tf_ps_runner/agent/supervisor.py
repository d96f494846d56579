"""The tasks of this node as processes: carries out the actions of `reconcile`, and watches each process to its end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dlrover_run.agent.framework import AgentServices
from dlrover_run.agent.reconcile import Action, Release, Reserve, Start, Stop, StopMode, WaitForPeers
from dlrover_run.background import Background
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.observe.page import Progress
from dlrover_run.processes.ports import PortPool
from dlrover_run.processes.process import ManagedProcess, ProcessSpec, StuckProcess
from dlrover_run.workers.starter import Starter
from tf_ps_runner.agent import task_start
from tf_ps_runner.agent.channel import TaskChannel
from tf_ps_runner.agent.desired import LocalTask
from tf_ps_runner.agent.exits import ExitClassifier
from tf_ps_runner.agent.liveness import ProbeState, ServerMonitor
from tf_ps_runner.agent.pace import SeenTask
from tf_ps_runner.agent.protocol import Note, Restored, Saved, Step, TaskEvent
from tf_ps_runner.agent.report import EventPrinter
from tf_ps_runner.agent.task_events import TaskEvents
from tf_ps_runner.agent.task_process import TaskProcess
from tf_ps_runner.agent.task_start import TaskStartBuilder
from tf_ps_runner.cluster.model import PlannedTask, Role, TaskEnd, TaskKey, TaskStatus
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.cluster.rules import ROLES
from tf_ps_runner.spec import PsJobSpec
from tf_ps_runner.tf_config import proxy_exceptions, servers_of, task_variables, tf_config

if TYPE_CHECKING:
    from dlrover_run.output.read_back import WorkerOutput
    from tf_ps_runner.agent.task_watch import TaskWatch

PEER_TIMEOUT = 5.0
"""Seconds that a task waits for the addresses of workers that are being replaced. Then it starts without them, because
they may have succeeded and not come back."""

STEP_REPORT_INTERVAL = 2.0
"""Seconds between two reports of the chief's steps: it makes some hundred a second."""

MEMORY_CHECK_INTERVAL = 1.0
"""Seconds between two checks of how much memory a task with a limit uses, and of the kills for memory: the kernel does
not notify. A task that reaches its limit within that time is killed for it."""


class TaskSupervisor:
    """All tasks of one node. The agent is woken when a status has changed; `events` shows messages to the user. `fail`
    is called with an error that keeps this node from continuing."""

    def __init__(
        self,
        spec: PsJobSpec,
        services: AgentServices,
        starter: Starter,
        channel: TaskChannel,
        events: EventPrinter,
        fail: Callable[[Exception], None],
    ) -> None:
        self._spec = spec
        self._start_builder = TaskStartBuilder(spec, services.run_dir, services.relay, events)
        self._relay = services.relay
        self._starter = starter
        self._orphans = services.orphans
        self._channel = channel
        self._wake = services.wake
        self._shutdown = services.shutdown
        self._events = events
        self._task_events = TaskEvents(services.events)
        self._fail = fail
        self._watch: TaskWatch | None = None
        if "hangs" in spec.job.settings:
            from tf_ps_runner.agent.task_watch import TaskWatch

            self._watch = TaskWatch(spec.job, services, self._task_events, self._kill_hung)
        self._ports: PortPool[tuple[Role, int]] = PortPool()
        self._probe = ServerMonitor(self._on_probe_state, self._note_failed_probe)
        self._tasks: dict[TaskKey, TaskProcess] = {}
        self._exits = ExitClassifier(services.relay, events)
        self._reached = -1
        self._turn = asyncio.Lock()
        self._ready: asyncio.Task[None] | None = None
        self._background = Background(self._fail)
        self._step_timer: asyncio.TimerHandle | None = None

    @property
    def here(self) -> tuple[LocalTask, ...]:
        return tuple(task.local for task in self._tasks.values())

    @property
    def statuses(self) -> tuple[TaskStatus, ...]:
        return tuple(task.status for _, task in sorted(self._tasks.items()))

    @property
    def progress(self) -> Mapping[str, Progress]:
        """What the processes of tasks have done, by task; those that have made no step are left out."""
        made = ((str(key), task.progress) for key, task in self._tasks.items() if task.live)
        return {name: progress for name, progress in made if progress is not None}

    @property
    def seen(self) -> Sequence[SeenTask]:
        """The tasks whose processes run, for a report of their steps and their load."""
        return [
            SeenTask(
                role=key.role,
                version=task.assigned.version,
                pid=task.process.pid,
                step=task.step,
                stepped_at=task.stepped_at,
                memory=task.start.memory.usage,
                limit=task.assigned.memory_mib,
            )
            for key, task in sorted(self._tasks.items())
            if task.process is not None and task.process.live and task.start is not None
        ]

    @property
    def processes(self) -> Sequence[tuple[str, int]]:
        """The tasks whose processes run: name and pid."""
        tasks = ((str(key), task.process) for key, task in sorted(self._tasks.items()))
        return [(name, process.pid) for name, process in tasks if process is not None and process.live]

    @property
    def watch_problem(self) -> str:
        """Why tasks that make no progress cannot be found; empty if they can, or are not to be."""
        return "" if self._watch is None else self._watch.problem

    @property
    def outputs(self) -> list[WorkerOutput]:
        """Where the output of the tasks can be read."""
        # Imported only here: a launch does not wait for it.
        from dlrover_run.output.read_back import outputs_of

        started = ((key, task.start) for key, task in sorted(self._tasks.items()) if task.start is not None)
        return [output for key, start in started for output in outputs_of(str(key), start.outputs, start.spec.name)]

    @property
    def stalled(self) -> Mapping[str, str]:
        """The tasks that make no progress, each with a code of the reason."""
        return {} if self._watch is None else self._watch.stalled

    @property
    def live(self) -> bool:
        return any(task.live for task in self._tasks.values())

    @property
    def ends(self) -> Sequence[tuple[TaskEnd, WorkerExit]]:
        """How the last tasks have ended, with the exits of their processes."""
        return self._exits.ends

    @property
    def pids(self) -> set[int]:
        processes = (task.process for task in self._tasks.values())
        return {process.pid for process in processes if process is not None and process.live}

    def prestart(self) -> None:
        """Prepare a template before there is a task: what it imports takes longer than anything else."""
        self._ready = self._ready or self._do(self._starter.prepare([self._start_builder.common]))

    def follow(self, order: NodeOrder, shutting_down: bool) -> None:
        """Take what the order has for the tasks here, and send it to their processes. A node that shuts
        down stops all of its tasks anyway."""
        if self._watch is not None:
            self._watch.follow(order)
        for assigned in order.tasks:
            task = self._tasks.get(assigned.key)
            if task is not None and task.assigned.version == assigned.version and task.assigned.rank == assigned.rank:
                # Its address may be known by now.
                task.assigned = assigned
        for task in self._tasks.values():
            if task.live:
                self._channel.send_order(task.key, task.message(order))
            if (
                order.ending
                and not shutting_down
                and task.live
                and task.serves_chief
                and task.stopping in (None, StopMode.DRAIN)
            ):
                self._task_events.served(task.assigned)
                task.terminate(signal.SIGTERM, self._spec.grace)

    def carry_out(self, action: Action[TaskKey], order: NodeOrder) -> None:
        """Carry out one action; what takes time goes on in the background. Raises OSError if no port is free."""
        if isinstance(action, Reserve):
            self._reserve_port(_assigned(order, action.key))
            return
        task = self._tasks[action.key]
        if isinstance(action, Start):
            self._begin_start(task, order, _assigned(order, action.key))
        elif isinstance(action, WaitForPeers):
            task.later("peers", PEER_TIMEOUT, lambda: self._start_without_peers(task), again=False)
        elif isinstance(action, Release):
            task.close()
            del self._tasks[action.key]
            self._wake()
        elif isinstance(action, Stop):
            if action.mode is StopMode.DRAIN:
                task.drain(self._spec.grace)
                self._channel.send_order(task.key, task.message(order))
            elif action.mode is StopMode.TERMINATE:
                task.terminate(*self._shutdown.stop_with(self._spec.grace))
            else:
                task.kill()

    def forward(self, number: signal.Signals, delivered_at: float | None) -> None:
        for task in self._tasks.values():
            if task.process is not None:
                task.process.forward(number, delivered_at)

    def send(self, number: signal.Signals, delivered_at: float | None = None, only_stopping: bool = False) -> None:
        """Send a signal that ends a task to all running tasks; with `only_stopping`, to those that another signal than
        SIGKILL has asked to end."""
        for task in self._tasks.values():
            if only_stopping and task.stopping is not StopMode.TERMINATE:
                continue
            if task.process is not None:
                task.process.send(number, delivered_at)
            elif task.starting is not None:
                task.starting.cancel()

    async def close(self) -> None:
        """Release ports and stop probing; no task runs any more."""
        await self._background.close()
        if self._step_timer is not None:
            self._step_timer.cancel()
        if self._watch is not None:
            self._watch.close()
        for task in self._tasks.values():
            task.close()
        await self._probe.close()
        self._ports.close()

    def on_event(self, key: TaskKey, event: TaskEvent) -> None:
        task = self._tasks.get(key)
        if task is None:
            return
        before = task.step
        task.on_event(event)
        self._task_events.message(task.assigned, event)
        if isinstance(event, Restored):
            task.reached, self._reached = self._reached, event.step
        if isinstance(event, Note | Restored | Saved):
            self._events.task_message(key, event)
        if isinstance(event, Step) and not ROLES[key.role].outlives_versions:
            self._reached = max(self._reached, event.step)
            if key.role is Role.CHIEF and event.step > before:
                self._await_next_step(task)
            if self._step_timer is None:
                self._step_timer = asyncio.get_running_loop().call_later(STEP_REPORT_INTERVAL, self._report_steps)

    def _report_steps(self) -> None:
        self._step_timer = None
        self._wake()

    def _await_next_step(self, task: TaskProcess) -> None:
        if self._spec.hang_timeout:
            seconds = self._spec.hang_timeout
            task.later("hang", seconds, lambda: self._kill_hung(task, f"has made no step for {seconds:g} s"))

    def _reserve_port(self, assigned: PlannedTask) -> None:
        in_use = {task.port for task in self._tasks.values() if task.live or not task.over}
        port = self._ports.take((assigned.role, assigned.rank), in_use)
        self._tasks[assigned.key] = TaskProcess(assigned, port, self._wake)
        self._wake()

    def _start_without_peers(self, task: TaskProcess) -> None:
        task.waited = True
        self._wake()

    def _begin_start(self, task: TaskProcess, order: NodeOrder, assigned: PlannedTask) -> None:
        task.cancel("peers")
        task.assigned = assigned
        task.servers = servers_of(order, assigned)
        config = tf_config(order, assigned, self._spec.sparse, gaps=task.waited)
        assert config is not None, "only a task that is ready is started"
        variables = {
            **task_variables(order, assigned, config, task_start.master_address(self._spec)),
            **proxy_exceptions(order, assigned, self._start_builder.common),
        }
        # One template for all tasks that start together: it can only learn what the first of them imports after a
        # while.
        self.prestart()
        task.starting = self._do(self._start(task, variables, order))

    async def _start(self, task: TaskProcess, variables: Mapping[str, str], order: NodeOrder) -> None:
        try:
            if self._ready is not None:
                await asyncio.wait([self._ready])
            # One at a time: a process that is being forked is a child of the agent before its pid is known.
            async with self._turn:
                own = {task_start.AGENT: self._channel.address, task_start.TOKEN: self._channel.expect(task.key)}
                start = task.start = self._start_builder.build(task.assigned, {**variables, **own})
                try:
                    with self._orphans.paused():
                        pid = await self._starter.start(start.spec)
                        self._task_events.started(task.assigned, pid)
                        task.run(pid, start.spec, self._on_exit, lambda process: self._fail(StuckProcess(process)))
                        start.memory.place(pid, self._note_failed_memory)
                finally:
                    start.spec.close_stdio()
        except asyncio.CancelledError:
            self._abandon(task)
            raise
        except Exception as error:
            self._abandon(task)
            self._fail(error)
            return
        finally:
            task.starting = None
            if not any(each.starting for each in self._tasks.values()):
                self._ready = None
        if self._watch is not None:
            self._watch.start(task)
        if task.stopping is StopMode.KILL:
            task.kill()
        if ROLES[task.assigned.role].probed:
            self._probe.watch(task.key, task.port)
        self._starter.import_later()
        self._channel.send_order(task.key, task.message(order))
        self._check_memory(task)
        self._wake()

    def _abandon(self, task: TaskProcess) -> None:
        """A start has failed: the task is as if only its port were reserved."""
        self._channel.finish(task.key)
        if task.start is not None:
            task.start.forget_output(self._relay)
        task.close()
        task.start = None
        task.stopping, task.leaving = None, False

    def _check_memory(self, task: TaskProcess) -> None:
        if task.over or task.start is None:
            return
        task.later("memory", MEMORY_CHECK_INTERVAL, lambda: self._check_memory(task))
        try:
            is_near = task.start.memory.near_memory_limit
        except Exception as error:
            self._note_failed_memory(error)
            return
        if is_near and not task.near_memory_limit:
            task.near_memory_limit = True
            self._wake()

    def _on_probe_state(self, key: TaskKey, state: ProbeState) -> None:
        task = self._tasks.get(key)
        if task is None or not task.live:
            return
        if state is ProbeState.READY:
            task.mark_ready()
            self._task_events.works(task.assigned)
        elif state is ProbeState.UNRESPONSIVE:
            self._kill_hung(task, "lives, and does not answer any more")

    def _note_failed_memory(self, error: Exception) -> None:
        self._events.show_internal_error("the memory of a task cannot be read", error)

    def _note_failed_probe(self, error: Exception) -> None:
        self._events.show_internal_error("a parameter server cannot be probed", error)

    def _kill_hung(self, task: TaskProcess, why: str) -> None:
        if task.live and task.stopping is None:
            task.hung = why
            task.kill()

    def _on_exit(self, process: ManagedProcess[ProcessSpec]) -> None:
        self._orphans.reap()
        if self.live:
            self._orphans.kill_session(process.pid)
        task = next(each for each in self._tasks.values() if each.process is process)
        self._task_events.exited(task.assigned, process)
        if self._watch is not None:
            self._watch.end(task)
        self._probe.forget(task.key)
        for name in ("leaving", "hang", "ready", "memory"):
            task.cancel(name)
        self._channel.finish(task.key)
        self._do(self._classify(task, process))

    async def _classify(self, task: TaskProcess, process: ManagedProcess[ProcessSpec]) -> None:
        task.end, end = await self._exits.classify(task, process)
        self._task_events.ended(task.assigned, task.end, end)
        task.close()
        task.over = True
        self._wake()

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        job = self._background.start(work)
        job.add_done_callback(lambda _: self._wake())
        return job


def _assigned(order: NodeOrder, key: TaskKey) -> PlannedTask:
    return next(task for task in order.tasks if task.key == key)
