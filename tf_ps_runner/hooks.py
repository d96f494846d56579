"""What a script may import: `DataShards`, which takes its data from the job's queue, and its task in the cluster.

    from tf_ps_runner.hooks import DataShards

    for begin, end in DataShards("train", size=len(rows), shard_size=65536, epochs=2, shuffle=True).batches(256):
        session.run(train, feed(rows[begin:end]))

The same script trains without `tf-ps-run`: then it gets all of the data. Only the standard library is imported, and
TensorFlow by the functions that need it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from tf_ps_runner.worker import shards
from tf_ps_runner.worker.agent_connection import agent
from tf_ps_runner.worker.queue_client import queue_client

Result = TypeVar("Result")

__all__ = [
    "DataShards",
    "ElasticHook",  # noqa: F822
    "Task",
    "rank",
    "run_coordinator",
    "save",
    "server",
    "session_config",
    "task",
    "version",
]


class Task(NamedTuple):
    """A task of the cluster. `worker-2` of rank 0 has replaced `worker-0`."""

    role: str
    rank: int
    id: int


def task() -> Task:
    """The task of this process; a single chief without a cluster. Raises ValueError for a `TF_CONFIG` that is no JSON
    object."""
    stated = _config().get("task") or {"type": "chief", "index": 0}
    role, index = str(stated["type"]), int(stated["index"])
    return Task(role, index, int(os.environ.get("WORKER_ID") or index))


def rank() -> int:
    """The index of this process in its role, which its replacement will have too."""
    return task().rank


def version() -> int:
    """The version of the set of parameter servers, from 1; 0 without `tf-ps-run`."""
    return int(os.environ.get("TF_PS_VERSION") or 0)


class DataShards:
    """The offsets from 0 to before `size`, `epochs` times over, in parts of `shard_size` that are handed out on
    request. With `shuffle` each epoch has an order of its own, which `seed` decides.

    All processes of a job that use the same `name` share one queue, and must give it the same arguments. While no
    parameter server is lost, each offset is used once an epoch. If one is lost, what was used since the checkpoint that
    the model goes back to is used again, and nothing is left out. An evaluator should read its data without this.
    """

    def __init__(
        self,
        name: str,
        size: int,
        shard_size: int,
        epochs: int = 1,
        seed: int | None = None,
        shuffle: bool = False,
    ) -> None:
        spec = shards.ShardSpec(size, shard_size, epochs, seed or 0, shuffle)
        if (problem := spec.problem()) is not None:
            raise ValueError(f"DataShards {name}: {problem}")
        self._queue: shards.Queue = (
            shards.AgentQueue(queue_client(), name, spec) if agent().active else shards.OwnQueue(spec)
        )

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Each part, as (begin, end). It is used once the next one is requested."""
        return self._ranges(None)

    def batches(self, length: int) -> Iterator[tuple[int, int]]:
        """Pieces of parts, as (begin, end) with `length` offsets at most. Each is used once the next one is requested,
        or, if it was passed to a coordinator's `schedule`, once its result is there."""
        if length < 1:
            raise ValueError(f"the length of a batch must be at least 1, not {length!r}")
        return self._ranges(length)

    def dataset(
        self, load: Callable[[int, int], Any], output_signature: Any, batch_size: int, prefetch: int = 1
    ) -> Any:
        """A `tf.data.Dataset` of what `load(begin, end)` returns for each batch, `prefetch` of which are loaded ahead.

        A batch is used once the next one is requested, or once a step was made with it if the process has to leave. So
        nothing that reads ahead may follow it: do not call `prefetch`, `shuffle` or `batch` on the returned dataset.
        """
        return shards.make_dataset(self._queue, load, output_signature, batch_size, prefetch)

    def _ranges(self, length: int | None) -> Iterator[tuple[int, int]]:
        for batch in shards.batches(self._queue, length):
            yield batch.begin, batch.end


def server() -> Any:
    """The `tf.distribute.Server` of this process, by `TF_CONFIG`."""
    import tensorflow as tf

    config = _config()
    if "cluster" not in config:
        raise ValueError("TF_CONFIG contains no cluster: start this script with tf-ps-run")
    own_task = task()
    return tf.distribute.Server(
        tf.train.ClusterSpec(config["cluster"]), job_name=own_task.role, task_index=own_task.rank, protocol="grpc"
    )


def session_config() -> Any:
    """A `tf.compat.v1.ConfigProto` for sessions on that server: they wait for the parameter servers only."""
    import tensorflow as tf

    own_task = task()
    return tf.compat.v1.ConfigProto(device_filters=["/job:ps", f"/job:{own_task.role}/task:{own_task.rank}"])


def run_coordinator(train: Callable[[Any], Result], variable_partitioner: Any = None) -> Result:
    """Train with `ParameterServerStrategy`: the chief calls `train(coordinator)` and returns its result; workers and
    servers serve it, and never return. Raises ValueError in an evaluator."""
    import tensorflow as tf

    own_task = task()
    if own_task.role in ("worker", "ps"):
        server().join()
    if own_task.role != "chief" or "cluster" not in _config():
        raise ValueError(
            f"run_coordinator is for a cluster with a chief, workers and servers, and not for {own_task.role}"
        )
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=variable_partitioner)
    return train(tf.distribute.coordinator.ClusterCoordinator(strategy))


def save() -> int:
    """Save everything that a chief with a coordinator saves, and return the number of checkpoints; 0 in other tasks.
    With sessions, `tf.compat.v1.train.MonitoredTrainingSession` saves by itself."""
    from tf_ps_runner.worker import strategy

    return strategy.save_all()


def __getattr__(name: str) -> Any:
    if name == "ElasticHook":
        import tensorflow as tf

        # Does nothing: tf-ps-run adds its own hook to each MonitoredSession. For scripts that name what they rely on.
        hook = globals()[name] = type(name, (tf.compat.v1.train.SessionRunHook,), {})
        return hook
    if name == "rebuild":
        raise AttributeError(
            "tf_ps_runner.hooks.rebuild was removed: load the data at the top level of an installed module, and name "
            "that module in `tf-ps-run --preload`"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _config() -> dict[str, Any]:
    try:
        config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    except ValueError as error:
        raise ValueError(f"TF_CONFIG is no JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError("TF_CONFIG is no JSON object")
    return config
