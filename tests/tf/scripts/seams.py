"""Prints, as JSON, which changes this interpreter's TensorFlow does not allow. Run with `tf_ps_boot` on the path."""

from __future__ import annotations

import importlib
import importlib.util
import json

import tf_ps_boot  # noqa: F401

from tf_ps_runner.worker import patching

# The estimator is a separate package, which TensorFlow since 2.16 does not have.
wanted = [name for name in patching.pending_modules() if importlib.util.find_spec(name.partition(".")[0])]

import tensorflow as tf  # noqa: E402

for module in wanted:
    importlib.import_module(module)
print(json.dumps({"version": tf.__version__, "changed": wanted, "missing": patching.missing_patches()}))
