"""Keeps tables that are looked up with `partition_strategy="mod"` from being restored onto other parts.

`tf.nn.embedding_lookup` with its default `partition_strategy="mod"` assigns the ids to the parts in turn, while a
checkpoint stores the parts end to end. With another number of parts each id would get the row of another id, without an
error. Three things prevent that:

- The chief reports which numbers of servers are safe, as soon as it has a model. How a script computes the number of
  parts cannot be known. As many parts as servers: the number of parts is assumed to follow that of servers, and only
  this number is safe. Fewer parts than servers: they may be limited by the size of the table
  (`min_max_variable_partitioner`), and as many servers as parts are needed. More parts than servers: assumed to be a
  constant of the script.
- Before a saver restores a checkpoint, the parts in it are compared with those of the graph, whatever the partitioner.
  A chief with a `ParameterServerStrategy` creates its lookups after it has restored, so they are compared then, before
  the chief reports that it has a model.
- Where they differ the chief reports it and leaves, and the job goes back to its previous number of servers, or ends.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from tf_ps_runner.worker.agent_connection import agent, noted
from tf_ps_runner.worker.checkpoint_index import UNPARTITIONED, Begins
from tf_ps_runner.worker.checkpoint_integrity import parts_in
from tf_ps_runner.worker.patching import Patch, patch_module, require_attr, require_params, wrap
from tf_ps_runner.worker.task import is_chief, leave

MAX_SERVERS = 4000
"""The most parameter servers of a job: stands for no limit."""

MAX_NAMED = 3
"""Tables that one line names."""

MAX_NAME = 200
"""Characters of a table's name that the agent accepts."""

MAX_PATH = 50
"""Operations to inspect between a variable and the one that restores it; TensorFlow makes two or three."""

PERMUTED = "a partitioned table whose rows another number of servers would permute is not detected"

_ATTRIBUTE = "_tf_ps_tables"

