"""One job as a decision sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dlrover_run.coordination.observer import Observer
from dlrover_run.coordination.policy import Policy
from dlrover_run.coordination.rules import JobRules


class Job(NamedTuple):
    """The rules of a job, the observers that it has, by the names of their features, and what decides of its nodes."""

    rules: JobRules
    observers: Mapping[str, Observer]
    policy: Policy
