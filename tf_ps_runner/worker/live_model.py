"""A model of `ParameterServerStrategy` that outlives its chief.

TensorFlow gives variables that are made eagerly a name which nobody else can know, so that a chief that comes back
makes all of them anew beside the old ones, and goes on from its last checkpoint. With names that the next chief will
give again it finds what the servers hold: what it then assigns, until it schedules its first step, is left out, for
that is what it begins with or has read from a checkpoint. A mark on the first server says that it was once
whole.

The names hold because the script makes the same variables in the same order each time, and no server outlives its
version.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tf_ps_runner.worker.patching import Patch, place, takes, wrap
from tf_ps_runner.worker.task import task

_PREFIX = "tf_ps_runner"

_SERVERS = "/job:ps"


class _Model:
    """What this chief knows of the variables that it has made on servers."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: Counter[tuple[str, str]] = Counter()
        # None until the servers were asked.
        self.live: bool | None = None
        self.begun = False
        # What stands in the place of TensorFlow's function that makes a variable, once it is there.
        self.make: object = None

    def name(self, device: str, name: str) -> str:
        """What a variable is called on its server: the same in each process of this version that runs the script."""
        with self.lock:
            number = self.made[device, name]
            self.made[device, name] += 1
        return f"{_PREFIX}/{name}/{number}"


_model = _Model()


def found() -> bool:
    """Whether this chief has come back into a model that is whole."""
    return bool(_model.live)


def change_variables(module: Any) -> Sequence[Patch]:
    """Name the variables on servers, and keep what they hold. For `tensorflow.python.ops.resource_variable_ops`."""
    operations = place(module, "gen_resource_variable_ops")
    context = place(module, "context")
    takes(place(operations, "var_handle_op"), "shape", "dtype", "shared_name", "name")
    takes(place(operations, "assign_variable_op"), "resource", "value")
    is_initialized, shape_of = place(operations, "var_is_initialized_op"), place(operations, "variable_shape")
    anonymous = place(context, "anonymous_name")
    place(context, "executing_eagerly"), place(context, "context"), place(place(context, "Context"), "device_name")

    def make(original: Any, *args: Any, **kwargs: Any) -> Any:
        device = str(context.context().device_name or "")
        if _model.live is None or kwargs.get("shared_name") != anonymous() or _SERVERS not in device:
            return original(*args, **kwargs)
        kwargs["shared_name"] = _model.name(device, str(kwargs.get("name")))
        handle = original(*args, **kwargs)
        if _model.live and bool(is_initialized(handle)):
            shape = kwargs["shape"]
            same = not shape.is_fully_defined() or shape_of(handle).numpy().tolist() == shape.as_list()
            handle._tf_ps_kept = same
            handle._tf_ps_first = same
        return handle

    def assign(original: Any, resource: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(resource, "_tf_ps_kept", False) and (resource._tf_ps_first or not _model.begun):
            # The first value of a variable that is made after the first step is left out like all others before it.
            resource._tf_ps_first = False
            return None if context.executing_eagerly() else _nothing()
        return original(resource, value, *args, **kwargs)

    patches = [wrap(operations, "var_handle_op", make), wrap(operations, "assign_variable_op", assign)]
    _model.make = patches[0].replacement
    return patches


def look(operations: Any, device: Any) -> None:
    """Ask the first server whether the model was whole, once the chief is connected to all of them."""
    mine = task()
    if mine is None or not mine.chief or _model.live is not None:
        return
    if operations.var_handle_op is not _model.make:
        # Its variables have names that nobody can know, so that no model can be found again.
        return
    _model.live = bool(operations.var_is_initialized_op(_mark(operations, device)))


def begin(operations: Any, device: Any, constant: Any) -> None:
    """The model is whole: say so on the first server, and take all that is assigned from here on."""
    if _model.begun or _model.live is None:
        return
    _model.begun = True
    if not _model.live:
        with device(f"{_SERVERS}/task:0"):
            value = constant(1)
            operations.assign_variable_op(_mark(operations, device), value)


def _nothing() -> Any:
    from tensorflow.python.ops import gen_control_flow_ops

    return gen_control_flow_ops.no_op()


def _mark(operations: Any, device: Any) -> Any:
    from tensorflow.python.framework import dtypes

    with device(f"{_SERVERS}/task:0"):
        return operations.var_handle_op(dtype=dtypes.int32, shape=[], shared_name=f"{_PREFIX}/whole", name="whole")
