"""The tasks of this node as real processes: each step of `reconcile` is carried out here, and what becomes of a task is
found out."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from dlrover_run.agent.starter import Starter
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.output.streams import RunDir
from dlrover_run.policies.parameter_servers.model import NodeOrder, Role, Task, TaskEnd, TaskKey, TaskStatus
from dlrover_run.process_tree.orphans import OrphanKiller
from dlrover_run.supervisor.process import ManagedProcess, ProcessSpec, StuckProcess
from tf_ps_runner.agent import environment
from tf_ps_runner.agent.channel import Channel
from tf_ps_runner.agent.findings import Findings
from tf_ps_runner.agent.hosted import Hosted
from tf_ps_runner.agent.outfits import Outfits
from tf_ps_runner.agent.ports import PortBook
from tf_ps_runner.agent.probe import Probe
from tf_ps_runner.agent.reconcile import (
    Await,
    Dismiss,
    Forget,
    Hold,
    Kill,
    Known,
    Start,
    Step,
    Terminate,
)
from tf_ps_runner.agent.telling import Telling
from tf_ps_runner.agent.vigil import Verdict
from tf_ps_runner.agent.words import Event, Note, Restored, Saved
from tf_ps_runner.agent.words import Step as StepSaid
from tf_ps_runner.spec import ServersSpec
from tf_ps_runner.tf_config import servers_of, task_variables

GAP_PATIENCE = 5.0
"""Seconds that a task waits for the addresses of workers that are being replaced; then it starts without them, for it
may be that they have succeeded and come no more."""

STEP_PAUSE = 2.0
"""Seconds for which steps of the chief are gathered before the others are told: it makes some hundred a second."""

SWOLLEN_LOOK = 1.0
"""Seconds between two looks at how much memory a task with a limit takes: nobody tells us. What comes closer to its
limit within that time is ended for it, as if nobody had looked."""


class Tasks:
    """All tasks of one node. `wake` is called when there is more to say of one, `telling` tells the person.

    `problem` is what keeps this node from going on, for the loop to raise.
    """

    def __init__(
        self,
        spec: ServersSpec,
        run_dir: RunDir,
        relay: RelayClient,
        starter: Starter,
        orphans: OrphanKiller,
        channel: Channel,
        wake: Callable[[], None],
        telling: Telling,
    ) -> None:
        self._spec = spec
        self._outfits = Outfits(spec, run_dir, relay, telling)
        self._relay = relay
        self._starter = starter
        self._orphans = orphans
        self._channel = channel
        self._wake = wake
        self._telling = telling
        self._ports = PortBook()
        self._probe = Probe(self._note_verdict)
        self._hosted: dict[TaskKey, Hosted] = {}
        self._findings = Findings(relay, telling)
        self._reached = -1
        self._turn = asyncio.Lock()
        self._ready: asyncio.Task[None] | None = None
        self._jobs: set[asyncio.Task[None]] = set()
        self._step_timer: asyncio.TimerHandle | None = None
        self.problem: Exception | None = None

    @property
    def known(self) -> tuple[Known, ...]:
        """What the next steps depend on."""
        return tuple(hosted.known for hosted in self._hosted.values())

    @property
    def statuses(self) -> tuple[TaskStatus, ...]:
        """What is to be said of each task."""
        return tuple(hosted.status for _, hosted in sorted(self._hosted.items()))

    @property
    def live(self) -> bool:
        """Whether a process of a task runs."""
        return any(hosted.live for hosted in self._hosted.values())

    @property
    def ends(self) -> Sequence[tuple[TaskEnd, WorkerExit]]:
        """How the last of the tasks have ended whose processes have."""
        return self._findings.ends

    @property
    def pids(self) -> set[int]:
        """The processes of tasks that run."""
        processes = (hosted.process for hosted in self._hosted.values())
        return {process.pid for process in processes if process is not None and process.live}

    def warm(self) -> None:
        """Have a template ready before there is a task: what it imports takes longer than anything else."""
        self._ready = self._ready or self._do(self._starter.prepare([self._outfits.common]))

    def follow(self, order: NodeOrder) -> None:
        """Take what the order says of tasks that are here, and tell it to their processes."""
        for task in order.tasks:
            hosted = self._hosted.get(task.key)
            if hosted is not None and hosted.task.version == task.version and hosted.task.rank == task.rank:
                hosted.take(task)
        for hosted in self._hosted.values():
            if hosted.live:
                self._channel.tell(hosted.key, hosted.message(order))
            if order.ending and hosted.live and hosted.only_serves and not (hosted.dying or hosted.ending):
                hosted.terminate(signal.SIGTERM, self._spec.grace)

    def carry_out(self, step: Step, order: NodeOrder) -> None:
        """Do one step; what takes time goes on by itself. Raises OSError when a port cannot be had."""
        if isinstance(step, Hold):
            self._hold(step.task)
            return
        hosted = self._hosted[step.task.key if isinstance(step, Start) else step.key]
        if isinstance(step, Start):
            self._begin(hosted, order, step)
        elif isinstance(step, Await):
            hosted.later("gaps", GAP_PATIENCE, lambda: self._go_without(hosted), again=False)
        elif isinstance(step, Dismiss):
            hosted.dismiss(self._spec.grace)
            self._channel.tell(hosted.key, hosted.message(order))
        elif isinstance(step, Terminate):
            raise AssertionError("how a task is terminated is the loop's to say")
        elif isinstance(step, Kill):
            hosted.kill()
        elif isinstance(step, Forget):
            hosted.close()
            del self._hosted[step.key]

    def terminate(self, key: TaskKey, number: signal.Signals, grace: float, told_at: float | None) -> None:
        """End a task by this signal, and kill it after that many seconds; `told_at` is as in `ManagedProcess.send`."""
        self._hosted[key].terminate(number, grace, told_at)

    def forward(self, number: signal.Signals, told_at: float | None) -> None:
        """Pass a signal on, after which they go on, to every task that runs."""
        for hosted in self._hosted.values():
            if hosted.process is not None:
                hosted.process.forward(number, told_at)

    def send(self, number: signal.Signals, told_at: float | None = None) -> None:
        """Send a signal that shall end it to every task that runs."""
        for hosted in self._hosted.values():
            if hosted.process is not None:
                hosted.process.send(number, told_at)
            elif hosted.starting is not None:
                hosted.starting.cancel()

    async def close(self) -> None:
        """No task runs any more: let go of ports and of whom we ask."""
        for job in list(self._jobs):
            job.cancel()
        if self._jobs:
            await asyncio.wait(self._jobs)
        if self._step_timer is not None:
            self._step_timer.cancel()
        for hosted in self._hosted.values():
            hosted.close()
        await self._probe.close()
        self._ports.close()

    def hear(self, key: TaskKey, event: Event) -> None:
        """A process has said something."""
        hosted = self._hosted.get(key)
        if hosted is None:
            return
        before = hosted.step
        hosted.hear(event)
        if isinstance(event, Restored):
            hosted.reached, self._reached = self._reached, event.step
        if isinstance(event, Note | Restored | Saved):
            self._telling.said(key, event)
        if isinstance(event, StepSaid) and key.role is not Role.EVALUATOR:
            self._reached = max(self._reached, event.step)
            if key.role is Role.CHIEF and event.step > before:
                self._await_next_step(hosted)
            if self._step_timer is None:
                self._step_timer = asyncio.get_running_loop().call_later(STEP_PAUSE, self._tell_steps)

    def _tell_steps(self) -> None:
        self._step_timer = None
        self._wake()

    def _await_next_step(self, hosted: Hosted) -> None:
        if self._spec.hang_timeout:
            seconds = self._spec.hang_timeout
            hosted.later("hang", seconds, lambda: self._give_up(hosted, f"has made no step for {seconds:g} s"))

    def _hold(self, task: Task) -> None:
        in_use = {hosted.port for hosted in self._hosted.values() if hosted.live or not hosted.over}
        self._hosted[task.key] = Hosted(task, self._ports.take(task.role, task.rank, in_use), self._wake)
        self._wake()

    def _go_without(self, hosted: Hosted) -> None:
        hosted.waited = True
        self._wake()

    def _begin(self, hosted: Hosted, order: NodeOrder, step: Start) -> None:
        hosted.cancel("gaps")
        hosted.take(step.task)
        hosted.servers = servers_of(order, step.task)
        variables = task_variables(order, step.task, step.config, environment.master_address(self._spec))
        # Once for all that start together: what the first of them imports is not learned before it has had the time.
        self.warm()
        hosted.starting = self._do(self._start(hosted, variables, order))

    async def _start(self, hosted: Hosted, variables: Mapping[str, str], order: NodeOrder) -> None:
        try:
            if self._ready is not None:
                await asyncio.wait([self._ready])
            # One after the other: a process that is being forked is our child before anybody knows its number.
            async with self._turn:
                own = {environment.AGENT: self._channel.address, environment.TOKEN: self._channel.expect(hosted.key)}
                start = self._outfits.give(hosted, {**variables, **own})
                with self._orphans.paused():
                    pid = await self._starter.start(start)
                    hosted.run(pid, start, self._note_end, self._tell_stuck)
                    assert hosted.memory is not None, "it was given with the outfit"
                    hosted.memory.place(pid)
        except asyncio.CancelledError:
            self._abandon(hosted)
            raise
        except Exception as error:
            self._abandon(hosted)
            self.problem = self.problem or error
            self._wake()
            return
        finally:
            hosted.starting = None
            if not any(each.starting for each in self._hosted.values()):
                self._ready = None
            if hosted.outputs is not None:
                hosted.outputs.release()
        if hosted.dying:
            hosted.kill()
        if hosted.task.role is Role.PS:
            self._probe.watch(hosted.key, hosted.port)
        self._starter.learn_later()
        self._channel.tell(hosted.key, hosted.message(order))
        if hosted.task.memory:
            self._look_at_memory(hosted)
        self._wake()

    def _abandon(self, hosted: Hosted) -> None:
        """Its start came to nothing, and nobody waits for it: as if it had only been held."""
        self._channel.finish(hosted.key)
        if hosted.outputs is not None:
            hosted.outputs.forget(self._relay)
        hosted.close()
        hosted.dying = hosted.ending = False

    def _look_at_memory(self, hosted: Hosted) -> None:
        if hosted.memory is None:
            return
        near_memory_limit = hosted.memory.swollen
        if near_memory_limit and not hosted.near_memory_limit:
            hosted.near_memory_limit = True
            self._wake()
        hosted.later("memory", SWOLLEN_LOOK, lambda: self._look_at_memory(hosted))

    def _note_verdict(self, key: TaskKey, verdict: Verdict) -> None:
        hosted = self._hosted.get(key)
        if hosted is None or not hosted.live:
            return
        if verdict is Verdict.READY:
            hosted.be_ready()
        elif verdict is Verdict.SILENT:
            self._give_up(hosted, "lives, and does not answer any more")

    def _give_up(self, hosted: Hosted, why: str) -> None:
        if hosted.live and not (hosted.dying or hosted.ending or hosted.leaving):
            hosted.silent = why
            hosted.kill()

    def _tell_stuck(self, process: ManagedProcess[ProcessSpec]) -> None:
        self.problem = self.problem or StuckProcess(process)
        self._wake()

    def _note_end(self, process: ManagedProcess[ProcessSpec]) -> None:
        self._orphans.reap()
        if self.live:
            self._orphans.kill_session(process.pid)
        hosted = next(each for each in self._hosted.values() if each.process is process)
        self._probe.forget(hosted.key)
        for name in ("leaving", "hang", "speechless", "memory"):
            hosted.cancel(name)
        self._channel.finish(hosted.key)
        self._do(self._find_out(hosted, process))

    async def _find_out(self, hosted: Hosted, process: ManagedProcess[ProcessSpec]) -> None:
        """Say how a task has ended, once its last words are known."""
        hosted.end = await self._findings.find_out(hosted, process)
        hosted.close()
        hosted.over = True
        self._wake()

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        job = asyncio.get_running_loop().create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._done)
        return job

    def _done(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        error = None if job.cancelled() else job.exception()
        if isinstance(error, Exception):
            self.problem = self.problem or error
        self._wake()
