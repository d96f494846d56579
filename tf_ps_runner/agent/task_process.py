"""One task on this node, from the port that is reserved for it to how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable

from dlrover_run.agent.reconcile import StopMode
from dlrover_run.observe.page import Phase, Progress, StepSource
from dlrover_run.processes.process import ManagedProcess, ProcessSpec
from tf_ps_runner.agent.desired import LocalTask
from tf_ps_runner.agent.protocol import Note, OrderMessage, ProcessHello, Ready, Restored, Saved, Step, TaskEvent
from tf_ps_runner.agent.task_start import TaskStart
from tf_ps_runner.cluster.model import (
    PlannedTask,
    Role,
    ServerBounds,
    TaskEnd,
    TaskKey,
    TaskStage,
    TaskStatus,
)
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.cluster.rules import ROLES

ASSUME_READY_AFTER = 30.0
"""Seconds after which a running task that has not reported its progress counts as ready. A script that creates no
session of TensorFlow's usual kind reports nothing, and does not wait at the gate either."""


class TaskProcess:
    """A task that has a reserved port here, runs, or has run. `on_change` is called when its status has changed."""

    def __init__(self, assigned: PlannedTask, port: int, on_change: Callable[[], None]) -> None:
        self.assigned = assigned
        self.port = port
        self.step = self.saved = self.restored = self.reached = -1
        self.ready = self.near_memory_limit = self.begun = False
        self.server_bounds: ServerBounds | None = None
        self.servers: tuple[str, ...] = ()
        self.starting: asyncio.Task[None] | None = None
        self.process: ManagedProcess[ProcessSpec] | None = None
        self.start: TaskStart | None = None
        self.hung: str | None = None
        self.end: TaskEnd | None = None
        self.started_at = 0.0
        self.stopping: StopMode | None = None
        self.leaving = self.waited = self.over = False
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._stepped_at: int | None = None

    @property
    def key(self) -> TaskKey:
        return self.assigned.key

    @property
    def live(self) -> bool:
        """Whether its process runs or is being started, or its end is not classified yet."""
        return not self.over and (self.starting is not None or self.process is not None)

    @property
    def stage(self) -> TaskStage:
        if self.over:
            return TaskStage.ENDED
        if self.process is None:
            return TaskStage.HELD
        return TaskStage.READY if self.ready else TaskStage.STARTED

    @property
    def serves_chief(self) -> bool:
        """Whether it is a worker that makes no steps of its own: a server for the chief of a `ParameterServerStrategy`,
        which does not end by itself."""
        return self.assigned.role is Role.WORKER and self.begun and self.step < 0

    @property
    def past_beginning(self) -> bool:
        """Whether it has made a step. A task that reports no steps, such as an evaluator or a script without
        TensorFlow's usual sessions, counts as having made one."""
        silent = ROLES[self.assigned.role].outlives_versions or (self.ready and not self.begun and self.restored < 0)
        return silent or self.step > self.restored

    @property
    def stepped_at(self) -> int | None:
        """When it reported its last step, as `time.monotonic_ns`; None before the first."""
        return self._stepped_at

    @property
    def progress(self) -> Progress | None:
        """The steps that it has made since it began with its model, as a torch worker's page has them; None if it has
        made none. A step of TensorFlow's is the global one, so each worker's count has the steps of all."""
        if self._stepped_at is None:
            return None
        steps = max(0, self.step - max(0, self.restored))
        return Progress(steps, 0, 0.0, self._stepped_at, StepSource.TASK, Phase.TRAINING)

    @property
    def _waits_for_model(self) -> bool:
        return self.assigned.role is Role.CHIEF and self.process is not None and not self.ready

    @property
    def local(self) -> LocalTask:
        return LocalTask(
            key=self.key,
            rank=self.assigned.rank,
            version=self.assigned.version,
            servers=self.servers,
            live=self.live,
            ended=self.over,
            stopping=self.stopping,
            waited=self.waited,
        )

    @property
    def status(self) -> TaskStatus:
        return TaskStatus(
            key=self.key,
            stage=self.stage,
            port=self.port,
            step=self.step,
            saved=self.saved,
            restored=self.restored,
            reached=self.reached,
            near_memory_limit=self.near_memory_limit,
            server_bounds=self.server_bounds,
            end=self.end,
        )

    def message(self, order: NodeOrder) -> OrderMessage:
        """The order for its process: the part that concerns its role and itself."""
        role = self.assigned.role
        same = self.assigned.version == order.version
        return OrderMessage(
            version=order.version,
            open=order.open,
            # The chief gets it too: a chief whose workers serve it leaves first, because those do not leave by
            # themselves.
            pause=(order.pause and same and ROLES[role].uses_servers) or self.leaving,
            save=order.save and same and role is Role.CHIEF,
            ending=order.ending,
        )

    def run(
        self,
        pid: int,
        spec: ProcessSpec,
        on_end: Callable[[ManagedProcess[ProcessSpec]], None],
        on_stuck: Callable[[ManagedProcess[ProcessSpec]], None],
    ) -> None:
        self.process = ManagedProcess(pid, spec, on_end, on_stuck)
        self.started_at = time.monotonic()
        if not ROLES[self.assigned.role].probed:
            self.later("ready", ASSUME_READY_AFTER, self.mark_ready)

    def mark_ready(self) -> None:
        """It has reported that it is ready, or never will."""
        self.cancel("ready")
        if not self.ready:
            self.ready = True
            self._on_change()

    def on_event(self, event: TaskEvent) -> None:
        if isinstance(event, Ready):
            self.begun = True
            if not ROLES[self.assigned.role].probed:
                self.mark_ready()
        elif isinstance(event, Note):
            if event.server_bounds is not None:
                self.server_bounds = event.server_bounds
                self._on_change()
        elif isinstance(event, Restored):
            self.restored = self.step = event.step
            self.mark_ready()
            self._on_change()
        elif isinstance(event, Step):
            if event.step > self.step:
                self._stepped_at = time.monotonic_ns()
            self.step = event.step
            if not ROLES[self.assigned.role].probed:
                self.mark_ready()
        elif isinstance(event, Saved):
            self.saved = max(self.saved, event.step)
            self._on_change()
        elif isinstance(event, ProcessHello) and self._waits_for_model:
            # A chief that restores a large model gets the whole time from here on.
            self.later("ready", ASSUME_READY_AFTER, self.mark_ready)

    def later(self, name: str, seconds: float, what: Callable[[], None], again: bool = True) -> None:
        """Call `what` in some seconds. A call that waits under the same name is replaced, or kept if not `again`."""
        if name in self._timers and not again:
            return
        self.cancel(name)
        self._timers[name] = self._loop.call_later(seconds, what)

    def cancel(self, name: str) -> None:
        """Cancel the call that waits under this name, if any."""
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def kill(self) -> None:
        """Kill it, also while it is being started."""
        self.stopping = StopMode.KILL
        if self.process is not None:
            self.process.send(signal.SIGKILL)
        elif self.starting is not None:
            self.starting.cancel()

    def terminate(self, number: signal.Signals, grace: float, delivered_at: float | None = None) -> None:
        """End it by a signal, and kill it after `grace` seconds; `delivered_at` is as in `ManagedProcess.send`."""
        self.stopping = max(StopMode.TERMINATE, self.stopping or StopMode.TERMINATE)
        if self.process is not None:
            self.process.stop(number, grace, delivered_at)
        elif self.starting is not None:
            self.starting.cancel()

    def drain(self, grace: float) -> None:
        """Give it `grace` seconds to leave as its order asks, and as many again after a SIGTERM."""
        self.leaving, self.stopping = True, self.stopping or StopMode.DRAIN
        if self.process is None:
            self.kill()
        else:
            self.later("leaving", grace, lambda: self.terminate(signal.SIGTERM, grace))

    def close(self) -> None:
        """Its process has ended: cancel what waits and release its memory limit."""
        for name in list(self._timers):
            self.cancel(name)
        if self.start is not None:
            with contextlib.suppress(OSError):
                self.start.memory.close()
