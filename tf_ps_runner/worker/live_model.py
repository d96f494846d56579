"""A model of `ParameterServerStrategy` that outlives its chief.

TensorFlow gives variables that are created eagerly a name that no other process can know. So a chief that is started
again creates all of them again beside the old ones, and continues from its last checkpoint. With names that the next
chief creates again it finds the values on the servers. What it then assigns, until it schedules its first step, is left
out, because those are initial values or values read from a checkpoint. A manifest on the first server records that the
model was complete, and which variables the chief had created by then.

The names match because the script creates the same variables in the same order each time, and no server outlives its
version. A variable's name includes its dtype and shape, so that no value is taken for another variable's. If the
manifest and the variables of a later chief differ, that chief takes none of the values.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from tf_ps_runner.worker.patching import Patch, require_attr, require_params, wrap
from tf_ps_runner.worker.task import task

_PREFIX = "tf_ps_runner"

_SERVERS = "/job:ps"


class Named(NamedTuple):
    """A variable on a server: its device, and its shared name."""

    device: str
    name: str

    def __str__(self) -> str:
        variable, _, number = self.name[len(_PREFIX) + 1 :].rpartition("/")
        return f"{variable}{f' (number {int(number) + 1} of them)' if number != '0' else ''} on {self.device}"


class _Model:
    """The variables that this chief has created on servers."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: Counter[tuple[str, str]] = Counter()
        # What was made before the first step, and what of that the servers had no value for.
        self.names: set[Named] = set()
        self.without_value: set[Named] = set()
        # None until the servers were asked.
        self.live: bool | None = None
        self.begun = False
        # What stands in the place of TensorFlow's function that makes a variable, once it is there.
        self.make: object = None

    def name(self, device: str, variable: str) -> Named:
        """The device of a variable and its name there: the same in each process of this version that runs the script.
        `variable` is its own name with its dtype and shape."""
        with self.lock:
            number = self.made[device, variable]
            self.made[device, variable] += 1
            named = Named(device, f"{_PREFIX}/{variable}/{number}")
            if not self.begun:
                self.names.add(named)
        return named


_model = _Model()


def found() -> bool:
    """Whether this chief was started again and found a complete model."""
    return bool(_model.live)


