"""What the checkpoints take that nodes hold in memory, in the families of `/metrics`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dlrover_run.job_status.shown import JOB, Family, Sample
from dlrover_run.job_status.status import JobStatus


def families(statuses: Sequence[JobStatus]) -> Iterable[Family]:
    known = [
        ({JOB: status.job, "node": str(node.node)}, node.memory)
        for status in statuses
        for node in status.nodes
        if node.node is not None and node.memory is not None
    ]

    def each(field: str) -> list[Sample]:
        return [(labels, float(getattr(use, field))) for labels, use in known]

    yield "dlrover_checkpoint_memory_bytes", "gauge", "Bytes of checkpoints in the memory of a node.", each("used")
    yield "dlrover_checkpoint_memory_limit_bytes", "gauge", "The most that they may take.", each("limit")
    yield (
        "dlrover_checkpoint_unwritten_bytes",
        "gauge",
        "Bytes of them that are not on the disk.",
        each("waiting_bytes"),
    )
