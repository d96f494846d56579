"""Turn a process that was just forked from the template into a worker that looks like a fresh `python -u script args`.

The differences are removed in this order: the process (session, parent, descriptors, directory, environment), the state
that libraries keep per process (random generators, keys), the interpreter (streams, path, `__main__`). The remaining
differences are listed in docs/forkserver.md, among them one stack frame below the script, and a hash seed that all
workers of a template share.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import importlib.machinery
import importlib.util
import marshal
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CodeType, TracebackType
from typing import Any, TextIO

from . import process_title
from .importer import OURS, ImportRecorder

PR_SET_PDEATHSIG = 1

EXIT_ABANDONED = 111
"""The exit code of a worker whose agent or template died before the worker could start."""

EXIT_NOT_STARTED = 112
"""The exit code of a worker whose directory, descriptors or CPUs could not be set."""

Environment = Mapping[str, str]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit at once if the parent is not (any more) `parent`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(EXIT_ABANDONED)


def env_delta(before: Environment, after: Environment) -> dict[str, tuple[str | None, str | None]]:
    """The changes of the environment by the interpreter's start and by imports: name -> (old, new)."""
    names = [*before, *(name for name in after if name not in before)]
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def apply_env_delta(env: Environment, change: Mapping[str, tuple[str | None, str | None]]) -> dict[str, str]:
    """The environment as the same imports would change it: a change applies if the old value is the same."""
    result = dict(env)
    for name, (old, new) in change.items():
        if result.get(name) == old:
            if new is None:
                result.pop(name, None)
            else:
                result[name] = new
    return result


def set_environment(environment: Environment) -> None:
    """Give this process these variables and no others."""
    # Through os.environ, so that C's getenv sees the change too.
    os.environ.clear()
    os.environ.update(environment)
    if "TZ" in environment:
        time.tzset()


class TemplateState:
    """The template's state before it imported anything, which its workers restore."""

    def __init__(self, boot_code: CodeType) -> None:
        main = vars(sys.modules["__main__"])
        self.boot_code = boot_code
        self.main_names = {name: main[name] for name in main if name.startswith("__")}
        self.environment = _first_environment()
        self.safe_path = bool(getattr(sys.flags, "safe_path", False))
        self.python = sys.orig_argv[0]


def _first_environment() -> dict[str, str]:
    """The environment with which this process was started. Without /proc that of this moment, in which a
    `sitecustomize` may have changed a variable already."""
    try:
        with open("/proc/self/environ", "rb") as environ:
            entries = environ.read().split(b"\0")
    except OSError:
        return dict(os.environ)
    pairs = [os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry]
    return {name: value for name, _, value in pairs}


