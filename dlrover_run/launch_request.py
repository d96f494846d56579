"""What whoever starts a launcher in a process of its own hands to it."""

from __future__ import annotations

from dataclasses import dataclass

from dlrover_run.spec import JobSpec


@dataclass(frozen=True)
class LaunchRequest:
    """A job, as `python -m dlrover_run.launch` reads it.

    `lifeline` is a descriptor that reads as ended when whoever wants the job is gone, `verdict` one that takes the
    Verdict as JSON.
    """

    spec: JobSpec
    lifeline: int
    verdict: int
