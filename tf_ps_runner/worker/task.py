"""Which task of the cluster this process is, by its own `TF_CONFIG`."""

from __future__ import annotations

import dataclasses
import json
import os

from tf_ps_runner.worker.channel import channel

GATE = "TF_PS_GATE"

CHIEFS = ("chief", "master")
"""The names that TensorFlow has for the task that makes the model and saves it."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A role with an index in the cluster. `gated` says that a worker waits until the chief has a whole model."""

    role: str
    index: int
    gated: bool

    @property
    def chief(self) -> bool:
        """Whether it makes the model, and saves it."""
        return self.role in CHIEFS

    @property
    def worker(self) -> bool:
        """Whether it trains a model that the chief has made."""
        return self.role == "worker"


def task() -> Task | None:
    """The task that this process is; None where no agent looks after it, or no `TF_CONFIG` says it."""
    if not channel().active:
        return None
    try:
        stated = json.loads(os.environ.get("TF_CONFIG", ""))["task"]
        return Task(str(stated["type"]), int(stated["index"]), os.environ.get(GATE) == "1")
    except (ValueError, TypeError, KeyError):
        return None
