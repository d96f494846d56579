"""What is fixed for a job with parameter servers before it starts: its rules, and the properties of each role."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from dlrover_run.coordination.records.rules import NOT_FINITE, Kind, RulesPart, all_finite
from dlrover_run.words.text import counted, join_words
from tf_ps_runner.cluster.model import MAX_TASKS, NAME, TF_PROGRAM, Cluster, Role, ScaleRequest
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.cluster.reports import NodeTasks

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


class ClusterRules(msgspec.Struct, RulesPart, frozen=True, forbid_unknown_fields=True, tag=NAME):
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

    kind: ClassVar[Kind] = "engine"
    program: ClassVar[str] = TF_PROGRAM
    per_node: ClassVar[frozenset[str]] = frozenset({"evaluator"})
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
        if not all_finite(msgspec.structs.astuple(self)):
            return NOT_FINITE
        if not 1 <= self.min_ps <= self.max_ps:
            return f"a job has at least one parameter server, and MIN may not be above MAX: not {self.ps_range}"
        if not 0 <= self.min_workers <= self.max_workers:
            return f"of the workers MIN may not be above MAX: not {self.min_workers} to {self.max_workers}"
        number = sum(most for _, most in map(self.replicas, ROLES))
        if number > MAX_TASKS:
            flags = join_words([spec.flag for spec in ROLES.values() if spec.flag], "or")
            return f"a job has at most {MAX_TASKS} tasks, and this one may have {number}: reduce {flags}"
        return None

    def job_size(self) -> str:
        """What the job consists of: `1 to 4 parameter servers, a chief and 2 workers`."""
        parts = []
        for role, spec in ROLES.items():
            least, most = self.replicas(role)
            if most:
                is_range = spec.numbered and least < most
                parts.append(f"{least} to {counted(most, spec.noun)}" if is_range else spec.counted(most))
        return join_words(parts)

    @property
    def ps_range(self) -> str:
        return f"{self.min_ps} to {self.max_ps}"

    def replicas(self, role: Role) -> tuple[int, int]:
        return ROLES[role].replicas(self)


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


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """The properties of a role. Decisions, texts, the command line and the agent read them from `ROLES`.

    `noun` names one task of the role in texts.
    `loss` is what the loss of a task means.
    `replicas` is the fewest and the most tasks that a job with these rules has.
    `memory` is the memory limit in MiB with which a task begins, 0 for none.
    `flag` is the flag for the number of tasks, empty for a role whose number cannot be scaled.
    `numbered`: there may be several, so texts give the number and the rank.
    `address_awaited`: the tasks of the version start only once this one has an address.
    `outlives_versions`: it is bound to no set of servers, so its process goes on when the servers change.
    `required`: the job ends when its restarts are used up. Without it the job goes on without the role.
    `purpose` is what such a role is for, as texts name it.
    `ready_after` is the event from which `--ready-timeout` counts for it; None: no timeout.
    `probed`: the agent probes its port to learn that it is ready and still answers. Other tasks report that themselves.
    `ends_with_training`: it ends by itself after the chief has succeeded. A role that does not is stopped last, and
    exit code 0 is a failure of it.
    `starts_while_leaving`: it is replaced also while the workers leave for a planned change.
    """

    noun: str
    loss: Loss
    replicas: Callable[[ClusterRules], tuple[int, int]]
    memory: Callable[[ClusterRules], int] = lambda rules: rules.worker_memory
    flag: str = ""
    numbered: bool = True
    address_awaited: bool = True
    outlives_versions: bool = False
    required: bool = True
    purpose: str = ""
    ready_after: Milestone | None = Milestone.ADDRESSES
    probed: bool = False
    ends_with_training: bool = True
    starts_while_leaving: bool = False

    @property
    def label(self) -> str:
        """All its tasks: `the chief`, `workers`."""
        return f"{self.noun}s" if self.numbered else f"the {self.noun}"

    def counted(self, number: int) -> str:
        """That many tasks: `a chief`, `2 workers`."""
        if self.numbered or number != 1:
            return counted(number, self.noun)
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"

    @property
    def uses_servers(self) -> bool:
        """Whether its tasks train with the servers of their version, and so leave when the servers change."""
        return self.ends_with_training and not self.outlives_versions

    @property
    def leaves_first(self) -> bool:
        """Whether its tasks leave before the chief saves. Asked while a planned change begins and until the chief saves
        (`cluster/reshape`), and when a task ends meanwhile (`cluster/failures`)."""
        return self.uses_servers and not self.starts_while_leaving


ROLES = {
    Role.PS: RoleSpec(
        noun="parameter server",
        loss=Loss.NEW_VERSION,
        replicas=lambda rules: (rules.min_ps, rules.max_ps),
        memory=lambda rules: rules.ps_memory,
        flag="--ps",
        probed=True,
        ends_with_training=False,
    ),
    Role.CHIEF: RoleSpec(
        noun="chief",
        loss=Loss.RESTART_IN_PLACE,
        replicas=lambda rules: (1, 1),
        numbered=False,
        ready_after=Milestone.SERVERS,
        # It saves the model for the next version.
        starts_while_leaving=True,
    ),
    Role.WORKER: RoleSpec(
        noun="worker",
        loss=Loss.RESTART,
        replicas=lambda rules: (rules.min_workers, rules.max_workers),
        flag="--workers",
        ready_after=Milestone.MODEL,
    ),
    Role.EVALUATOR: RoleSpec(
        noun="evaluator",
        loss=Loss.RESTART,
        replicas=lambda rules: (0, rules.evaluator),
        numbered=False,
        address_awaited=False,
        outlives_versions=True,
        required=False,
        purpose="evaluation",
        ready_after=None,
    ),
}
"""One row for each role, in the order in which texts name them. To add a role, see "To add a role" in
docs/architecture.md."""

RECORDS = (ClusterRules, Cluster, NodeTasks, NodeOrder, ScaleRequest)