class Worker:
    """A process that becomes a worker: `command` is the request as `workers/template_client.py` sends it.

    `streams` are the descriptors for 0, 1 and 2, `ours` all descriptors that the worker must not have.
    """

    def __init__(
        self,
        template: TemplateState,
        command: Mapping[str, Any],
        streams: Sequence[int],
        ours: Sequence[int],
        recorder: ImportRecorder | None = None,
    ) -> None:
        self._template = template
        self._command = command
        self._streams = streams
        self._ours = ours
        self._recorder = recorder

    def initialize(self, search_path: list[str], finders: list[Any], own_places: Sequence[str]) -> None:
        """Do everything but load the program."""
        command = self._command
        self._take_descriptors()
        os.chdir(command["cwd"])
        if command["affinity"] is not None:
            os.sched_setaffinity(0, command["affinity"])
        set_environment(apply_env_delta(command["env"], env_delta(self._template.environment, os.environ)))
        process_title.set_process_title(command["argv_title"], command["env"])
        _renew_per_process_state()
        _renew_streams()
        sys.path[:] = search_path
        sys.meta_path[:] = [self._recorder, *finders] if self._recorder is not None else finders
        for entry in ("", ".", *own_places):
            sys.path_importer_cache.pop(entry, None)
        importlib.invalidate_caches()
        sys.orig_argv[:] = command["argv_title"]
        # The module object stays: libraries, multiprocessing among them, may hold a reference to it.
        main = vars(sys.modules["__main__"])
        for name in main.keys() - self._template.main_names.keys():
            del main[name]
        for name in [name for name in sys.modules if name.partition(".")[0] == OURS]:
            del sys.modules[name]
        if command["start_code"] is not None:
            _begin(command["start_code"])

    def __enter__(self) -> Callable[[], object]:
        try:
            return self._load()
        except BaseException:
            self._hide_template_frames()
            raise

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self._hide_template_frames()

    def _load(self) -> Callable[[], object]:
        """The function to call, at the top of the stack, to run the program."""
        target, args = self._command["target"], self._command["args"]
        sys.argv[:] = [target, *args]
        if self._command["kind"] == "module":
            sys.argv[0] = "-m"
            self._put_first(os.getcwd())
            return partial(runpy._run_module_as_main, target)  # type: ignore[attr-defined]
        if self._command["kind"] == "run_path":
            self._put_first("")
            return partial(runpy.run_path, target, None, "__main__")
        path = target if os.path.isabs(target) else os.path.join(os.getcwd(), target)
        if _holds_a_program(path):
            sys.path.insert(0, path)
            return partial(runpy._run_module_as_main, "__main__", False)  # type: ignore[attr-defined]
        self._put_first(os.path.dirname(os.path.realpath(target)))
        names = vars(sys.modules["__main__"])
        code = self._code(path, names)
        return partial(exec, code, names)

    def _hide_template_frames(self) -> None:
        """Remove the frames of the template from the traceback that the interpreter is about to print."""
        hook = getattr(sys, "excepthook", None)
        if hook is None:
            return

        def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            while trace is not None and self._is_ours(trace):
                trace = trace.tb_next
            value.__traceback__ = sys.last_traceback = trace
            sys.excepthook = hook
            try:
                hook(kind, value, trace)
            except SystemExit:
                raise
            except BaseException as error:
                # The interpreter would print the same, but with the frame of this function in it.
                sys.stderr.write("Error in sys.excepthook:\n")
                within = error.__traceback__.tb_next if error.__traceback__ is not None else None
                sys.__excepthook__(type(error), error.with_traceback(within), within)
                sys.stderr.write("\nOriginal exception was:\n")
                sys.__excepthook__(kind, value, trace)

        sys.excepthook = excepthook

    def _is_ours(self, trace: TracebackType) -> bool:
        frame = trace.tb_frame
        return frame.f_code is self._template.boot_code or str(frame.f_globals.get("__name__")).startswith(OURS + ".")

    def _take_descriptors(self) -> None:
        for number, fd in enumerate(self._streams):
            os.dup2(fd, number)
        for fd in self._ours:
            os.close(fd)

    def _put_first(self, directory: str) -> None:
        if not self._template.safe_path:
            sys.path.insert(0, directory)

    def _code(self, path: str, names: dict[str, Any]) -> Any:
        try:
            with open(path, "rb") as file:
                source = file.read()
        except OSError as error:
            reason = f"[Errno {error.errno}] {error.strerror}"
            sys.stderr.write(f"{self._template.python}: can't open file {path!r}: {reason}\n")
            raise SystemExit(2) from None
        machinery = importlib.machinery
        compiled = path.endswith(".pyc")
        loader = machinery.SourcelessFileLoader if compiled else machinery.SourceFileLoader
        names.update(__file__=path, __cached__=None, __loader__=loader("__main__", path))
        return marshal.loads(source[16:]) if compiled else compile(source, path, "exec", dont_inherit=True)


def _begin(start_code: str) -> None:
    """Run what a spawned worker runs before its program; no name of it stays in `sys.modules`."""
    spec = importlib.util.spec_from_file_location("_dlrover_worker_start", start_code)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.begin()


def _holds_a_program(path: str) -> bool:
    """Whether this is a directory or an archive with a `__main__.py`."""
    for hook in sys.path_hooks:
        try:
            hook(path)
        except ImportError:
            continue
        return True
    return False


def _renew_per_process_state() -> None:
    """Renew the state that loaded libraries keep per process."""
    loaded = sys.modules
    if "random" in loaded:
        loaded["random"].seed()
    if "numpy.random" in loaded:
        loaded["numpy.random"].seed()
    if hasattr(loaded.get("torch"), "default_generator"):
        # Before an accelerator is used there is only the CPU's generator; its seed is random in a fresh interpreter.
        loaded["torch"].default_generator.seed()
    if hasattr(getattr(loaded.get("threading"), "_MainThread", None), "_set_native_id"):
        # Python 3.11 leaves the template's thread id in the copy.
        loaded["threading"].main_thread()._set_native_id()
    if "multiprocessing.process" in loaded:
        process = loaded["multiprocessing.process"]
        process.current_process().authkey = os.urandom(32)
        vars(process)["ORIGINAL_DIR"] = os.path.abspath(os.getcwd())
    if "multiprocessing.util" in loaded:
        # A finalizer runs only in the process that registered it.
        for finalizer in list(loaded["multiprocessing.util"]._finalizer_registry.values()):
            finalizer._pid = os.getpid()


def _renew_streams() -> None:
    """Reopen the standard streams as `python -u` does, in the same objects: libraries may hold references to them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        try:
            fcntl.fcntl(number, fcntl.F_GETFD)
            _renew(stream, number, f"<{name}>")
        except OSError:
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)


def _renew(stream: TextIO, fd: int, name: str) -> None:
    writes = fd != 0
    buffer: Any = open(fd, "wb" if writes else "rb", buffering=0 if writes else -1, closefd=False)  # noqa: SIM115
    (buffer if writes else buffer.raw).name = name
    encoding, errors = stream.encoding, stream.errors
    stream.__init__(buffer, encoding, errors, "\n", False, True)  # type: ignore[misc]
    stream.mode = "w" if writes else "r"  # type: ignore[misc]
