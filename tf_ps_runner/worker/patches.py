"""All changes of TensorFlow for scripts that do not know tf-ps-run, and those that fit nowhere else."""

from __future__ import annotations

import os
import types
from collections.abc import Sequence
from typing import Any

# Importing these modules declares their changes.
from tf_ps_runner.worker import checkpoints, live_model, partitioning, sessions, stopping, strategy  # noqa: F401
from tf_ps_runner.worker.patching import Patch, patch_module, require_attr, wrap
from tf_ps_runner.worker.patching import install as install
from tf_ps_runner.worker.task import task

SCRATCH = "TF_PS_SCRATCH"
"""The variable with a directory that is removed with the job, set by the agent."""


@patch_module(
    "tensorflow.python.autograph.pyct.loader",
    without="killed processes leave Autograph's files in the directory for temporary files",
)
def change_loader(module: Any) -> Sequence[Patch]:
    """Write generated code to the directory of the job.

    Autograph writes a file for each function that it converts. It removes the file only when the interpreter ends in
    order, which a process that is killed does not.
    """
    create = require_attr(module, "tempfile.NamedTemporaryFile")

    def create_in_scratch(*args: Any, **kwargs: Any) -> Any:
        directory = os.environ.get(SCRATCH)
        if directory and os.path.isdir(directory):
            kwargs.setdefault("dir", directory)
        return create(*args, **kwargs)

    changed = types.SimpleNamespace(**{**vars(module.tempfile), "NamedTemporaryFile": create_in_scratch})
    return [Patch(module, "tempfile", changed)]


@patch_module("tensorflow_estimator.python.estimator.training", without="workers of Estimator begin 5 seconds late")
def change_estimator(module: Any) -> Sequence[Patch]:
    """Have a worker of Estimator begin at once, because it waits at the gate."""
    require_attr(module, "_DELAY_SECS_PER_WORKER")

    def train(original: Any, *args: Any, **kwargs: Any) -> Any:
        if task() is not None:
            module._DELAY_SECS_PER_WORKER = 0
        return original(*args, **kwargs)

    return [wrap(require_attr(module, "_TrainingExecutor"), "_start_distributed_training", train)]
