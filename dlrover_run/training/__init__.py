"""Helpers for training scripts: checkpoints and samplers that survive restarts and changes of the world size.

This package runs inside the workers and imports torch; the launcher never imports it.
"""

from __future__ import annotations

from dlrover_run.training.checkpoint import Checkpoint, CheckpointDirectory
from dlrover_run.training.sampler import ElasticBatchSampler, ElasticDistributedSampler

__all__ = ["Checkpoint", "CheckpointDirectory", "ElasticBatchSampler", "ElasticDistributedSampler"]
