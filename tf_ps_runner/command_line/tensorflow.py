"""Finds TensorFlow in the interpreter of the script without importing it, before anything is started."""

from __future__ import annotations

import subprocess
import sys

from dlrover_run.command_line.entrypoint import INTERPRETER_VARIABLE
from dlrover_run.spec import SpecError

LOOK_TIMEOUT = 60.0
"""Seconds that another interpreter has to start and to look. One on a cold network disk takes several; after this the
job is begun without having looked, and the template says what it finds."""

_LOOK = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tensorflow') is None and 3)"


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
    try:
        done = subprocess.run([python, "-c", _LOOK], capture_output=True, timeout=LOOK_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode != 3
