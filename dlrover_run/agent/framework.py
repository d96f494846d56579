"""The seam between the agent and a framework: what the agent does for all, and what an adapter does for its own tasks.

A task is a process with a role: the workers of a torch round, or what the adapter of another framework starts. The
adapter holds all that its framework determines: environment, readiness, exit classification.
"""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from dlrover_run.agent.node_state import NodeState
from dlrover_run.agent.reconcile import Action, DesiredTask, Key, TaskState
from dlrover_run.agent.result import JobResult, TaskResults
from dlrover_run.agent.shutdown import ShutdownRequest
from dlrover_run.console.console import Console
from dlrover_run.coordination.records.activity import NodeActivity
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.events.stream import EventStream
from dlrover_run.observe.page import Progress
from dlrover_run.observe.tick import Activities, Tick
from dlrover_run.output.relay_client import RelayClient
from dlrover_run.output.run_directory import RunDir
from dlrover_run.processes.orphans import OrphanKiller
from dlrover_run.spec import JobSpec

if TYPE_CHECKING:
    from dlrover_run.coordination.records.requests import OperatorRequest
    from dlrover_run.job_status.questions import StackQuery
    from dlrover_run.job_status.stacks import JobStacks, NodeStacks
    from dlrover_run.job_status.status import JobStatus
    from dlrover_run.output.read_back import WorkerOutput
    from dlrover_run.workers.starter import Starter

Result = TypeVar("Result")
Feature = TypeVar("Feature")


class StartWork(Protocol):
    """Has work go on in the background of the agent's loop. An exception of it ends the node; at the end of the loop
    it is waited for."""

    def __call__(self, work: Coroutine[Any, Any, Result], /) -> asyncio.Task[Result]: ...


class FeaturesOf(Protocol):
    """The features of this node that are of a class, as far as they have begun."""

    def __call__(self, kind: type[Feature], /) -> list[Feature]: ...


class AgentServices(msgspec.Struct, frozen=True):
    """What an adapter gets from its agent. `wake` makes the agent's loop look at everything again, `start` begins work
    in the background, once the loop runs, and `tick` gives samples of the tasks while they run. `ask` returns the
    status of the job after a request, `ask_stacks` what its workers do or wrote, both from the coordinator, and
    `read_activity` what this node does now, None if that cannot be read: an operator waits for their answers. After
    `end_logs` no line of a worker follows: a reader of them gets what is left, and no read waits."""

    job: JobSpec
    run_dir: RunDir
    relay: RelayClient
    console: Console
    orphans: OrphanKiller
    node_state: NodeState
    shutdown: ShutdownRequest
    wake: Callable[[], None]
    start: StartWork
    features_of: FeaturesOf
    tick: Tick
    events: EventStream
    ask: Callable[[OperatorRequest | None], Awaitable[JobStatus]]
    ask_stacks: Callable[[StackQuery], Awaitable[JobStacks]]
    read_activity: Callable[[], Awaitable[NodeActivity | None]]
    end_logs: Callable[[], Awaitable[None]]


class Tasks(ABC, Generic[Key]):
    """The tasks of this node, as a turn of the agent's loop sees them. No method waits."""

    @property
    @abstractmethod
    def pids(self) -> set[int]:
        """Its child processes: tasks, and processes that help to start them."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether a process of a task runs."""

    @abstractmethod
    def desired(self) -> Sequence[DesiredTask[Key]]:
        """The tasks that the assignment names."""

    @abstractmethod
    def states(self) -> Sequence[TaskState[Key]]:
        """The tasks that are here."""

    @property
    def idle(self) -> bool:
        """Whether no task is live."""
        return not any(state.live for state in self.states())

    @abstractmethod
    def carry_out(self, action: Action[Key]) -> None:
        """Carry out an action, or begin to. Raises SpecError or OSError."""

    @abstractmethod
    def report(self, leaving: bool) -> NodeReport:
        """The report of this node and its tasks."""


class Lifetime(ABC):
    """From the first assignment to the end of the tasks. No method but `open`, `kill`, `finish` and `close` waits: what
    takes time goes on in the background (`AgentServices.start`), and wakes the loop when it is done."""

    @abstractmethod
    async def open(self) -> None:
        """Begin. Raises SpecError or OSError."""

    @abstractmethod
    def accept(self, assignment: Assignment, shutting_down: bool) -> None:
        """Take the latest assignment; the same one may come again. `shutting_down` means that the job is over for
        this node, or that the node has to leave. Raises SpecError."""

    @abstractmethod
    def send(self, number: signal.Signals, delivered_at: float | None = None, only_stopping: bool = False) -> None:
        """Send a signal that ends it to each task, now; with `only_stopping`, to those that are being stopped already.
        `delivered_at` is as in `ManagedProcess.send`."""

    @abstractmethod
    def forward(self, number: signal.Signals, delivered_at: float | None) -> None:
        """Pass on a signal that does not end the tasks."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill all tasks, after an error."""

    @abstractmethod
    def leave_report(self, error: Exception | None) -> NodeReport | None:
        """The report that this node has left, `error` being the reason if any; None if the last report stands."""

    @abstractmethod
    async def finish(self, assignment: Assignment) -> TaskResults:
        """Collect the results, once no task runs and all output has been printed. `assignment` is the last one."""

    @abstractmethod
    async def close(self, assignment: Assignment, result: JobResult) -> None:
        """End all processes that help to start tasks."""


class FrameworkAdapter(Tasks[Key], Lifetime):
    """All that the agent knows of a framework: its tasks, their lifetime, and what is asked about them. No method of
    its own but `stacks` waits.

    `noun` names the tasks in messages, and `starter` starts their processes. While tasks are `migrating` to other
    nodes, the assignment counts although this node leaves.
    """

    noun: str
    starter: Starter
    migrating = False

    @abstractmethod
    def progress(self) -> Mapping[str, Progress]:
        """What the running tasks of this node have done, by name; those that have reported no step are left out. It
        reads memory, and may be called at any time."""

    def stalled(self) -> Mapping[str, str]:
        """The running tasks that make no progress by name, each with a code of the reason."""
        return {}

    @property
    def ended(self) -> Sequence[str]:
        """The tasks that have ended with success while others of their round run, by name."""
        return ()

    @abstractmethod
    async def stacks(self, rank: int | None) -> NodeStacks:
        """The stacks of the running tasks of this node, or of the one with that rank."""

    def outputs(self) -> Sequence[WorkerOutput]:
        """Where the output of the tasks of this node can be read."""
        return ()

    def add_to_activity(self, activity: NodeActivity) -> NodeActivity:
        """What this node does, for people, with what its tasks know of it."""
        return activity

    def log_progress(self, sample: Activities | None = None) -> None:
        """Write to the event log what the running tasks have done, as far as no message of theirs has. Without a
        `sample` their round is over, and they are read for the last time."""

    def begin_move(self, number: signal.Signals) -> str | None:
        """This node has got a signal to leave. If its tasks can continue on other nodes, begin to move them there, and
        return a clause that says so."""
        return None

    def stop_waiting(self) -> None:
        """Cancel what is slow and serves only a user or a start."""


AdapterFactory = Callable[[AgentServices], FrameworkAdapter[Any]]
