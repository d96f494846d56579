"""Helpers for training scripts: checkpoints and samplers that survive restarts and changes of the world size, and
reports of progress.

This package runs inside the workers and imports torch; the launcher never imports it.
"""

from __future__ import annotations

from dlrover_run.training.checkpoint import Checkpoint, CheckpointDirectory
from dlrover_run.training.checkpoint_marks import mark_checkpoint
from dlrover_run.training.sampler import ElasticBatchSampler, ElasticDistributedSampler
from dlrover_run.training.steps import report

__all__ = [
    "Checkpoint",
    "CheckpointDirectory",
    "ElasticBatchSampler",
    "ElasticDistributedSampler",
    "mark_checkpoint",
    "report",
]
