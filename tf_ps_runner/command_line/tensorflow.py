"""Finds TensorFlow in the interpreter of the script without importing it, before anything is started."""

from __future__ import annotations

import os
import sys

from dlrover_run.command_line import lookup
from dlrover_run.command_line.entrypoint import INTERPRETER_VARIABLE
from dlrover_run.spec import SpecError


def require_tensorflow(python: str) -> None:
    """Refuse an interpreter without TensorFlow. Raises SpecError."""
    if not has_tensorflow(python):
        raise SpecError(
            f"There is no TensorFlow in {python}: install it there (pip install 'dlrover-run[tf]'), or set "
            f"{INTERPRETER_VARIABLE} to the interpreter that has it."
        )


def has_tensorflow(python: str) -> bool:
    """Whether it can be found there; also where nobody can tell."""
    if python == sys.executable:
        import importlib.util

        try:
            return importlib.util.find_spec("tensorflow") is not None
        except ValueError:
            return True
    return lookup.ask_interpreter(python, "tensorflow", os.environ).there
