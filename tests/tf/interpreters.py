"""The interpreters with TensorFlow: one with the newest version, and one with the last that has `tf.estimator`.

`make test` creates both; TF_PYTHON_221 and TF_PYTHON_215 override them. The interpreter of this process has neither. A
test gets one as its argument `tensorflow`: the newest, or the one that these marks select.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
from support.harness import only_long

CHECKOUT = Path(__file__).parents[2]

FOLDERS = {"2.21": ".venv-tf", "2.15": ".venv-tf215"}

COMMANDS = {"2.21": "make .venv-tf/.made", "2.15": "make .venv-tf215/.made PYTHON=python3.11"}

tensorflow_215 = pytest.mark.parametrize("tensorflow", ["2.15"], indirect=True)
each_tensorflow = pytest.mark.parametrize("tensorflow", [*FOLDERS], indirect=True)
newest_tensorflow_first = pytest.mark.parametrize("tensorflow", ["2.21", *only_long("2.15")], indirect=True)
"""Only `make test-long` also runs with the older one."""


def interpreter(version: str = "2.21") -> Path:
    """The interpreter with this TensorFlow; skips the test where there is none."""
    variable = f"TF_PYTHON_{version.replace('.', '')}"
    found = _found(FOLDERS[version], variable)
    if found is None:
        made = f"{FOLDERS[version]} (`{COMMANDS[version]}`)"
        pytest.skip(f"there is no TensorFlow in {made}, and {variable} names no interpreter with it")
    return found


@cache
def _found(folder: str, variable: str) -> Path | None:
    ours = CHECKOUT / folder
    # Without the mark that `make` creates last, an installation is in progress or was interrupted.
    if (ours / ".made").exists() and (ours / "bin" / "python").exists():
        return ours / "bin" / "python"
    theirs = os.environ.get(variable)
    return Path(theirs) if theirs else None
