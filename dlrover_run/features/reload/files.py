"""Files as `changes` compares them: their signatures, those below a directory, and whether they can be compiled."""

from __future__ import annotations

import contextlib
import glob
import os
import warnings
from collections.abc import Iterable, Iterator
from importlib.util import cache_from_source

from dlrover_run.features.reload.changes import Signature

MAX_FILES = 5000
"""Files that are looked at: each look takes a microsecond or two for each."""

MAX_LOCK = 60.0
"""Seconds after which a lock of git no longer delays a restart."""

_LEFT_OUT = ("__pycache__", "node_modules", "site-packages", "dist-packages")
"""Directories without files that a person edits; those whose names begin with a dot are left out too."""


def snapshot(paths: Iterable[str]) -> dict[str, Signature]:
    """The signatures of files. A file that cannot be read counts as one that is not there."""
    return {path: _signature(path) for path in paths}


def _signature(path: str) -> Signature:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def python_files(directories: Iterable[str], *, deep: bool = True) -> list[str]:
    """The Python files in directories, and below them if `deep`: at most `MAX_FILES`."""
    found: list[str] = []
    for directory in directories:
        for path, names in _walk(directory, deep):
            found += [os.path.join(path, name) for name in names if name.endswith(".py")]
            if len(found) >= MAX_FILES:
                return found[:MAX_FILES]
    return found


def _walk(directory: str, deep: bool) -> Iterator[tuple[str, list[str]]]:
    for path, below, names in os.walk(directory):
        below[:] = sorted(name for name in below if deep and not (name.startswith(".") or name in _LEFT_OUT))
        if "pyvenv.cfg" not in names:
            yield path, names
        else:
            below.clear()


def syntax_problem(paths: Iterable[str]) -> str:
    """Where the first of these files with a syntax error has it, and what is wrong; empty if none has one."""
    for path in paths:
        if not path.endswith(".py"):
            continue
        try:
            with open(path, "rb") as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(file.read(), path, "exec", dont_inherit=True)
        except SyntaxError as error:
            line = f" line {error.lineno}" if error.lineno else ""
            text = f": {error.text.strip()[:80]}" if error.text and error.text.strip() else ""
            return f"{shown(path)}{line}: {error.msg}{text}"
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            return f"{shown(path)}: {error}"
    return ""


def git_writes(paths: Iterable[str], now: float) -> bool:
    """Whether git writes files beside one of these at time `now`, in seconds of the time of the day: it has a lock as
    long as a checkout takes. One that is older than `MAX_LOCK` was left behind."""
    for directory in {os.path.dirname(path) for path in paths}:
        above = directory
        while not os.path.exists(os.path.join(above, ".git")) and above != os.path.dirname(above):
            above = os.path.dirname(above)
        try:
            if now - os.stat(os.path.join(_git_directory(above), "index.lock")).st_mtime < MAX_LOCK:
                return True
        except OSError:
            continue
    return False


def _git_directory(above: str) -> str:
    """The directory with the lock of the tree in `above`; of a worktree, its file .git names it."""
    path = os.path.join(above, ".git")
    if os.path.isfile(path):
        with open(path, errors="replace") as file:
            path = os.path.join(above, file.readline().partition("gitdir:")[2].strip())
    return path


def forget_bytecode(paths: Iterable[str]) -> None:
    """Remove the compiled code of Python files that were saved. Python takes it for that of the file if the size and
    the second of the last change are the same, as they are after two saves of one figure in one second."""
    for path in paths:
        if not path.endswith(".py"):
            continue
        folder = os.path.dirname(cache_from_source(path))
        name = glob.escape(os.path.join(folder, os.path.basename(path).removesuffix(".py")))
        for compiled in glob.glob(f"{name}.*.pyc"):
            # Another user's: then it is as without this launcher.
            with contextlib.suppress(OSError):
                os.remove(compiled)


def shown(path: str) -> str:
    """The path for people: relative to the working directory where it is below that."""
    try:
        below = os.path.relpath(path)
    except (OSError, ValueError):
        return path
    return path if below.startswith("..") else below