Source = tuple[str, tuple[int, ...]]
"""A name in a checkpoint, and where the part begins: an offset in each dimension, empty for the whole variable."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that is looked up with "mod". In a graph `variables` are the operations of its parts; otherwise `begins`
    says where they begin in the whole, whose shape is `shape`."""

    name: str
    parts: int
    partitioned: bool
    variables: tuple[str, ...] = ()
    begins: Begins = frozenset()
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A table that has `held` parts in a checkpoint, 0 for unknown, and another number in the graph."""

    name: str
    held: int
    wanted: int


@dataclasses.dataclass
class _Tables:
    """What this process knows of its tables, by their names."""

    seen: dict[str, Table] = dataclasses.field(default_factory=dict)
    has_model: bool = False
    # The checkpoint that was restored, if one was.
    path: str | None = None
    read_shapes: Callable[[str], dict[str, Any]] | None = None
    reported: set[str] = dataclasses.field(default_factory=set)
    compared: set[str] = dataclasses.field(default_factory=set)


_tables = _Tables()


@patch_module("tensorflow.python.ops.embedding_ops", without=PERMUTED)
def change_lookups(module: Any) -> Sequence[Patch]:
    """See what is looked up: all lookups call one function."""
    from tensorflow.python.training import py_checkpoint_reader

    open_checkpoint = require_attr(py_checkpoint_reader, "NewCheckpointReader")
    _tables.read_shapes = lambda path: open_checkpoint(path).get_variable_to_shape_map()
    partitioned = require_attr(module, "variables.PartitionedVariable")
    require_params(require_attr(module, "_embedding_lookup_and_transform"), "params", "ids", "partition_strategy")

    def look_up(original: Any, params: Any, ids: Any, partition_strategy: str = "mod", *args: Any, **more: Any) -> Any:
        if partition_strategy == "mod" and is_chief():
            with noted("a table of this script cannot be inspected"):
                _see(list(params) if isinstance(params, (partitioned, list, tuple)) else [params], params, partitioned)
        return original(params, ids, partition_strategy, *args, **more)

    return [wrap(module, "_embedding_lookup_and_transform", look_up)]


@patch_module("tensorflow.python.training.saver", without=PERMUTED)
def change_saver(module: Any) -> Sequence[Patch]:
    """Restore no table onto other parts."""
    from tensorflow.python.framework import tensor_util

    constant = require_attr(tensor_util, "constant_value")
    saver = require_attr(module, "Saver")
    require_params(require_attr(saver, "restore"), "sess", "save_path")

    def restore(original: Any, self: Any, sess: Any, save_path: Any) -> Any:
        graph = getattr(sess, "graph", None)
        # A saver with nothing to save, which may be created on purpose, has none.
        definition = getattr(self, "saver_def", None)
        if is_chief() and None not in (graph, save_path) and definition is not None:
            tables = getattr(graph, _ATTRIBUTE, {})
            if tables:
                path = os.fspath(save_path)
                sources = restored_sources(graph, definition.restore_op_name, constant)
                if found := mismatches(tables.values(), sources, parts_in(path)):
                    refuse(path, found)
        return original(self, sess, save_path)

    return [wrap(saver, "restore", restore)]


def has_model(path: str | None) -> None:
    """The chief has the right model, restored from `path` if given: report which numbers of servers are safe. A number
    that was refused is never reported as safe, because the chief leaves before."""
    _tables.has_model, _tables.path = True, path
    _compare_and_report()


def _see(parts: list[Any], params: Any, partitioned: Any) -> None:
    table = table_of(parts, params, partitioned)
    if table is None:
        return
    _tables.seen[table.name] = table
    if table.variables:
        # Stored in the graph, so that it ends with the graph: an Estimator creates many.
        graph = parts[0].graph
        setattr(graph, _ATTRIBUTE, {**getattr(graph, _ATTRIBUTE, {}), table.name: table})
    if _tables.has_model:
        _compare_and_report()


def table_of(parts: list[Any], params: Any, partitioned: Any) -> Table | None:
    """The table that is looked up; None if it is no variable."""
    is_partitioned = isinstance(params, partitioned)
    variables = tuple(name for name in map(_operation_of, parts) if name)
    begins, shape = (frozenset(), ()) if variables else _layout(parts)
    if not parts or (len(parts) == 1 and not is_partitioned and not variables and not shape):
        return None
    name = params.name if is_partitioned else getattr(parts[0], "name", "a list of tables")
    name = str(name).split("/part_")[0].removesuffix(":0")[:MAX_NAME]
    # TensorFlow passes a table without parts as a list of one.
    return Table(name, len(parts), is_partitioned or len(parts) > 1, variables, begins, shape)


def _operation_of(part: Any) -> str | None:
    """The name of the operation of a variable, or of the one that was read; None if it is no variable of a graph."""
    try:
        operation = part.op
        while operation.type in ("Identity", "ReadVariableOp"):
            operation = operation.inputs[0].op
    except Exception:
        # Variables of a program that runs eagerly have no operation.
        return None
    return str(operation.name) if operation.type in ("VarHandleOp", "Variable", "VariableV2") else None


def _layout(parts: list[Any]) -> tuple[Begins, tuple[int, ...]]:
    """Where each part of a table begins, and the shape of the whole, for parts that are stored end to end as those of a
    `ShardedVariable`; empty for what is no variable."""
    if not all(hasattr(part, "read_value") for part in parts):
        return frozenset(), ()
    begins, rows = set(), 0
    for part in parts:
        begins.add((rows, *(0 for _ in part.shape[1:])))
        rows += int(part.shape[0])
    return frozenset(begins), (rows, *(int(size) for size in parts[0].shape[1:]))


def servers() -> int:
    """The number of parameter servers in the cluster, by `TF_CONFIG`."""
    try:
        return len(json.loads(os.environ["TF_CONFIG"])["cluster"]["ps"])
    except (KeyError, TypeError, ValueError):
        return 0


def bounds(parts: int, present: int) -> tuple[int, int]:
    """The fewest and the most servers with which a partitioned table is sure to have as many parts, as far as that can
    be known from one number of servers."""
    if parts == present:
        return present, present
    return (parts, MAX_SERVERS) if 1 < parts < present else (1, MAX_SERVERS)


def restored_sources(graph: Any, restore_op: str, constant: Callable[[Any], Any]) -> dict[str, Source]:
    """What a saver restores into each variable of its graph. Variables are named by their operations. `constant` reads
    a constant of the graph."""
    found: dict[str, Source] = {}
    element = graph.as_graph_element(restore_op)
    open_, seen = [getattr(element, "op", element)], set()
    while open_:
        operation = open_.pop()
        if operation in seen:
            continue
        seen.add(operation)
        if operation.type.startswith("Assign") and len(operation.inputs) >= 2:
            source = _restored_by(operation.inputs[1], constant)
            if source is not None:
                found[operation.inputs[0].op.name] = source
        open_ += [*operation.control_inputs, *(value.op for value in operation.inputs)]
    return found


def _restored_by(value: Any, constant: Callable[[Any], Any]) -> Source | None:
    """Where the value that is assigned comes from, by the nearest operation that restores."""
    near = [value]
    for _ in range(MAX_PATH):
        if not near:
            break
        tensor = near.pop(0)
        if tensor.op.type == "RestoreV2":
            names, slices = (constant(tensor.op.inputs[place]) for place in (1, 2))
            return names[tensor.value_index].decode(), _begin(slices[tensor.value_index].decode())
        near += tensor.op.inputs
    return None


def _begin(part: str) -> tuple[int, ...]:
    """Where a part begins. TensorFlow writes `12 4 0,6:0,4`: the shape, then begin and length in each dimension."""
    if not part:
        return ()
    return tuple(0 if extent == "-" else int(extent.split(",")[0]) for extent in part.split(" ")[-1].split(":"))


def mismatches(tables: Iterable[Table], sources: dict[str, Source], held: dict[str, Begins] | None) -> list[Mismatch]:
    """The tables that have other parts in a checkpoint than in the graph. A table that the checkpoint lacks is left to
    TensorFlow's own error. If the parts in the checkpoint are unknown, `held` is None, and each partitioned table is
    one."""
    found = []
    for table in tables:
        restored = [sources[variable] for variable in table.variables if variable in sources]
        names = {name for name, _ in restored}
        if len(names) != 1:
            # Not restored, or separate variables: each of those is whole.
            continue
        wanted = frozenset(begin for _, begin in restored)
        stored = held.get(names.pop()) if held is not None else None
        if held is None and table.partitioned:
            found.append(Mismatch(table.name, 0, len(wanted)))
        elif stored is not None and not _alike(stored, wanted):
            found.append(Mismatch(table.name, len(stored), len(wanted)))
    return found


def mismatch_of_shape(table: Table, shapes: dict[str, Any], held: dict[str, Begins] | None) -> Mismatch | None:
    """The same for a table that is in no graph. A checkpoint of objects does not say which of its variables that is, so
    one of them of that shape must have those parts, unless there is none of that shape at all."""
    if held is None:
        return Mismatch(table.name, 0, table.parts) if table.partitioned else None
    stored = [held.get(key, UNPARTITIONED) for key, shape in shapes.items() if tuple(shape) == table.shape]
    if not stored or any(_alike(begins, table.begins) for begins in stored):
        return None
    return Mismatch(table.name, len(stored[0]), table.parts)


def _alike(one: Begins, other: Begins) -> bool:
    return one == other or len(one) == len(other) == 1


def matching_servers(found: Iterable[Mismatch], present: int) -> int:
    """The number of servers with which the script would make the parts of the checkpoint, if it makes a fixed number of
    parts for each server; 0 where that cannot be."""
    numbers = set()
    for mismatch in found:
        per_server, rest = divmod(mismatch.wanted, present) if present else (0, 0)
        if not per_server or rest or not mismatch.held or mismatch.held % per_server:
            return 0
        numbers.add(mismatch.held // per_server)
    return numbers.pop() if len(numbers) == 1 else 0


def refuse(path: str, found: list[Mismatch]) -> NoReturn:
    """Report that a checkpoint is not restored, and leave: the job decides with which servers it continues."""
    present = servers()
    first = found[0]
    if first.held:
        text = (
            f"{path} is not restored: it holds {_counted(first.held)} of the table {first.name!r}, which is looked up "
            f'with partition_strategy="mod", and the script makes {first.wanted} with {present} parameter '
            f"server{'' if present == 1 else 's'}: each id would get the row of another id"
        )
    else:
        text = (
            f"{path} is not restored: the parts in it of the table {first.name!r}, which is looked up with "
            'partition_strategy="mod", cannot be read, so each id may get the row of another id; save in '
            "format V2, and not before the first step"
        )
    number = matching_servers(found, present)
    _report(text, number, number, first.name, first.held, refused=first.wanted)
    leave()


def _compare_and_report() -> None:
    """Report how many servers the tables allow, in one line for all of which that was not reported yet."""
    if _tables.path is not None:
        _compare_without_graph(_tables.path)
    present = servers()
    limits = [
        (*limit, table)
        for table in _tables.seen.values()
        if table.partitioned and table.name not in _tables.reported
        if (limit := bounds(table.parts, present)) != (1, MAX_SERVERS)
    ]
    if not limits:
        return
    _tables.reported.update(table.name for _, _, table in limits)
    least, most = max(low for low, _, _ in limits), min(high for _, high, _ in limits)
    named = [f"{table.name!r} ({_counted(table.parts)})" for _, _, table in limits[:MAX_NAMED]]
    more = len(limits) - len(named)
    number = f"must stay {least}" if least == most else f"must be at least {least}"
    text = (
        f"table{'' if len(limits) == 1 else 's'} {', '.join(named)}{f' and {more} more' if more else ''} with "
        'partition_strategy="mod": with other parts each id would get the row of another id, so the number of '
        f'parameter servers {number}; "div" allows any'
    )
    tightest = max(limits, key=lambda limit: (limit[0] == limit[1], limit[0]))[2]
    _report(text, least, most, tightest.name, tightest.parts)


def _compare_without_graph(path: str) -> None:
    tables = [table for name, table in _tables.seen.items() if table.shape and name not in _tables.compared]
    if not tables:
        return
    _tables.compared.update(table.name for table in tables)
    assert _tables.read_shapes is not None, "set before anything is looked up"
    try:
        shapes, held = _tables.read_shapes(path), parts_in(path)
    except Exception:
        # It may be deleted by now, by the script or for a newer one.
        shapes, held = {}, None
    found = [one for table in tables if (one := mismatch_of_shape(table, shapes, held)) is not None]
    if found:
        refuse(path, found)


def _report(text: str, least: int, most: int, table: str, parts: int, refused: int = 0) -> None:
    limits = {"least": least, "most": most, "table": table, "parts": parts, "refused": refused}
    agent().report("note", text=text, server_bounds=limits)


def _counted(parts: int) -> str:
    return f"{parts} part{'' if parts == 1 else 's'}"
