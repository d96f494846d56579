"""What is fixed for a job with parameter servers before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from dlrover_run.policies.parameter_servers.model import MAX_TASKS

RESTARTS = 3
"""Restarts that each role has, unless `--max-restarts` says otherwise."""

SAVE_TIMEOUT = 60.0
"""Seconds that a planned change gives the workers to leave and the chief to save. After that it goes on without them,
and what was not saved is lost, as if a server had died."""

READY_TIMEOUT = 300.0
"""Seconds that a new process has to become ready. TensorFlow takes 3 s to import, and on a cold network disk minutes.
After that it is killed, and its end counts as a failure."""

END_GRACE = 30.0
"""Seconds that workers and the evaluator have to end by themselves after the chief has succeeded."""

MEMORY_FACTOR = 2
"""How many times the memory of before a task gets that was killed for it (as DLRover)."""

MEMORY_RESTARTS = 3
"""How often the tasks of a role may be given more memory."""


@dataclass(frozen=True)
class ClusterRules:
    """How many processes of each role a job has, and what they may cost. Memory is in MiB, 0 for no limit; times are
    seconds. The chief is one, and trains too."""

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

    def problem(self) -> str | None:
        """A sentence when no job could have these rules, else None."""
        if not 1 <= self.min_ps <= self.max_ps:
            return f"a job has at least one parameter server, and MIN may not be above MAX: not {self.ps_range}"
        if not 0 <= self.min_workers <= self.max_workers:
            return f"of the workers MIN may not be above MAX: not {self.min_workers} to {self.max_workers}"
        if self.max_ps + self.max_workers + self.evaluator + 1 > MAX_TASKS:
            return f"a job has at most {MAX_TASKS} processes"
        return None

    @property
    def ps_range(self) -> str:
        """The fewest and the most parameter servers, in words."""
        return f"{self.min_ps} to {self.max_ps}"
