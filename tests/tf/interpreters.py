"""Which interpreters have TensorFlow: one with the newest, and one with the last that has `tf.estimator`.

    from interpreters import python_221

`make test` makes both; TF_PYTHON_221 and TF_PYTHON_215 name others. What this process runs in has none of them.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


def python_221() -> Path:
    """An interpreter with TensorFlow 2.21 and tf-keras; skips the test where there is none."""
    return _interpreter(".venv-tf", "TF_PYTHON_221", "make .venv-tf/.made")


def python_215() -> Path:
    """An interpreter with TensorFlow 2.15 and its estimator; skips the test where there is none."""
    return _interpreter(".venv-tf215", "TF_PYTHON_215", "make .venv-tf215/.made PYTHON=python3.11")


@cache
def _found(folder: str, variable: str) -> Path | None:
    ours = CHECKOUT / folder
    # Without the mark that `make` leaves last, an installation is going on or was broken off.
    if (ours / ".made").exists() and (ours / "bin" / "python").exists():
        return ours / "bin" / "python"
    theirs = os.environ.get(variable)
    return Path(theirs) if theirs else None


def _interpreter(folder: str, variable: str, command: str) -> Path:
    found = _found(folder, variable)
    if found is None:
        pytest.skip(f"there is no TensorFlow in {folder} (`{command}`), and {variable} names no interpreter with it")
    return found
