"""`--event-log-handler=console`: one JSON line on standard error for each event of the job, shaped as torchrun's
are."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from dlrover_run.agent.host import host_name
from dlrover_run.coordination.model import PlanPhase, RankAssignment
from dlrover_run.spec import JobSpec

_STATE = {PlanPhase.FINISHED: "SUCCEEDED", PlanPhase.FAILED: "FAILED"}


class EventLog:
    """Has events written by `write` when the job asked for them, and nothing else."""

    def __init__(self, spec: JobSpec, write: Callable[[str], None]) -> None:
        self._spec = spec
        self._write = write
        self._started = time.monotonic()
        self._group_rank = spec.node_rank

    def round_started(self, ranks: RankAssignment) -> None:
        """The workers of a round have been started."""
        self._group_rank = ranks.node_rank
        self._emit("RUNNING", ranks.restart_count, "")

    def job_ended(self, phase: PlanPhase, restarts: int, reason: str) -> None:
        """The job is over for this node; one that a signal stopped counts as failed, as with torchrun."""
        self._emit(_STATE.get(phase, "FAILED"), restarts, reason)

    def _emit(self, state: str, restarts: int, reason: str) -> None:
        if self._spec.event_log != "console":
            return
        event = {
            "name": f"torchelastic.worker.status.{state}",
            "source": "AGENT",
            "timestamp": int(time.time() * 1000),
            "metadata": {
                "run_id": self._spec.run_id,
                "global_rank": None,
                "group_rank": self._group_rank,
                "worker_id": None,
                "role": self._spec.role,
                "hostname": host_name(),
                "state": state,
                "total_run_time": int(time.monotonic() - self._started),
                "rdzv_backend": self._spec.backend,
                "raw_error": reason if state == "FAILED" else None,
                "agent_restarts": restarts,
            },
        }
        self._write(json.dumps(event) + "\n")
