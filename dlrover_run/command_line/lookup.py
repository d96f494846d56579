"""Finds on this machine what the command line names, before anything is started.

A worker would find out too, but only after a start, once for each worker and once more for each restart.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from dlrover_run.spec import SpecError

STANDARD_INPUT = "-"
"""What Python takes for a program on its standard input; nothing on disk stands for it."""

REMOVED = "a working directory that has been removed"


def _working_directory() -> str | None:
    """Its path; None when it has been removed, which stops no program that is named by an absolute path."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def find_script(path: str) -> None:
    """Refuse a script that Python could not run: neither a file nor a directory with a `__main__` in it."""
    if path == STANDARD_INPUT:
        return
    if os.path.isdir(path):
        if not any(os.path.exists(os.path.join(path, name)) for name in ("__main__.py", "__main__.pyc")):
            raise SpecError(f"The script {path!r} is a directory without a __main__.py: name a file, or add one.")
        return
    if not os.path.exists(path):
        where = "" if os.path.isabs(path) else f" in {_working_directory() or REMOVED}"
        raise SpecError(f"The script {path!r} does not exist{where}: check the path (-m runs a module instead).")
    if not os.access(path, os.R_OK):
        raise SpecError(f"The script {path!r} cannot be read by this user: change its permissions.")


def find_program(name: str, environ: Mapping[str, str], what: str = "program") -> None:
    """Refuse a program that the system could not execute, looked up in PATH unless it has a slash."""
    if os.sep in name:
        candidates = [name]
    else:
        candidates = [os.path.join(folder, name) for folder in environ.get("PATH", os.defpath).split(os.pathsep)]
    files = [path for path in candidates if os.path.isfile(path)]
    if any(os.access(path, os.X_OK) for path in files):
        return
    if files:
        raise SpecError(f"The {what} {name!r} is not executable: run `chmod +x {files[0]}`.")
    if os.path.isdir(name) and os.sep in name:
        raise SpecError(f"The {what} {name!r} is a directory: name a file in it.")
    where = "does not exist" if os.sep in name else "is not in PATH"
    raise SpecError(f"The {what} {name!r} {where}: check its name, or give its path.")


ASK_TIMEOUT = 60.0
"""Seconds that another interpreter has to start and to look for a module. One on a cold network disk takes several.
After this the job is started without an answer, and its processes find out."""

_MISSING, _NO_PACKAGE = 3, 4

_LOOK = f"""
import importlib.util, sys
try:
    spec = importlib.util.find_spec(sys.argv[1])
except ValueError:
    sys.exit(0)
sys.exit({_MISSING} if spec is None else {_NO_PACKAGE} if spec.submodule_search_locations is None else 0)
"""


class Asked(NamedTuple):
    """What another interpreter knows of a module: whether it is `there`, and whether it is a `package`. Both are True
    where it gives no answer, as a program that is no Python."""

    there: bool = True
    package: bool = True


def ask_interpreter(python: str, module: str, environ: Mapping[str, str]) -> Asked:
    """Have another interpreter look for a topmost module or package, where the processes of a job would look for it.
    Nothing of the user's is imported."""
    import subprocess

    try:
        done = subprocess.run(
            [python, "-c", _LOOK, module],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=dict(environ),
            timeout=ASK_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Asked()
    return Asked(there=done.returncode != _MISSING, package=done.returncode not in (_MISSING, _NO_PACKAGE))


def find_module(name: str, environ: Mapping[str, str], python: str = sys.executable) -> None:
    """Refuse a module whose topmost package the interpreter of the job cannot find; nothing of the user's is imported.

    What lies below the topmost package cannot be known without running the package, so that is left to the worker.
    """
    here = _working_directory()
    if python == sys.executable:
        found, where = _look(name.partition(".")[0], here, environ), "installed"
    else:
        found, where = ask_interpreter(python, name.partition(".")[0], environ), f"installed for {python}"
    if not found.there:
        raise SpecError(
            f"The module {name!r} is neither in {here or REMOVED} nor {where}: check its name, or set PYTHONPATH."
        )
    if name.endswith(".py") and not found.package:
        raise SpecError(f"The module {name!r} is named like a file: write -m {name[:-3]}, or leave -m out.")


def _look(top: str, here: str | None, environ: Mapping[str, str]) -> Asked:
    """The same of this interpreter, which has another working directory first in its path than a worker."""
    import importlib.machinery
    import importlib.util

    paths = list(filter(None, [here, *environ.get("PYTHONPATH", "").split(os.pathsep)]))
    spec = importlib.machinery.PathFinder.find_spec(top, [*paths, *sys.path])
    if spec is None:
        try:
            spec = importlib.util.find_spec(top)
        except ValueError:
            spec = None
    return Asked(there=spec is not None, package=spec is not None and spec.submodule_search_locations is not None)


def find_package(name: str, extra: str, what_for: str) -> None:
    """Refuse to go on without an installed package, which is looked up and not imported; `extra` brings it."""
    import importlib.util

    try:
        spec = importlib.util.find_spec(name)
    except ValueError:
        spec = None
    if spec is None:
        raise SpecError(
            f"{what_for} needs the package {name}, which is not installed: pip install 'dlrover-run[{extra}]'."
        )


def find_directory(place: str, path: str) -> None:
    """Refuse a directory that can never be made, since it is, or lies below, a plain file."""
    if path == os.devnull:
        return
    if not os.path.isabs(path) and _working_directory() is None:
        raise SpecError(f"{place} {path!r} cannot be made in {REMOVED}: give an absolute path.")
    ancestor = absolute(path)
    while not os.path.lexists(ancestor):
        ancestor = os.path.dirname(ancestor)
    if not os.path.isdir(ancestor):
        raise SpecError(f"{place} {path!r} cannot be made, since {ancestor} is not a directory: name another place.")


def read_file(place: str, path: str, most: int) -> bytes:
    """The first `most` bytes of a file; refuse one that cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError as error:
        raise SpecError(
            f"{place} {path!r} cannot be read ({error.strerror}): name a file that this user may read."
        ) from None


def absolute(path: str) -> str:
    """The path from the root of a file or a directory that was found."""
    return os.path.abspath(path)


def find_logs_plugin(name: str) -> None:
    """Refuse a `--logs-specs` that no installed package offers."""
    from importlib.metadata import entry_points

    offered = sorted(entry.name for entry in entry_points(group="torchrun.logs_specs"))
    if name not in offered:
        known = f"those installed are {', '.join(offered)}" if offered else "no installed package offers any"
        raise SpecError(f"--logs-specs {name!r} is not in the entry point group torchrun.logs_specs: {known}.")
