"""Finds on this machine what the command line names, before anything is started.

A worker would find out too, but only after a start, once for each worker and once more for each restart.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from dlrover_run.command_line import values
from dlrover_run.spec import SpecError

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from dlrover_run.command_line.sources import FlagValues

STANDARD_INPUT = "-"
"""Python reads the program from its standard input; no file has to exist."""

DELETED = "a working directory that has been removed"


def working_directory() -> str | None:
    """Its path; None when it has been removed, which does not matter to a program with an absolute path. Called by the
    checks of a module and of a directory here, and for the message about a script that does not exist."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def check_program(name: str, environ: Mapping[str, str], what: str = "program") -> None:
    """Refuse a program that cannot be executed; it is looked up in PATH unless it contains a slash. Called for a
    program of `--no-python`, for the interpreter that a variable names, and for a command of a feature."""
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


def command_words(source: str, text: str, environ: Mapping[str, str], example: str) -> tuple[str, ...]:
    """The words of a command that is run without a shell; `example` is one. Raises SpecError for one that cannot be
    run here. Called by features that run a command of the user."""
    # Imported only here: other launches do not wait for it.
    import shlex

    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise values.invalid(
            source, text, f"cannot be split into words ({error})", "close each quotation mark"
        ) from None
    if not words:
        raise SpecError(f"{source} names no program: give a command such as {example}.")
    check_program(words[0], environ, f"program of {source}")
    return words


PROBE_TIMEOUT = 60.0
"""Seconds that another interpreter has to start and to look for a module. On a cold network disk it takes several.
After this the job is started without an answer, and its processes find out."""

_MISSING, _NOT_A_PACKAGE = 3, 4

_PROBE = f"""
import importlib.util, sys
try:
    spec = importlib.util.find_spec(sys.argv[1])
except ValueError:
    sys.exit(0)
sys.exit({_MISSING} if spec is None else {_NOT_A_PACKAGE} if spec.submodule_search_locations is None else 0)
"""


class ModuleProbe(NamedTuple):
    """Whether an interpreter finds a module (`exists`), and whether it is a `package`. Both are True where the
    interpreter gives no answer, as a program that is not Python."""

    exists: bool = True
    package: bool = True


def probe_interpreter(python: str, module: str, environ: Mapping[str, str]) -> ModuleProbe:
    """Ask another interpreter for a top-level module, with the search path that the processes of the job will have.
    Nothing of the user's is imported. Called when the job has an interpreter other than this one: for the module of
    `--module`, and by tf-ps-run for its framework."""
    import subprocess

    try:
        done = subprocess.run(
            [python, "-c", _PROBE, module],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=dict(environ),
            timeout=PROBE_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ModuleProbe()
    return ModuleProbe(exists=done.returncode != _MISSING, package=done.returncode not in (_MISSING, _NOT_A_PACKAGE))


def check_module(name: str, environ: Mapping[str, str], python: str = sys.executable) -> None:
    """Refuse a module whose top-level package the interpreter of the job cannot find; nothing is imported.

    Submodules cannot be looked up without importing the package, so that is left to the worker.
    """
    from importlib.machinery import PathFinder

    here = working_directory()
    top = name.partition(".")[0]
    if python == sys.executable:
        # The search path of this interpreter begins with another directory than a worker's.
        first = filter(None, [here, *environ.get("PYTHONPATH", "").split(os.pathsep)])
        spec = PathFinder.find_spec(top, [*first, *sys.path]) or _find_spec(top)
        exists, package = spec is not None, spec is not None and spec.submodule_search_locations is not None
        where = "installed"
    else:
        exists, package = probe_interpreter(python, top, environ)
        where = f"installed for {python}"
    if not exists:
        raise SpecError(
            f"The module {name!r} is neither in {here or DELETED} nor {where}: check its name, or set PYTHONPATH."
        )
    if name.endswith(".py") and not package:
        raise SpecError(f"The module {name!r} is named like a file: write -m {name[:-3]}, or leave -m out.")


def _find_spec(name: str) -> ModuleSpec | None:
    import importlib.util

    try:
        return importlib.util.find_spec(name)
    except ValueError:
        return None


def require_package(name: str, extra: str, what_for: str) -> None:
    """Refuse to go on without an installed package, which is looked up and not imported; `extra` installs it."""
    if _find_spec(name) is None:
        raise SpecError(
            f"{what_for} needs the package {name}, which is not installed: pip install 'dlrover-run[{extra}]'."
        )


def check_directory(source: str, path: str) -> None:
    """Refuse a directory that cannot be created, because it is, or lies below, a file. Called when the command line is
    read: for the directories of logs, of the event log, of what the script saves, and of a master's state."""
    if path == os.devnull:
        return
    if not os.path.isabs(path) and working_directory() is None:
        raise SpecError(f"{source} {path!r} cannot be created in {DELETED}: give an absolute path.")
    ancestor = os.path.abspath(path)
    while not os.path.lexists(ancestor):
        ancestor = os.path.dirname(ancestor)
    if not os.path.isdir(ancestor):
        raise SpecError(f"{source} {path!r} cannot be created, since {ancestor} is not a directory: give another path.")


def journal_directory(flags: FlagValues) -> str | None:
    """The directory that `--journal` names; `/dev/null` forbids the event log. Raises SpecError. Called by both
    launchers when they read the command line."""
    given = flags.get("journal")
    if not given.text:
        return None
    check_directory(*given)
    return given.text if given.text == os.devnull else os.path.abspath(given.text)


def read_file(source: str, path: str, limit: int) -> bytes:
    """The first `limit` bytes of a file. Raises SpecError when it cannot be read. Called for the file of a token or a
    password, and for TLS files."""
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError as error:
        raise SpecError(
            f"{source} {path!r} cannot be read ({error.strerror}): name a file that this user may read."
        ) from None


def check_logs_plugin(name: str) -> None:
    """Refuse a `--logs-specs` that no installed package provides."""
    from importlib.metadata import entry_points

    available = sorted(entry.name for entry in entry_points(group="torchrun.logs_specs"))
    if name not in available:
        known = f"give one of {', '.join(available)}" if available else "no installed package provides one"
        raise SpecError(f"--logs-specs {name!r} is not in the entry point group torchrun.logs_specs: {known}.")
