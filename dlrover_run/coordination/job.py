"""One job as a decision sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dlrover_run.coordination.engine import Engine
from dlrover_run.coordination.observer import Observer
from dlrover_run.coordination.rules import JobRules


class Job(NamedTuple):
    """The rules of a job, the observers that it has, by the names of their features, and its engine with its name."""

    rules: JobRules
    observers: Mapping[str, Observer]
    engine: Engine
    engine_name: str
