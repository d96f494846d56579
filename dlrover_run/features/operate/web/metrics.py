"""The status of jobs in the text format of Prometheus. Pure.

Labels are bounded: the job, a state or a cause out of a fixed set, and the number of a node, a worker or a device.
There is none for the name of a node, whose number grows with each replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

from dlrover_run.features import FEATURES
from dlrover_run.job_status.history import CAUSES
from dlrover_run.job_status.progress import NodeProgress
from dlrover_run.job_status.shown import JOB, Family, Sample
from dlrover_run.job_status.status import JobState, JobStatus, NodeCondition

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class JobFigures(NamedTuple):
    """One job. `rounds` counts its rounds by their cause since the master began."""

    status: JobStatus
    rounds: Mapping[str, int]


def render_metrics(jobs: Sequence[JobFigures], now: float) -> str:
    """All metrics of these jobs; `now` is the Unix time."""
    return "".join(
        f"# HELP {name} {help}\n# TYPE {name} {kind}\n" + "".join(_line(name, *sample) for sample in samples)
        for name, kind, help, samples in (
            *_families(jobs),
            *_progress_families(jobs, now),
            *_families_of_features([job.status for job in jobs]),
        )
    )


def _families(jobs: Sequence[JobFigures]) -> Iterable[Family]:
    statuses = [each.status for each in jobs]

    def each(field: str) -> list[Sample]:
        return [({JOB: status.job}, float(getattr(status, field))) for status in statuses]

    yield (
        "dlrover_job_info",
        "gauge",
        "The program and the version of a job.",
        [({JOB: s.job, "program": s.program, "version": version("dlrover-run")}, 1.0) for s in statuses],
    )
    yield (
        "dlrover_job_state",
        "gauge",
        "1 for the state that a job is in.",
        [({JOB: s.job, "state": state}, float(s.state is state)) for s in statuses for state in JobState],
    )
    yield (
        "dlrover_job_nodes",
        "gauge",
        "Nodes of a job by their state.",
        [({JOB: s.job, "state": c}, float(s.node_counts.get(c, 0))) for s in statuses for c in NodeCondition],
    )
    yield "dlrover_job_min_nodes", "gauge", "The fewest nodes of a round.", each("min_nodes")
    yield "dlrover_job_max_nodes", "gauge", "The most nodes of a round.", each("max_nodes")
    yield "dlrover_job_round_nodes", "gauge", "Nodes of the round that runs.", each("round_nodes")
    yield (
        "dlrover_job_wanted_nodes",
        "gauge",
        "Nodes that a round is wanted to have, also while fewer are here: by --autoscale, by an operator, or the most.",
        [({JOB: s.job}, float(wanted)) for s in statuses if (wanted := wanted_nodes(s)) is not None],
    )
    yield (
        "dlrover_job_wanted_tasks",
        "gauge",
        "Tasks of a role that --autoscale wants a job with parameter servers to have, also while there is no room.",
        [
            ({JOB: s.job, "role": role}, float(number))
            for s in statuses
            if s.size_choice is not None and (servers := s.size_choice.servers) is not None
            for role, number, left_out in (
                ("worker", s.size_choice.wanted_nodes, s.size_choice.paused or not s.size_choice.is_wanted),
                ("ps", servers.wanted, servers.paused or not servers.wanted),
            )
            if not left_out
        ],
    )
    yield "dlrover_job_workers", "gauge", "Workers of the round that runs.", each("workers")
    yield "dlrover_job_round", "gauge", "The number of the last round.", each("round")
    yield "dlrover_restarts_total", "counter", "Failures that were answered with a new round.", each("restarts")
    yield (
        "dlrover_restarts_left",
        "gauge",
        "Restarts that are left.",
        [({JOB: s.job}, float(s.restarts_left)) for s in statuses if s.restarts_left is not None],
    )
    yield (
        "dlrover_rounds_total",
        "counter",
        "Rounds by their cause, since the master began.",
        [
            ({JOB: status.job, "reason": cause}, float(rounds.get(cause, 0)))
            for status, rounds in jobs
            for cause in CAUSES
        ],
    )
    yield (
        "dlrover_job_state_seconds",
        "gauge",
        "Seconds for which a job is in its state.",
        [({JOB: s.job}, s.seconds) for s in statuses if s.seconds is not None],
    )


def wanted_nodes(status: JobStatus) -> int | None:
    """The number of nodes that a round of this job is wanted to have: what `--autoscale` chose, else what an operator
    has asked for, else as many as the job takes. None where `--autoscale` chooses tasks and not nodes."""
    choice = status.size_choice
    if choice is not None and choice.noun != "node":
        return None
    if choice is not None and not choice.paused:
        return choice.wanted_nodes or status.round_nodes
    # N or MIN:MAX.
    return int(status.desired_nodes.rpartition(":")[2]) if status.desired_nodes else status.max_nodes


def _progress_families(jobs: Sequence[JobFigures], now: float) -> Iterable[Family]:
    """What the workers of each node have done, as far as something counts their steps."""
    known = [pair for job in jobs for pair in _progress(job.status)]

    def each(figure: Callable[[NodeProgress], float | None]) -> list[Sample]:
        return [(labels, value) for labels, progress in known if (value := figure(progress)) is not None]

    yield (
        "dlrover_steps_total",
        "counter",
        "Steps of the worker of a node that has made the fewest, in this round.",
        each(lambda done: float(done.steps)),
    )
    yield (
        "dlrover_step_duration_seconds",
        "gauge",
        "Seconds of one step of that worker.",
        each(lambda done: done.step_seconds),
    )
    yield (
        "dlrover_data_wait_ratio",
        "gauge",
        "The share of the last seconds in which a worker of a node waited for data.",
        each(lambda done: done.data_wait),
    )
    yield (
        "dlrover_last_progress_timestamp_seconds",
        "gauge",
        "The Unix time of the last step of any worker of a node.",
        each(lambda done: None if done.idle is None else now - done.idle),
    )
    yield (
        "dlrover_stalled_workers",
        "gauge",
        "Workers of a node that make no progress.",
        each(lambda done: float(len(done.stalled))),
    )


def _families_of_features(statuses: Sequence[JobStatus]) -> Iterable[Family]:
    for feature in FEATURES:
        if feature.metrics:
            yield from import_module(feature.module("metrics")).families(statuses)


def _progress(status: JobStatus) -> list[tuple[Mapping[str, str], NodeProgress]]:
    """The progress of each node by its rank. A job without ranks counts the steps of all of its tasks in one, so that
    of the node with the most is that of the job."""
    if status.max_restarts is None:
        known = [node.progress for node in status.nodes if node.progress is not None]
        return [({JOB: status.job}, max(known, key=lambda done: done.steps))] if known else []
    return [
        ({JOB: status.job, "node": str(node.node)}, node.progress)
        for node in status.nodes
        if node.node is not None and node.progress is not None
    ]


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{pairs}}} {value:.13g}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
