"""What all families of metrics share."""

from __future__ import annotations

from collections.abc import Mapping

JOB = "dlrover_job"
"""The label with the name of a job. Not `job`: Prometheus sets that label of a target, and renames ours, so that rules
by it would mix all jobs. OpenTelemetry's attribute `dlrover.job` has this name in Prometheus, too."""

Sample = tuple[Mapping[str, str], float]
"""Labels, and a value."""

Family = tuple[str, str, str, list[Sample]]
"""The name of a metric, its kind, its help, and its samples."""
