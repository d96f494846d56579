"""What features add to the tables and to the metrics of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dlrover_run.job_status.status import JobStatus, NodeStatus

JOB = "dlrover_job"
"""The label with the name of a job. Not `job`: Prometheus sets that label of a target, and renames ours, so that rules
by it would mix all jobs. OpenTelemetry's attribute `dlrover.job` has this name in Prometheus, too."""

Sample = tuple[Mapping[str, str], float]
"""Labels, and a value."""

Family = tuple[str, str, str, list[Sample]]
"""The name of a metric, its kind, its help, and its samples."""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A head and rows."""


class Columns(NamedTuple):
    """What a feature adds to the tables of a job. `head` are its columns of the table of nodes, and `cells` the figures
    of a node there, None if none is known: without any figure the columns are left out. `table` is one of its own."""

    head: tuple[str, ...]
    cells: Callable[[NodeStatus], tuple[str, ...] | None]
    table: Callable[[JobStatus], Table | None] = lambda status: None
