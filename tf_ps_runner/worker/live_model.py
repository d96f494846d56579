"""A model of `ParameterServerStrategy` that outlives its chief.

TensorFlow gives variables that are created eagerly a name that no other process can know. So a chief that is restarted
creates all of them again beside the old ones, and continues from its last checkpoint. With names that the next chief
creates again it finds the values on the servers. What it then assigns, until it schedules its first step, is left out,
because those are initial values or values read from a checkpoint. A manifest on the first server records that the model
was complete, and which variables the chief had created by then.

The names match because the script creates the same variables in the same order each time, and no server outlives its
version. A variable's name includes its dtype and shape, so that no value is taken for another variable's. If the
manifest and the variables of a later chief differ, that chief uses none of the values.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from tf_ps_runner.worker.patching import Patch, patch_module, require_attr, require_params, wrap

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
        self.created: Counter[tuple[str, str]] = Counter()
        # What was created before the first step, and what of that the servers had no value for.
        self.names: set[Named] = set()
        self.without_value: set[Named] = set()
        # Whether the servers have a complete model; None until that is known.
        self.live: bool | None = None
        self.begun = False
        # The patch of TensorFlow's function that creates a variable, once it is applied.
        self.create: object = None

    def name(self, device: str, variable: str) -> Named:
        """The device of a variable and its name there: the same in each process of this version that runs the script.
        `variable` is its own name with its dtype and shape."""
        with self.lock:
            number = self.created[device, variable]
            self.created[device, variable] += 1
            named = Named(device, f"{_PREFIX}/{variable}/{number}")
            if not self.begun:
                self.names.add(named)
        return named


_model = _Model()


def found() -> bool:
    """Whether this chief was restarted and found a complete model."""
    return bool(_model.live)


@patch_module(
    "tensorflow.python.ops.resource_variable_ops",
    without="a chief with ParameterServerStrategy goes back to its last checkpoint whenever it is restarted",
)
def change_variables(module: Any) -> Sequence[Patch]:
    """Name the variables on servers, and keep their values."""
    operations = require_attr(module, "gen_resource_variable_ops")
    require_params(require_attr(operations, "var_handle_op"), "shape", "dtype", "shared_name", "name")
    require_params(require_attr(operations, "assign_variable_op"), "resource", "value")
    is_initialized = require_attr(operations, "var_is_initialized_op")
    require_attr(operations, "read_variable_op"), require_attr(operations, "destroy_resource_op")
    anonymous = require_attr(module, "context.anonymous_name")
    executing_eagerly, context = (
        require_attr(module, "context.executing_eagerly"),
        require_attr(module, "context.context"),
    )
    require_attr(module, "context.Context.device_name")

    def create(original: Any, *args: Any, **kwargs: Any) -> Any:
        device = str(context().device_name or "")
        if _model.live is None or kwargs.get("shared_name") != anonymous() or _SERVERS not in device:
            return original(*args, **kwargs)
        # The name of a scope ends with a slash.
        name = str(kwargs.get("name")).rstrip("/")
        named = _model.name(device, f"{name}:{_type_and_shape(kwargs['dtype'], kwargs['shape'])}")
        kwargs["shared_name"] = named.name
        handle = original(*args, **kwargs)
        if _model.live:
            kept = bool(is_initialized(handle))
            handle._tf_ps_kept = handle._tf_ps_first = kept
            if not kept and not _model.begun:
                _model.without_value.add(named)
        return handle

    def assign(original: Any, resource: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(resource, "_tf_ps_kept", False) or not (resource._tf_ps_first or not _model.begun):
            return original(resource, value, *args, **kwargs)
        # The first value of a variable that is created after the first step is left out like all others before it.
        resource._tf_ps_first = False
        if executing_eagerly():
            return None
        from tensorflow.python.ops import gen_control_flow_ops

        return gen_control_flow_ops.no_op()

    patches = [wrap(operations, "var_handle_op", create), wrap(operations, "assign_variable_op", assign)]
    _model.create = patches[0].replacement
    return patches


def look() -> None:
    """Read from the first server whether the model was complete, once the chief is connected to all servers."""
    from tensorflow.python.ops import gen_resource_variable_ops as operations

    # Without the patch its variables have names that no other process can know, so no model can be found again.
    if _model.live is None and operations.var_handle_op is _model.create:
        _model.live = bool(operations.var_is_initialized_op(_manifest()))


def begin() -> str | None:
    """The model is complete: record that on the first server, and carry out all assignments from here on.

    Returns a clause if this chief found a model that is not its script's. The servers have dropped it then, and the
    caller ends this process: the values that it has left out are those that its successor begins with.
    """
    from tensorflow.python.framework import constant_op, dtypes, ops
    from tensorflow.python.ops import gen_resource_variable_ops as operations

    if _model.begun or _model.live is None:
        return None
    manifest = _manifest()
    if _model.live:
        text = operations.read_variable_op(manifest, dtype=dtypes.string).numpy()
        held = {Named(*entry) for entry in json.loads(text)}
        differs = difference(held, _model.names, _model.without_value)
        if differs is not None:
            operations.destroy_resource_op(manifest)
            # These will not be created again.
            for named in held - _model.names:
                with ops.device(named.device):
                    handle = operations.var_handle_op(
                        dtype=dtypes.float32, shape=[], shared_name=named.name, name="forgotten"
                    )
                    operations.destroy_resource_op(handle, ignore_lookup_error=True)
            return differs
    else:
        with ops.device(f"{_SERVERS}/task:0"):
            text = constant_op.constant(json.dumps(sorted(_model.names)), dtypes.string)
            operations.assign_variable_op(manifest, text)
    _model.begun = True
    return None


def difference(held: Collection[Named], created: Collection[Named], without_value: Collection[Named]) -> str | None:
    """How the variables that a chief has created differ from the manifest of those on the servers, as a clause.

    A variable that was created after the first step is not in the manifest, but has a value. One of the manifest may
    have none: the script has deleted it.
    """
    if lost := sorted(set(held) - set(created)):
        return f"the script does not create {_first_of(lost)} any more"
    new = sorted(set(without_value) - set(held))
    return f"the servers have no {_first_of(new)}" if new else None


def _first_of(variables: Sequence[Named]) -> str:
    return f"{variables[0]}{f' and {len(variables) - 1} more' if len(variables) > 1 else ''}"


def _type_and_shape(dtype: Any, shape: Any) -> str:
    """A dtype and a shape as they are in a name, such as `float32[64,4]`; `?` for an unknown part."""
    from tensorflow.python.framework import dtypes, tensor_shape

    known = tensor_shape.as_shape(shape)
    sizes = "?"
    if known.rank is not None:
        sizes = f"[{','.join('?' if size is None else str(size) for size in known.as_list())}]"
    return f"{dtypes.as_dtype(dtype).name}{sizes}"


def _manifest() -> Any:
    """The handle of the manifest, a variable on the first server."""
    from tensorflow.python.framework import dtypes, ops
    from tensorflow.python.ops import gen_resource_variable_ops as operations

    with ops.device(f"{_SERVERS}/task:0"):
        return operations.var_handle_op(dtype=dtypes.string, shape=[], shared_name=f"{_PREFIX}/whole", name="whole")
