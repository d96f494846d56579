"""What is fixed for a job with parameter servers before it starts: its rules, and the properties of each role."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from dlrover_run.coordination.policy_records import PolicyRules
from dlrover_run.coordination.rules import NOT_FINITE, all_finite
from dlrover_run.coordination.text import counted
from dlrover_run.policies.parameter_servers.model import MAX_TASKS, NAME, TF_PROGRAM, Cluster, Role
from dlrover_run.policies.parameter_servers.orders import NodeOrder
from dlrover_run.policies.parameter_servers.reports import NodeTasks

RESTARTS = 3
"""Restarts that each role has, unless `--max-restarts` is given."""

SAVE_TIMEOUT = 60.0
"""Seconds that a planned change gives the workers to leave and the chief to save. After that the change continues
without them, and unsaved steps are lost, as if a server had died."""

READY_TIMEOUT = 300.0
"""Seconds that a new process has to become ready. Importing TensorFlow takes 3 s, and minutes from a cold network disk.
After that the process is killed, and its end counts as a failure."""

END_GRACE = 30.0
"""Seconds that workers and the evaluator have to end by themselves after the chief has succeeded."""

MEMORY_FACTOR = 2
"""The factor by which the memory limit of a task grows after it was killed for its memory (as in DLRover)."""

MEMORY_RESTARTS = 3
"""How often the tasks of a role may be given more memory."""


class ClusterRules(msgspec.Struct, PolicyRules, frozen=True, forbid_unknown_fields=True, tag=NAME):
    """How many processes of each role a job has, and what they may cost. Memory is in MiB, 0 for no limit; times are in
    seconds. There is one chief, which trains too."""

    min_ps: int = 1
    max_ps: int = 1
    min_workers: int = 0
    max_workers: int = 0
    evaluator: int = 0
    max_restarts: int = RESTARTS
    memory_restarts: int = MEMORY_RESTARTS
    worker_memory: int = 0
    ps_memory: int = 0
    max_memory: int = 0
    save_timeout: float = SAVE_TIMEOUT
    ready_timeout: float = READY_TIMEOUT
    end_grace: float = END_GRACE

    has_rounds: ClassVar[bool] = False
    program: ClassVar[str] = TF_PROGRAM
    flags: ClassVar[Mapping[str, str]] = {
        "min_ps": "--ps (least)",
        "max_ps": "--ps (most)",
        "min_workers": "--workers (least)",
        "max_workers": "--workers (most)",
        "evaluator": "--evaluator",
        "max_restarts": "--max-restarts",
        "worker_memory": "--worker-memory (MiB)",
        "ps_memory": "--ps-memory (MiB)",
        "max_memory": "--max-memory (MiB)",
    }

    def problem(self) -> str | None:
        """A sentence when no job can have these rules, else None."""
        if not all_finite(msgspec.structs.astuple(self)):
            return NOT_FINITE
        if not 1 <= self.min_ps <= self.max_ps:
            return f"a job has at least one parameter server, and MIN may not be above MAX: not {self.ps_range}"
        if not 0 <= self.min_workers <= self.max_workers:
            return f"of the workers MIN may not be above MAX: not {self.min_workers} to {self.max_workers}"
        if self.max_ps + self.max_workers + self.evaluator + 1 > MAX_TASKS:
            return f"a job has at most {MAX_TASKS} processes"
        return None

    def job_size(self) -> str:
        """What the job consists of: `1 to 4 parameter servers, a chief and 2 workers`."""

        def between(least: int, most: int, noun: str) -> str:
            return counted(most, noun) if least == most else f"{least} to {counted(most, noun)}"

        parts = [between(self.min_ps, self.max_ps, "parameter server"), "a chief"]
        parts += [between(self.min_workers, self.max_workers, "worker")] if self.max_workers else []
        parts += ["an evaluator"] if self.evaluator else []
        return f"{', '.join(parts[:-1])} and {parts[-1]}"

    @property
    def ps_range(self) -> str:
        """The minimum and maximum of parameter servers, as text."""
        return f"{self.min_ps} to {self.max_ps}"

    def replicas(self, role: Role) -> tuple[int, int]:
        """The fewest and the most tasks of a role."""
        numbers = {
            Role.PS: (self.min_ps, self.max_ps),
            Role.CHIEF: (1, 1),
            Role.EVALUATOR: (0, self.evaluator),
            Role.WORKER: (self.min_workers, self.max_workers),
        }
        return numbers[role]

    def memory_of(self, role: Role) -> int:
        """The memory limit with which tasks of that role begin."""
        return self.ps_memory if role is Role.PS else self.worker_memory


class Loss(enum.Enum):
    """What the loss of a task means for the others."""

    NEW_VERSION = "new version"
    """A part of the model is lost: all processes of the version start again."""
    RESTART = "restart"
    """Only the task itself starts again, on any node."""
    RESTART_IN_PLACE = "restart in place"
    """It starts again alone on its node. On another node it needs a new version once the servers have answered: the
    data queues are on its node, and are lost with it, and a live model would go on with none of the data used."""


class Milestone(enum.Enum):
    """What a task waits for before its time to become ready begins."""

    ADDRESSES = "addresses"
    SERVERS = "servers"
    MODEL = "model"


@dataclass(frozen=True)
class RoleSpec:
    """The properties of a role. The decisions read them from `ROLES`.

    `label` names its tasks where the text is about their restarts. `loss` is what the loss of a task means. With
    `listed` the others know its address, so they start only once it has one. With `outlives_versions` it reads
    checkpoints only, and goes on when the servers change. With `required` the job ends when its restarts are used up,
    or when there is no slot for its minimum. `ready_after` is when its time to become ready begins; None for no limit.
    With `ends_itself` it has a grace to end after the chief has succeeded; a server never ends by itself, and is
    stopped last. With `saves` it saves the model, so it also starts while the workers leave. With `numbered` there may
    be several, so texts give the rank.
    """

    label: str
    loss: Loss
    listed: bool = True
    outlives_versions: bool = False
    required: bool = True
    ready_after: Milestone | None = Milestone.ADDRESSES
    ends_itself: bool = True
    saves: bool = False
    numbered: bool = True


ROLES = {
    Role.PS: RoleSpec("parameter servers", Loss.NEW_VERSION, ends_itself=False),
    Role.CHIEF: RoleSpec("the chief", Loss.RESTART_IN_PLACE, ready_after=Milestone.SERVERS, saves=True, numbered=False),
    Role.EVALUATOR: RoleSpec(
        "the evaluator",
        Loss.RESTART,
        listed=False,
        outlives_versions=True,
        required=False,
        ready_after=None,
        numbered=False,
    ),
    Role.WORKER: RoleSpec("workers", Loss.RESTART, ready_after=Milestone.MODEL),
}

RECORDS = (ClusterRules, Cluster, NodeTasks, NodeOrder)
