"""Keep tables that are looked up with `partition_strategy="mod"` from being restored onto other parts.

`tf.nn.embedding_lookup` with its default `partition_strategy="mod"` deals the ids out to the parts like cards, while a
checkpoint lays the parts end to end. With another number of parts each id would get the row of another id, without an
error. Three things prevent that:

- The chief reports which numbers of servers are safe, as soon as it has a model. How a script comes by the number of
  parts cannot be known. As many parts as servers: the one is taken to follow the other, and only this number is safe.
  Fewer parts than servers: they may be limited by the size of the table (`min_max_variable_partitioner`), and as many
  servers as parts are needed. More parts than servers: the script's own number, which is taken to stay.
- Before a saver restores a checkpoint, the parts in it are compared with those of the graph, whatever the partitioner.
  A chief with a `ParameterServerStrategy` makes its lookups after it has restored, so they are compared then, before
  the chief reports that it has a model.
- Where they differ the chief reports it and leaves, and the job goes back to the number of servers that it had, or
  ends.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from tf_ps_runner.worker import checkpoints
from tf_ps_runner.worker.agent_connection import agent, note
from tf_ps_runner.worker.checkpoint_index import UNPARTITIONED
from tf_ps_runner.worker.checkpoint_integrity import parts_in
from tf_ps_runner.worker.patching import Patch, after_import, require_attr, require_params, wrap
from tf_ps_runner.worker.task import leave, task

MAX_SERVERS = 4000
"""The most parameter servers of a job: what stands for no limit."""

MAX_NAMED = 3
"""Tables that one line names."""

MAX_NAME = 200
"""Characters of a table's name that the agent takes."""

MAX_PATH = 50
"""Operations that are looked at between a variable and what restores it; TensorFlow makes two or three."""

_ATTRIBUTE = "_tf_ps_tables"

