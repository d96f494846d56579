"""Whether the workers run in another Python environment than the activated one, which explains a missing module."""

from __future__ import annotations

import os
from collections.abc import Mapping

_VARIABLES = ("VIRTUAL_ENV", "CONDA_PREFIX")
_MISSING = ("ModuleNotFoundError", "ImportError")


def explain_missing_module(error: str | None, python: str, environ: Mapping[str, str]) -> str | None:
    """A sentence for a worker that failed with `error`, such as `ModuleNotFoundError: x`, under the interpreter
    `python`; None if the error is another one, or no other environment is activated in `environ`.

    The launcher imports nothing of the script, so it may belong to another environment (`uv tool`, pipx) unnoticed.
    """
    if error is None or not error.partition(":")[0].endswith(_MISSING) or not python:
        return None
    # Not resolved: the interpreter of an environment is a link to that of another place.
    own = os.path.realpath(os.path.dirname(os.path.dirname(os.path.abspath(python))))
    for variable in _VARIABLES:
        active = environ.get(variable)
        if not active or os.path.realpath(active) == own:
            continue
        if variable == "CONDA_PREFIX" and environ.get("VIRTUAL_ENV"):
            continue  # A virtual environment that was made from a conda environment is active in it.
        return (
            f"The workers ran {python}, and {variable} is {active}: install dlrover-run there, or set "
            f"PYTHON_EXEC={os.path.join(active, 'bin', 'python')}."
        )
    return None
