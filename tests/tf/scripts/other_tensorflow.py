"""`strategy_train.py` with a TensorFlow whose coordinator has another name for the field RENAMED."""

from __future__ import annotations

import inspect
import os
import runpy
from pathlib import Path
from typing import Any

from tf_ps_runner.worker import patching

COORDINATOR = "tensorflow.python.distribute.coordinator.cluster_coordinator"


def rename(module: Any) -> tuple[()]:
    """Run the module's code again, with the other name in it."""
    source = inspect.getsource(module).replace(os.environ["RENAMED"], "_called_otherwise")
    exec(compile(source, module.__file__, "exec"), vars(module))
    return ()


# Before the bootstrap patches the class.
patching._changes[COORDINATOR].insert(0, ("nothing", rename))
import tensorflow as tf  # noqa: E402

wrapped = hasattr(tf.distribute.coordinator.ClusterCoordinator.schedule, "__wrapped__")
print("schedule is", "changed" if wrapped else "as TensorFlow has it", flush=True)
runpy.run_path(str(Path(__file__).with_name("strategy_train.py")), run_name="__main__")
