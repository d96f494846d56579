"""All changes of TensorFlow for scripts that do not know tf-ps-run: where, how, and what is missing without each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tf_ps_runner.worker import (
    checkpoints,
    partitioning,
    sessions,
    shard_state,
    shards,
    stopping,
    strategy,
)
from tf_ps_runner.worker.patching import Patch, after_import, require_attr, wrap
from tf_ps_runner.worker.task import on_leave, task

SCRATCH = "TF_PS_SCRATCH"
"""The variable with a directory that is removed with the job, set by the agent."""


FILES_LEFT = "processes that are killed leave Autograph's files in the directory for temporary files"


def change_loader(module: Any) -> Sequence[Patch]:
    """Write generated code to the directory of the job. For `tensorflow.python.autograph.pyct.loader`.

    Autograph writes a file for each function that it converts. It removes the file only when the interpreter ends in
    order, which a process that is killed does not.
    """
    temporary = require_attr(module, "tempfile")
    require_attr(temporary, "NamedTemporaryFile")
    return [Patch(module, "tempfile", _InScratch(temporary))]


class _InScratch:
    """The module `tempfile`, except for where its files are created."""

    def __init__(self, temporary: Any) -> None:
        self._temporary = temporary

    def __getattr__(self, name: str) -> Any:
        return getattr(self._temporary, name)

    def NamedTemporaryFile(self, *args: Any, **kwargs: Any) -> Any:
        """As in `tempfile`, in the directory of the job while it exists."""
        directory = os.environ.get(SCRATCH)
        if directory and os.path.isdir(directory):
            kwargs.setdefault("dir", directory)
        return self._temporary.NamedTemporaryFile(*args, **kwargs)


def change_estimator(module: Any) -> Sequence[Patch]:
    """Have a worker of Estimator begin at once: it waits at the gate. For `tensorflow_estimator...training`."""
    require_attr(module, "_DELAY_SECS_PER_WORKER")

    def train(original: Any, *args: Any, **kwargs: Any) -> Any:
        if task() is not None:
            module._DELAY_SECS_PER_WORKER = 0
        return original(*args, **kwargs)

    return [wrap(require_attr(module, "_TrainingExecutor"), "_start_distributed_training", train)]


PATCHES = (
    (
        "tensorflow.python.training.server_lib",
        "a worker that comes back at another address cannot join",
        sessions.change_server,
    ),
    (
        "tensorflow.python.training.server_lib",
        "a worker that serves a chief is not said to be ready, and Ctrl-C ends no server",
        sessions.change_join,
    ),
    (
        "tensorflow.python.client.session",
        "sessions know only the addresses that their servers were started with",
        sessions.change_session_cluster,
    ),
    (
        "tensorflow.python.client.session",
        "workers do not wait until the chief has a whole model",
        sessions.change_session,
    ),
    (
        "tensorflow.python.training.session_manager",
        "a chief that is started again goes back to the last checkpoint, and workers wait for 30 seconds",
        sessions.change_session_manager,
    ),
    (
        "tensorflow.python.training.supervisor",
        "a worker with a Supervisor may wait for 30 seconds",
        sessions.change_supervisor,
    ),
    (
        "tensorflow.python.training.monitored_session",
        "nothing is saved before the servers change, and no steps are reported",
        stopping.change_monitored_session,
    ),
    (
        "tensorflow.python.training.saver",
        "no checkpoints are reported",
        checkpoints.change_saver,
    ),
    (
        "tensorflow.python.checkpoint.checkpoint_management",
        "a checkpoint that is not whole may be used",
        checkpoints.change_checkpoint_state,
    ),
    (
        "tensorflow_estimator.python.estimator.training",
        "workers of Estimator begin 5 seconds late",
        change_estimator,
    ),
)


def install() -> None:
    """Apply each change now if TensorFlow is imported already, and else once it is imported.

    The position in the data is stored from here on, too: a script may import its hooks when the model has been restored
    already.
    """
    stopping.on_step(shards.made_step)
    on_leave(shards.before_leaving)
    checkpoints.on_save_begin(shard_state.take)
    checkpoints.on_saved(shard_state.store)
    checkpoints.on_restored(shard_state.restore)
    for module, protection, change in PATCHES:
        after_import(module, protection, change)
    strategy.register()
    partitioning.register()
    after_import("tensorflow.python.autograph.pyct.loader", FILES_LEFT, change_loader)
