"""Helpers for training scripts: checkpoints and samplers that survive restarts and changes of the world size, and
reports of progress.

This package runs inside the workers. Only the samplers and `distributed_checkpoint`, which is imported by its name,
import torch at once; the launcher never imports them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlrover_run.training.checkpoint import Checkpoint, CheckpointDirectory
from dlrover_run.training.reports import mark_checkpoint, report

if TYPE_CHECKING:
    from dlrover_run.training.sampler import ElasticBatchSampler, ElasticDistributedSampler
    from dlrover_run.training.survivor import Survivor

__all__ = [
    "Checkpoint",
    "CheckpointDirectory",
    "ElasticBatchSampler",
    "ElasticDistributedSampler",
    "Survivor",
    "mark_checkpoint",
    "report",
]


def __getattr__(name: str) -> Any:
    if name in ("ElasticBatchSampler", "ElasticDistributedSampler"):
        from dlrover_run.training import sampler

        return getattr(sampler, name)
    if name == "Survivor":
        from dlrover_run.training.survivor import Survivor

        return Survivor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
