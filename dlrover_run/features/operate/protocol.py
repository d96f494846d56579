"""What an operator's program requests from an agent on its own machine: one line of JSON each way.

`agent_socket` answers.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.activity import MemoryUse
from dlrover_run.coordination.records.requests import OperatorRequest
from dlrover_run.coordination.records.resource_use import NodeUse
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.job_status.stacks import JobStacks
from dlrover_run.job_status.status import JobStatus

MAX_REPLY = 4 * 1024 * 1024
"""The longest line that an operator's program reads: more than a status of `status.MAX_SHOWN` nodes."""

MAX_TASKS = 1024
"""Tasks of which an agent reports the progress."""


class AgentRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request for the AgentInfo, with `progress` also for what the tasks have done, and with `status` for the status
    of the job, after the operator's `request` was carried out. `stacks` asks for the stacks of the job's workers,
    `events` for the last events of the agent, and `ending` for the answer at the end of the job."""

    status: bool = False
    progress: bool = False
    request: OperatorRequest | None = None
    stacks: StackQuery | None = None
    events: bool = False
    ending: bool = False

    @property
    def waits(self) -> bool:
        """Whether the answer takes the time of others: of the coordinator, or of the job."""
        return self.status or self.request is not None or self.stacks is not None or self.ending


MAX_SCRIPT = 500
"""Characters of a script with its arguments."""


class AgentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One agent. `launcher` is the pid of the command that started the job here, `script` what its workers run, and
    `seconds` the age of the agent. `endpoint` is that of its master, or what was given for a job of one node, which has
    none. `log` is its event log, empty if it keeps none, or if events could not be written. `uid` is its user,
    `pid_here` its pid and `launcher_here` that of the launcher as they are where the question comes from, which may be
    another namespace; 0 for a process that cannot be seen there. What the agent sends for these three is ignored."""

    job: str
    program: str
    backend: str
    host: str
    node_id: str
    pid: int
    launcher: int = 0
    script: str = ""
    seconds: float = 0.0
    endpoint: str = ""
    log: str = ""
    uid: int = -1
    pid_here: int = 0
    launcher_here: int = 0

    @property
    def pids_here(self) -> tuple[int, ...]:
        """The pids by which a user means this job, that of the launcher first."""
        return tuple(filter(None, (self.launcher_here, self.pid_here)))


class TaskProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What a task has done since its start: its steps, the seconds since the last one, and the seconds of one
    step, None as long as too few requests have shown them."""

    name: str
    steps: int
    idle: float
    period: float | None = None


class JobEnding(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the job on one node: the exit code of its launcher, why, and the seconds since the agent began."""

    exit_code: int
    reason: str
    seconds: float


class AgentReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of an agent. `problem` is a clause if it has not got what was requested; with `no_job`, the
    coordinator does not know the job, or does not answer. A task that has reported no step is left out. `memory` is
    what checkpoints take in memory on this node, `use` what its tasks use, and `events` are lines of a log: the events
    that the agent keeps in memory."""

    agent: AgentInfo
    tasks: tuple[TaskProgress, ...] = ()
    memory: MemoryUse | None = None
    use: NodeUse | None = None
    status: JobStatus | None = None
    stacks: JobStacks | None = None
    events: tuple[msgspec.Raw, ...] = ()
    ending: JobEnding | None = None
    problem: Annotated[str, Meta(max_length=4000)] = ""
    no_job: bool = False
