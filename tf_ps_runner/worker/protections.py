"""All that is changed in TensorFlow for scripts that know nothing of us: where, how, and what is lacking without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_ps_runner.worker import (
    generated_code,
    leaving,
    partitioning,
    saving,
    servers,
    sessions,
    shard_state,
    shards,
    stopping,
    strategy,
)
from tf_ps_runner.worker.patching import Patch, after_import, place, wrap
from tf_ps_runner.worker.task import task


def change_estimator(module: Any) -> Sequence[Patch]:
    """Have a worker of Estimator begin at once: it waits at the gate. For `tensorflow_estimator...training`."""
    place(module, "_DELAY_SECS_PER_WORKER")

    def train(original: Any, *args: Any, **kwargs: Any) -> Any:
        if task() is not None:
            module._DELAY_SECS_PER_WORKER = 0
        return original(*args, **kwargs)

    return [wrap(place(module, "_TrainingExecutor"), "_start_distributed_training", train)]


PROTECTIONS = (
    (
        "tensorflow.python.training.server_lib",
        "a worker that comes back at another address cannot join",
        servers.change_server,
    ),
    (
        "tensorflow.python.training.server_lib",
        "a worker that serves a chief is not said to be ready, and Ctrl-C ends no server",
        servers.change_join,
    ),
    (
        "tensorflow.python.client.session",
        "sessions know only the addresses that their servers were started with",
        servers.change_session,
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
        saving.change_saver,
    ),
    (
        "tensorflow.python.checkpoint.checkpoint_management",
        "a checkpoint that is not whole may be used",
        saving.change_checkpoint_state,
    ),
    (
        "tensorflow_estimator.python.estimator.training",
        "workers of Estimator begin 5 seconds late",
        change_estimator,
    ),
)


def install() -> None:
    """Have each change made where TensorFlow is imported already, and once it is imported where not.

    The data's place is kept from here on, too: a script may import its hooks when the model has been restored already.
    """
    stopping.on_step(shards.made_step)
    leaving.on_leave(shards.before_leaving)
    shard_state.keep()
    for module, protection, change in PROTECTIONS:
        after_import(module, protection, change)
    strategy.register()
    partitioning.register()
    generated_code.register()
