"""Find what does not survive another number of parameter servers.

`tf.nn.embedding_lookup` with its default `partition_strategy="mod"` deals the ids out to the parts like cards, while a
checkpoint lays the parts end to end. With another number of parts each id would get somebody else's row, without an
error. Where there are as many parts as servers, the one is taken to follow the other, and must not change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from tf_ps_runner.worker.channel import channel, note
from tf_ps_runner.worker.patching import Patch, after_import, place, takes, wrap
from tf_ps_runner.worker.task import task

MOST_TABLES = 100
"""Tables of which is told."""

_told: set[str] = set()


def register() -> None:
    """Have the lookups of TensorFlow changed once they are imported."""
    lacking = "nobody notices a partitioned table whose rows another number of servers would permute"
    after_import("tensorflow.python.ops.embedding_ops", lacking, change_lookups)


def change_lookups(module: Any) -> Sequence[Patch]:
    """Look at what is looked up: all ways lead through one function. For `tensorflow.python.ops.embedding_ops`."""
    partitioned = place(place(module, "variables"), "PartitionedVariable")
    takes(place(module, "_embedding_lookup_and_transform"), "params", "ids", "partition_strategy")

    def see(original: Any, params: Any, ids: Any, partition_strategy: Any = "mod", *args: Any, **kwargs: Any) -> Any:
        mine = task()
        if mine is not None and mine.chief and partition_strategy == "mod":
            name, parts = parts_of(params, partitioned)
            if parts > 1 or (parts == 1 and servers() == 1):
                tell(name, parts)
        return original(params, ids, partition_strategy, *args, **kwargs)

    return [wrap(module, "_embedding_lookup_and_transform", see)]


def parts_of(params: Any, partitioned: Any) -> tuple[str, int]:
    """The name of what is looked up, and the number of its parts; 0 for what is not partitioned."""
    parts = list(params) if isinstance(params, (partitioned, list, tuple)) else []
    # One in a list is how TensorFlow hands on what has no parts.
    if not parts or (len(parts) == 1 and not isinstance(params, partitioned)):
        return "", 0
    name = params.name if isinstance(params, partitioned) else getattr(parts[0], "name", "a list of tables")
    return str(name).split("/part_")[0], len(parts)


def servers() -> int:
    """The parameter servers of the cluster, by `TF_CONFIG`."""
    try:
        return len(json.loads(os.environ["TF_CONFIG"])["cluster"]["ps"])
    except (KeyError, TypeError, ValueError):
        return 0


def tell(name: str, parts: int) -> None:
    """Say it to the person and to the agent, once for each table."""
    if name in _told or len(_told) >= MOST_TABLES:
        return
    _told.add(name)
    words = (
        f'the table {name} has {parts} part{"s" if parts > 1 else ""} and is looked up with partition_strategy="mod": '
        'with another number of parts each id would get the row of another one; partition_strategy="div" is safe'
    )
    note(words)
    channel().say("note", text=words, fixed_servers=parts == servers())
