"""The specification of a job with parameter servers: a job of dlrover-run and the fields that servers add."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover_run.spec import JobSpec
from tf_ps_runner.cluster.model import Capacity, Role
from tf_ps_runner.cluster.rules import ROLES, ClusterRules

PRELOAD = ("tf_ps_boot", "tensorflow")
"""The modules that the template imports: `tf_ps_boot` comes first, because it hooks the import of TensorFlow."""

LEAVE_GRACE = 10.0
"""Seconds that a worker has to leave after the request, while the others continue. After that it gets SIGTERM, and
after as many again SIGKILL: a worker that is blocked in TensorFlow reacts to nothing else."""


@dataclass(frozen=True)
class PsJobSpec:
    """One job with parameter servers as one node sees it.

    `job` is the entry point, the rendezvous and the limits of the job (`job.rules.parts`); its `start_method` and
    `preload` are those of the tasks. `capacity` is the number of tasks of each role that this node can host. `sparse`
    gives a task only the addresses of itself, the chief and the servers. `hang_timeout` is the time in seconds without
    a new global step that counts as a failure of the chief, 0 for no limit. `grace` is the time in seconds
    that a surplus worker has to leave.
    """

    job: JobSpec
    capacity: tuple[Capacity, ...] = field(default_factory=lambda: whole_job(ClusterRules(max_workers=1)))
    sparse: bool = False
    hang_timeout: float = 0.0
    grace: float = LEAVE_GRACE

    def slots(self, role: Role) -> int:
        """The number of tasks of a role that this node can host."""
        return sum(part.slots for part in self.capacity if part.role is role)


def whole_job(rules: ClusterRules) -> tuple[Capacity, ...]:
    """The capacity of a node that hosts a whole job: the most tasks of each role.

    Slots count the tasks of one version: the servers of the next version run beside them for a while.
    """
    return tuple(Capacity(role, most) for role in ROLES if (most := rules.replicas(role)[1]))
