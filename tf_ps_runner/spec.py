"""What the user asked `tf-ps-run` for, validated and frozen: a job of dlrover-run, and what parameter servers add."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover_run.policies.parameter_servers.model import Capacity, Role
from dlrover_run.spec import JobSpec

PRELOAD = ("tf_ps_boot", "tensorflow")
"""What the template imports: first what makes TensorFlow's own hooks behave, for it waits for that import."""

LEAVE_GRACE = 10.0
"""Seconds that a worker has to leave after it was told to, while the others go on. After that it gets SIGTERM, and
after as many again SIGKILL: a worker that is blocked in TensorFlow hears of nothing else."""


@dataclass(frozen=True)
class ServersSpec:
    """One job with parameter servers as one node sees it.

    `job` says what is run, where the nodes meet and what the job may cost (`job.rules.cluster`); its `start_method` and
    `preload` are those of the tasks. `rooms` is how many tasks of each role this node would host. `sparse` gives a task
    only the addresses of itself, of the chief and of the servers. `hang_timeout` is how many seconds the global step
    may stand still before that counts as a failure of the chief, 0 for as long as it likes. `checkpoint_dir` is where
    the person says that the job saves, None where only the script knows. `grace` is how many seconds a worker has to
    leave that is not wanted any more.
    """

    job: JobSpec
    rooms: tuple[Capacity, ...] = field(default_factory=lambda: whole_job(1, 1))
    sparse: bool = False
    hang_timeout: float = 0.0
    checkpoint_dir: str | None = None
    grace: float = LEAVE_GRACE

    def room(self, role: Role) -> int:
        """How many tasks of that role this node would host."""
        return sum(room.slots for room in self.rooms if room.role is role)


def whole_job(ps: int, workers: int, evaluator: int = 0) -> tuple[Capacity, ...]:
    """The capacity of a node that hosts a whole job: the chief, and at most that many of the others. Slots count the
    tasks of one version: the servers of the next one stand beside them for a while."""
    rooms = (
        Capacity(Role.CHIEF, 1),
        Capacity(Role.WORKER, workers),
        Capacity(Role.PS, ps),
        Capacity(Role.EVALUATOR, evaluator),
    )
    return tuple(room for room in rooms if room.slots)
