"""The stragglers of jobs, in the families of `/metrics`. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from dlrover_run.features.hangs.stragglers.finding import CAUSES
from dlrover_run.job_status.shown import JOB, Family
from dlrover_run.job_status.status import JobStatus


def families(statuses: Sequence[JobStatus]) -> Iterable[Family]:
    counts = [
        (status.job, Counter(each.cause for node in status.nodes for each in node.stragglers)) for status in statuses
    ]
    yield (
        "dlrover_stragglers",
        "gauge",
        "Workers for which the others wait in each step, by what they do meanwhile.",
        [({JOB: job, "cause": cause}, float(found[cause])) for job, found in counts for cause in CAUSES],
    )