def change_variables(module: Any) -> Sequence[Patch]:
    """Name the variables on servers, and keep their values. For `tensorflow.python.ops.resource_variable_ops`."""
    operations = require_attr(module, "gen_resource_variable_ops")
    context = require_attr(module, "context")
    require_params(require_attr(operations, "var_handle_op"), "shape", "dtype", "shared_name", "name")
    require_params(require_attr(operations, "assign_variable_op"), "resource", "value")
    is_initialized = require_attr(operations, "var_is_initialized_op")
    require_attr(operations, "read_variable_op"), require_attr(operations, "destroy_resource_op")
    anonymous = require_attr(context, "anonymous_name")
    (
        require_attr(context, "executing_eagerly"),
        require_attr(context, "context"),
        require_attr(require_attr(context, "Context"), "device_name"),
    )

    def make(original: Any, *args: Any, **kwargs: Any) -> Any:
        device = str(context.context().device_name or "")
        if _model.live is None or kwargs.get("shared_name") != anonymous() or _SERVERS not in device:
            return original(*args, **kwargs)
        # The name of a scope ends with a slash.
        name = str(kwargs.get("name")).rstrip("/")
        named = _model.name(device, f"{name}:{_type(kwargs['dtype'])}{_sizes(kwargs['shape'])}")
        kwargs["shared_name"] = named.name
        handle = original(*args, **kwargs)
        if _model.live:
            kept = bool(is_initialized(handle))
            handle._tf_ps_kept = handle._tf_ps_first = kept
            if not kept and not _model.begun:
                _model.without_value.add(named)
        return handle

    def assign(original: Any, resource: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(resource, "_tf_ps_kept", False) and (resource._tf_ps_first or not _model.begun):
            # The first value of a variable that is created after the first step is left out like all others before it.
            resource._tf_ps_first = False
            return None if context.executing_eagerly() else _nothing()
        return original(resource, value, *args, **kwargs)

    patches = [wrap(operations, "var_handle_op", make), wrap(operations, "assign_variable_op", assign)]
    _model.make = patches[0].replacement
    return patches


def look(operations: Any, device: Any) -> None:
    """Ask the first server whether the model was complete, once the chief is connected to all servers."""
    own_task = task()
    if own_task is None or not own_task.chief or _model.live is not None:
        return
    if operations.var_handle_op is not _model.make:
        # Its variables have names that no other process can know, so no model can be found again.
        return
    _model.live = bool(operations.var_is_initialized_op(_mark(operations, device)))


def begin(operations: Any, device: Any, constant: Any) -> str | None:
    """The model is complete: record that on the first server, and carry out all assignments from here on.

    Returns a clause if this chief found a model that is not its script's. The servers have dropped it then, and the
    caller ends this process: the values that it has left out are those that its successor begins with.
    """
    if _model.begun or _model.live is None:
        return None
    mark = _mark(operations, device)
    if _model.live:
        held = _read(operations, mark)
        differs = difference(held, _model.names, _model.without_value)
        if differs is not None:
            _forget(operations, device, mark, held - _model.names)
            return differs
    else:
        with device(f"{_SERVERS}/task:0"):
            operations.assign_variable_op(mark, constant(json.dumps(sorted(_model.names))))
    _model.begun = True
    return None


def difference(held: Collection[Named], made: Collection[Named], without_value: Collection[Named]) -> str | None:
    """How the variables that a chief has created differ from the manifest of those on the servers, as a clause.

    A variable that was created after the first step is not in the manifest, but has a value. One of the manifest may
    have none: the script has deleted it.
    """
    lost = sorted(set(held) - set(made))
    new = sorted(set(without_value) - set(held))
    if lost:
        return f"the script does not make {_some(lost)} any more"
    return f"they have no {_some(new)}" if new else None


def _some(variables: Sequence[Named]) -> str:
    return f"{variables[0]}{f' and {len(variables) - 1} more' if len(variables) > 1 else ''}"


def _read(operations: Any, mark: Any) -> set[Named]:
    from tensorflow.python.framework import dtypes

    text = operations.read_variable_op(mark, dtype=dtypes.string).numpy()
    return {Named(*entry) for entry in json.loads(text)}


def _forget(operations: Any, device: Any, mark: Any, variables: Collection[Named]) -> None:
    """Remove the manifest, and the variables that will not be created again."""
    from tensorflow.python.framework import dtypes

    operations.destroy_resource_op(mark)
    for named in variables:
        with device(named.device):
            handle = operations.var_handle_op(dtype=dtypes.float32, shape=[], shared_name=named.name, name="forgotten")
            operations.destroy_resource_op(handle, ignore_lookup_error=True)


def _type(dtype: Any) -> str:
    from tensorflow.python.framework import dtypes

    return str(dtypes.as_dtype(dtype).name)


def _sizes(shape: Any) -> str:
    """A shape as it is in a name, such as `[64,4]`; `?` for an unknown part of it."""
    from tensorflow.python.framework import tensor_shape

    known = tensor_shape.as_shape(shape)
    if known.rank is None:
        return "?"
    return f"[{','.join('?' if size is None else str(size) for size in known.as_list())}]"


def _nothing() -> Any:
    from tensorflow.python.ops import gen_control_flow_ops

    return gen_control_flow_ops.no_op()


def _mark(operations: Any, device: Any) -> Any:
    from tensorflow.python.framework import dtypes

    with device(f"{_SERVERS}/task:0"):
        return operations.var_handle_op(dtype=dtypes.string, shape=[], shared_name=f"{_PREFIX}/whole", name="whole")