Begins = frozenset[tuple[int, ...]]
"""Where the parts of a variable begin in the whole, as an offset in each dimension."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that is looked up with "mod". `variables` are the operations of its parts where it is in a graph; else
    `begins` says where they begin in the whole, whose shape is `shape`."""

    name: str
    parts: int
    partitioned: bool
    variables: tuple[str, ...] = ()
    begins: Begins = frozenset()
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A table of which a checkpoint holds another number of parts than the graph asks for."""

    name: str
    held: int
    asked: int


class _Tables:
    """What this process knows of its tables, by their names."""

    def __init__(self) -> None:
        self.seen: dict[str, Table] = {}
        self.restored = False
        # The checkpoint that was restored, if one was.
        self.path: str | None = None
        self.read_shapes: Callable[[str], dict[str, Any]] | None = None
        self.reported: set[str] = set()
        self.compared: set[str] = set()


_tables = _Tables()


def register() -> None:
    """Have the lookups and the savers of TensorFlow changed once they are imported."""
    lost = "a partitioned table whose rows another number of servers would permute is not noticed"
    after_import("tensorflow.python.ops.embedding_ops", lost, change_lookups)
    after_import("tensorflow.python.training.saver", lost, change_saver)
    checkpoints.on_restored(_has_model)


def change_lookups(module: Any) -> Sequence[Patch]:
    """Look at what is looked up: all ways lead through one function. For `tensorflow.python.ops.embedding_ops`."""
    from tensorflow.python.training import py_checkpoint_reader

    open_checkpoint = require_attr(py_checkpoint_reader, "NewCheckpointReader")
    _tables.read_shapes = lambda path: open_checkpoint(path).get_variable_to_shape_map()
    partitioned = require_attr(require_attr(module, "variables"), "PartitionedVariable")
    require_params(require_attr(module, "_embedding_lookup_and_transform"), "params", "ids", "partition_strategy")

    def see(original: Any, params: Any, ids: Any, partition_strategy: Any = "mod", *args: Any, **kwargs: Any) -> Any:
        own_task = task()
        if own_task is not None and own_task.chief and partition_strategy == "mod":
            try:
                _see(list(params) if isinstance(params, (partitioned, list, tuple)) else [params], params, partitioned)
            except Exception as error:
                # The script must be able to go on, whatever it looks up.
                note(f"a table of this script cannot be looked at: {type(error).__name__}: {error}")
        return original(params, ids, partition_strategy, *args, **kwargs)

    return [wrap(module, "_embedding_lookup_and_transform", see)]


def change_saver(module: Any) -> Sequence[Patch]:
    """Restore no table onto other parts. For `tensorflow.python.training.saver`."""
    from tensorflow.python.framework import tensor_util

    constant = require_attr(tensor_util, "constant_value")
    saver = require_attr(module, "Saver")
    require_params(require_attr(saver, "restore"), "sess", "save_path")

    def restore(original: Any, self: Any, sess: Any, save_path: Any) -> Any:
        own_task = task()
        graph = getattr(sess, "graph", None)
        # One with nothing to save, which may be made on purpose, has none.
        definition = getattr(self, "saver_def", None)
        if own_task is not None and own_task.chief and None not in (graph, save_path) and definition is not None:
            tables = getattr(graph, _ATTRIBUTE, {})
            if tables:
                path = os.fspath(save_path)
                asked = asked_of(graph, definition.restore_op_name, constant)
                found = mismatches(tables.values(), asked, parts_in(path))
                if found:
                    refuse(path, found)
        return original(self, sess, save_path)

    return [wrap(saver, "restore", restore)]


def table_of(parts: list[Any], params: Any, partitioned: Any) -> Table | None:
    """The table that is looked up; None for what is no variable."""
    is_partitioned = isinstance(params, partitioned)
    variables = tuple(name for name in map(_variable_of, parts) if name)
    begins, shape = (frozenset(), ()) if variables else _laid_out(parts)
    if not parts or (len(parts) == 1 and not is_partitioned and not variables and not shape):
        return None
    name = params.name if is_partitioned else getattr(parts[0], "name", "a list of tables")
    name = str(name).split("/part_")[0].removesuffix(":0")[:MAX_NAME]
    # One in a list is how TensorFlow hands on what has no parts.
    return Table(name, len(parts), is_partitioned or len(parts) > 1, variables, begins, shape)


def servers() -> int:
    """The parameter servers of the cluster, by `TF_CONFIG`."""
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


def asked_of(graph: Any, restore_op: str, constant: Callable[[Any], Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What a saver restores into each variable of its graph: the name in the checkpoint, and where the part begins; an
    empty tuple for the whole. Variables are named by their operations. `constant` reads a constant of the graph."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
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


def mismatches(
    tables: Iterable[Table],
    asked: dict[str, tuple[str, tuple[int, ...]]],
    held: dict[str, Begins] | None,
) -> list[Mismatch]:
    """The tables that a checkpoint holds in other parts than the graph asks for. Of one that it does not hold
    TensorFlow itself says so. Where the parts in the checkpoint are not known, `held` is None, that is each partitioned
    table; it holds 0 parts then."""
    found = []
    for table in tables:
        sources = [asked[variable] for variable in table.variables if variable in asked]
        names = {name for name, _ in sources}
        if len(names) != 1:
            # Not restored, or separate variables: each of those is whole.
            continue
        wanted = frozenset(begin for _, begin in sources)
        there = held.get(names.pop()) if held is not None else None
        if held is None and table.partitioned:
            found.append(Mismatch(table.name, 0, len(wanted)))
        elif there is not None and not _alike(there, wanted):
            found.append(Mismatch(table.name, len(there), len(wanted)))
    return found


def mismatch_of_shape(table: Table, shapes: dict[str, Any], held: dict[str, Begins] | None) -> Mismatch | None:
    """The same for a table that is in no graph. A checkpoint of objects does not say which of its variables that is, so
    one of them of that shape must have those parts, unless there is none of that shape at all."""
    if held is None:
        return Mismatch(table.name, 0, table.parts) if table.partitioned else None
    there = [held.get(key, UNPARTITIONED) for key, shape in shapes.items() if tuple(shape) == table.shape]
    if not there or any(_alike(begins, table.begins) for begins in there):
        return None
    return Mismatch(table.name, len(there[0]), table.parts)


def matching_servers(found: Iterable[Mismatch], present: int) -> int:
    """The number of servers with which the script would make the parts of the checkpoint, if it makes a fixed number of
    parts for each server; 0 where that cannot be."""
    numbers = set()
    for mismatch in found:
        for_each, rest = divmod(mismatch.asked, present) if present else (0, 0)
        if not for_each or rest or not mismatch.held or mismatch.held % for_each:
            return 0
        numbers.add(mismatch.held // for_each)
    return numbers.pop() if len(numbers) == 1 else 0


def refuse(path: str, found: list[Mismatch]) -> NoReturn:
    """Report that a checkpoint is not restored, and leave: the job decides with which servers it goes on."""
    present = servers()
    first = found[0]
    if first.held:
        text = (
            f"{path} is not restored: it holds {_counted(first.held)} of the table {first.name!r}, which is looked up "
            f'with partition_strategy="mod", and the script makes {first.asked} with {present} parameter '
            f"server{'' if present == 1 else 's'}: each id would get the row of another id"
        )
    else:
        text = (
            f"{path} is not restored: the parts in it of the table {first.name!r}, which is looked up with "
            'partition_strategy="mod", cannot be read, so each id may get the row of another id; save in '
            "format V2, and not before the first step"
        )
    number = matching_servers(found, present)
    _say(text, number, number, first.name, first.held, refused=first.asked)
    leave()


def _see(parts: list[Any], params: Any, partitioned: Any) -> None:
    table = table_of(parts, params, partitioned)
    if table is None:
        return
    _tables.seen[table.name] = table
    if table.variables:
        # With the graph, so that it goes with it: an Estimator makes many.
        graph = parts[0].graph
        setattr(graph, _ATTRIBUTE, {**getattr(graph, _ATTRIBUTE, {}), table.name: table})
    if _tables.restored:
        _tell()


def _has_model(path: str | None, step: int, how: str) -> None:
    """The model is there, and it is the right one: a number of servers that was refused is never reported as safe."""
    _tables.restored, _tables.path = True, path
    _tell()


def _tell() -> None:
    """Report how many servers the tables allow, in one line for all of which that was not reported yet."""
    if _tables.path is not None:
        _compare_without_graph(_tables.path)
    present = servers()
    limits = {
        table.name: (table, *bounds(table.parts, present))
        for table in _tables.seen.values()
        if table.partitioned and table.name not in _tables.reported
    }
    limits = {name: limit for name, limit in limits.items() if limit[1:] != (1, MAX_SERVERS)}
    if not limits:
        return
    _tables.reported.update(limits)
    least, most = max(low for _, low, _ in limits.values()), min(high for _, _, high in limits.values())
    named = [f"{table.name!r} ({_counted(table.parts)})" for table, _, _ in list(limits.values())[:MAX_NAMED]]
    more = len(limits) - len(named)
    which = ", ".join(named) + (f" and {more} more" if more > 0 else "")
    number = f"must stay {least}" if least == most else f"must be at least {least}"
    text = (
        f'table{"" if len(limits) == 1 else "s"} {which} with partition_strategy="mod": with other parts each id '
        f'would get the row of another id, so the number of parameter servers {number}; "div" allows any'
    )
    tightest = max(limits.values(), key=lambda limit: (limit[1] == limit[2], limit[1]))[0]
    _say(text, least, most, tightest.name, tightest.parts)


def _compare_without_graph(path: str) -> None:
    tables = [table for name, table in _tables.seen.items() if table.shape and name not in _tables.compared]
    if not tables:
        return
    _tables.compared.update(table.name for table in tables)
    assert _tables.read_shapes is not None, "it is there before anything is looked up"
    try:
        shapes, held = _tables.read_shapes(path), parts_in(path)
    except Exception:
        # It may be deleted by now, by the script or for a newer one.
        shapes, held = {}, None
    found = [one for table in tables if (one := mismatch_of_shape(table, shapes, held)) is not None]
    if found:
        refuse(path, found)


def _say(text: str, least: int, most: int, table: str, parts: int, refused: int = 0) -> None:
    reported = {"least": least, "most": most, "table": table, "parts": parts, "refused": refused}
    agent().report("note", text=text, server_bounds=reported)


def _counted(parts: int) -> str:
    return f"{parts} part{'' if parts == 1 else 's'}"


def _alike(one: Begins, other: Begins) -> bool:
    return one == other or len(one) == len(other) == 1


def _laid_out(parts: list[Any]) -> tuple[Begins, tuple[int, ...]]:
    """Where each part of a table begins, and the shape of the whole, for parts that lie end to end as a
    `ShardedVariable` has them; nothing for what is no variable."""
    if not all(hasattr(part, "read_value") for part in parts):
        return frozenset(), ()
    begins, rows = set(), 0
    for part in parts:
        begins.add((rows, *(0 for _ in part.shape[1:])))
        rows += int(part.shape[0])
    return frozenset(begins), (rows, *(int(size) for size in parts[0].shape[1:]))


def _variable_of(part: Any) -> str | None:
    """The name of the operation of a variable, or of the one that was read; None for what is no variable of a graph."""
    try:
        operation = part.op
        while operation.type in ("Identity", "ReadVariableOp"):
            operation = operation.inputs[0].op
    except Exception:
        # Variables of a program that runs eagerly have no operation.
        return None
    is_variable = operation.type in ("VarHandleOp", "Variable", "VariableV2")
    return str(operation.name) if is_variable else None


def _restored_by(value: Any, constant: Callable[[Any], Any]) -> tuple[str, tuple[int, ...]] | None:
    """The name in a checkpoint of what is assigned, and where the part begins."""
    for tensor in _sources(value):
        if tensor.op.type == "RestoreV2":
            names, slices = (constant(tensor.op.inputs[place]) for place in (1, 2))
            return names[tensor.value_index].decode(), _begin(slices[tensor.value_index].decode())
    return None


def _sources(value: Any) -> Iterator[Any]:
    """A tensor, and what it is made of, the nearest first."""
    near = [value]
    for _ in range(MAX_PATH):
        if not near:
            return
        tensor = near.pop(0)
        yield tensor
        near += tensor.op.inputs


def _begin(part: str) -> tuple[int, ...]:
    """Where a part begins. TensorFlow writes `12 4 0,6:0,4`: the shape, then begin and length in each dimension."""
    if not part:
        return ()
    return tuple(0 if extent == "-" else int(extent.split(",")[0]) for extent in part.split(" ")[-1].split(":"))
