"""The first code in a worker that runs Python, before the script. It changes neither the command line nor `__main__`.

A spawned worker finds this file through PYTHONPATH, because Python imports `sitecustomize` when it starts. All traces
are removed at once, so that the script and its children see the path as the user gave it, and the `sitecustomize` of
the user is imported instead. In a worker that is forked from the template, the template calls `begin`.

It runs in the interpreter of the user, which may lack this package, so it needs the standard library only.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

VARIABLE = "DLROVER_WORKER_START"
"""What to install in the worker, separated by commas; removed before the script begins."""

OPTIMIZER_STEPS = "optimizer-steps"
"""Count the steps of torch's optimizer (`observe/optimizer_steps.py`)."""

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(HERE)


def begin() -> None:
    """Install what the environment names. A defect of ours must not end the worker: it is printed, in one line."""
    wanted = os.environ.pop(VARIABLE, "").split(",")
    try:
        if OPTIMIZER_STEPS in wanted:
            page = load("dlrover_run.observe.page")
            load("dlrover_run.observe.optimizer_steps").install(page.add, int(page.StepSource.OPTIMIZER))
    except Exception as error:
        print(f"dlrover-run: a worker starts without {wanted}: {error!r}; please report it", file=sys.stderr)


def load(name: str) -> Any:
    """A module of this package, wherever the launcher is installed. It gets its full name: a script that imports it too
    must get the same module, because there is one writer of a page."""
    if name not in sys.modules:
        path = os.path.join(PACKAGE, *name.split(".")[1:]) + ".py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def restored(pythonpath: str) -> str:
    """The value of PYTHONPATH without this directory."""
    return os.pathsep.join(entry for entry in pythonpath.split(os.pathsep) if entry != HERE)


def _remove_traces(own: ModuleType) -> None:
    sys.path[:] = [entry for entry in sys.path if entry != HERE]
    sys.path_importer_cache.pop(HERE, None)
    if rest := restored(os.environ.get("PYTHONPATH", "")):
        os.environ["PYTHONPATH"] = rest
    else:
        os.environ.pop("PYTHONPATH", None)
    del sys.modules["sitecustomize"]
    try:
        importlib.import_module("sitecustomize")  # The user's.
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        # Python expects the module there that it has just imported.
        sys.modules.setdefault("sitecustomize", own)


if __name__ == "sitecustomize":
    begin()
    _remove_traces(sys.modules[__name__])
