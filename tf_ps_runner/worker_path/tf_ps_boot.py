"""The first code in each TensorFlow process that `tf-ps-run` starts, in the interpreter of the script.

As a module it makes `tf_ps_runner` importable there, wherever the launcher is installed, and has TensorFlow patched
once the script imports it. It reads no environment and opens nothing, so that a template that has imported it can be
forked. As a program (`python -u tf_ps_boot.py script.py ARGS`, or `-m module ARGS`) it also runs the script, as the
interpreter would have run it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import runpy
import sys
from types import ModuleType, TracebackType
from typing import Any

HERE = os.path.abspath(__file__)

CANNOT_OPEN = 2
"""The interpreter's exit code for a script that cannot be read."""


def add_package() -> None:
    """Make `tf_ps_runner` importable, and no other package beside it."""
    if "tf_ps_runner" in sys.modules:
        return
    directory = os.path.dirname(os.path.dirname(HERE))
    package = ModuleType("tf_ps_runner")
    package.__path__ = [directory]
    package.__file__ = os.path.join(directory, "__init__.py")
    package.__spec__ = importlib.machinery.ModuleSpec("tf_ps_runner", None, is_package=True)
    package.__spec__.submodule_search_locations = package.__path__
    sys.modules["tf_ps_runner"] = package


def install() -> None:
    """Have TensorFlow patched."""
    add_package()
    from tf_ps_runner.worker import patches

    patches.install()


def run_program() -> None:
    """Run the program that the arguments name, in the existing `__main__`."""
    from tf_ps_runner.worker.agent_connection import agent
    from tf_ps_runner.worker.task import task

    agent().claim()
    own_task = task()
    if own_task is not None and own_task.ready_at_start:
        agent().report_once("ready")
    try:
        _run(sys.argv[1:])
    except BaseException:
        _hide_own_frames()
        raise


def _run(arguments: list[str]) -> None:
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        print(f"usage: {os.path.basename(HERE)} SCRIPT [ARGS] | -m MODULE [ARGS]", file=sys.stderr)
        raise SystemExit(CANNOT_OPEN)
    _remove_own_arguments(len(sys.argv) - len(arguments))
    names = vars(sys.modules["__main__"])
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    if arguments[0] == "-m":
        sys.argv[:] = ["-m", *arguments[2:]]
        _put_first(os.getcwd())
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        return
    sys.argv[:] = arguments
    path = os.path.join(os.getcwd(), arguments[0])
    if _is_runnable_directory(path):
        sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    _put_first(os.path.dirname(os.path.realpath(path)))
    exec(_code(path, names), names)


def _remove_own_arguments(ours: int) -> None:
    """Remove this file from `sys.path` and `sys.orig_argv`."""
    if not getattr(sys.flags, "safe_path", False) and os.path.realpath(sys.path[0]) == os.path.dirname(HERE):
        del sys.path[0]
    if hasattr(sys, "orig_argv"):
        at = len(sys.orig_argv) - len(sys.argv)
        del sys.orig_argv[at : at + ours]


def _put_first(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, directory)


def _is_runnable_directory(path: str) -> bool:
    """Whether this is a directory or an archive, which runs by its `__main__.py`."""
    for hook in sys.path_hooks:
        try:
            hook(path)
        except ImportError:
            continue
        return True
    return False


def _code(path: str, names: dict[str, Any]) -> Any:
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        where = f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        print(where, file=sys.stderr)
        raise SystemExit(CANNOT_OPEN) from None
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    names.update(__doc__=None, __file__=path, __cached__=None, __loader__=loader, __spec__=None, __package__=None)
    return compile(source, path, "exec", dont_inherit=True)


def _hide_own_frames() -> None:
    """Remove the frames of this file from the traceback that the interpreter is about to print."""
    hook = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_NAMES:
            trace = trace.tb_next
        value.__traceback__ = sys.last_traceback = trace
        sys.excepthook = hook
        hook(kind, value, trace)

    sys.excepthook = excepthook


_OWN_NAMES = {HERE, __file__, run_program.__code__.co_filename}
"""The names of this file in a frame."""


def _as_module() -> Any:
    """This file under its own name: `__main__` belongs to the script alone."""
    loaded = sys.modules.get("tf_ps_boot")
    if loaded is None:
        spec = importlib.util.spec_from_file_location("tf_ps_boot", HERE)
        assert spec is not None
        assert spec.loader is not None
        loaded = sys.modules["tf_ps_boot"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return loaded


if __name__ == "__main__":
    _as_module().run_program()
else:
    install()
