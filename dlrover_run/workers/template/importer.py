"""Import modules into the template, shared ones only, and record which modules workers import.

While modules are imported here, `sys.path` has the shared directories only, and finders that installed packages put
into `sys.meta_path` may return shared modules only, so none of the user's own modules is imported. If a worker would
have found one of the user's own modules in place of an imported one, the template differs from a fresh interpreter, and
`find_shadowed_import` reports it.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import importlib
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from .import_scan import ImportRoots, is_shared, origin_of, resolve

OURS = "_dlrover_template"
"""The package name of this folder in the template."""


class SharedFinder:
    """Replaces other finders in `sys.meta_path` and returns only the shared modules that they find."""

    def __init__(self, finders: Sequence[Any], where: ImportRoots) -> None:
        self.finders = tuple(finders)
        self.where = where
        self.kept_out: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in self.finders:
            spec: ModuleSpec | None = finder.find_spec(fullname, path, target)
            if spec is not None:
                if is_shared(spec, self.where):
                    return spec
                self.kept_out.add(fullname)
                return None
        return None


class MissedImports:
    """The last finder in `sys.meta_path`: records the top-level modules that no other finder found."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if path is None:
            self.names.add(fullname)


class Preloader:
    """`sys.path` and `sys.meta_path` while the template imports, and in a worker.

    `search_path` is a worker's sys.path after the script's directory.
    """

    def __init__(self, where: ImportRoots, search_path: Sequence[str], startup_modules: Sequence[str]) -> None:
        self.where = where
        self._search_path = list(search_path)
        self._startup = frozenset(startup_modules)
        self._known_good: set[str] = set()
        self._original_finders = list(sys.meta_path)
        standard = (BuiltinImporter, FrozenImporter, PathFinder)
        self.gate = SharedFinder([f for f in sys.meta_path if f not in standard and hasattr(f, "find_spec")], where)
        self.missed = MissedImports()
        sys.meta_path[:] = [self.gate, *(f for f in sys.meta_path if f in standard), self.missed]
        sys.path[:] = where.shared

    def load(self, name: str) -> str | None:
        """Import one module (`package:name` like `from package import name`); the reason if it was skipped, or None."""
        base, _, attribute = name.partition(":")
        try:
            module = importlib.import_module(base)
            if attribute and not hasattr(module, attribute):
                importlib.import_module(f"{base}.{attribute}")
        except BaseException as error:  # An import may raise anything, even SystemExit; the worker will raise it again.
            return f"{name}: {type(error).__name__}: {str(error)[:200]}"
        return None

    def drop_unshared(self) -> list[str]:
        """Remove modules that are not shared after all, for instance found in a path that a library added."""
        dropped = []
        for name, module in list(sys.modules.items()):
            spec = getattr(module, "__spec__", None)
            if name in self._startup or name.startswith(OURS) or not isinstance(spec, ModuleSpec):
                continue
            origin = origin_of(spec)
            if origin is not None and not self.where.is_shared(os.path.abspath(origin)):
                del sys.modules[name]
                dropped.append(name)
        return dropped

    def find_shadowed_import(self) -> str | None:
        """The reason why a fresh interpreter would have imported another module, or None.

        The user's directories come first in a worker's path, so a file there with the name of an installed module has
        precedence.
        """
        looked_for = {name.partition(".")[0] for name in sys.modules} - self._startup | self.missed.names
        for name in sorted(looked_for - self._known_good):
            spec = resolve(name, self.where.own)
            if spec is not None and spec.has_location and not is_shared(spec, self.where):
                return f"your module {spec.origin} takes the place of {name}, which the imported libraries look for"
            self._known_good.add(name)
        for name in sorted(self.gate.kept_out):
            return f"an imported library looks for your module {name}"
        return None

    def worker_path(self) -> list[str]:
        """A worker's sys.path after the script's directory: the original entries and those that libraries added."""
        shared = self.where.shared
        return _with_added(sys.path, self._search_path, shared, next(iter(shared), None))

    def worker_finders(self) -> list[Any]:
        """A worker's sys.meta_path: the original finders, and those that libraries added, before or after them."""
        known = [*self._original_finders, self.gate, self.missed]
        return _with_added(sys.meta_path, self._original_finders, known, self.gate)


def _with_added(current: Sequence[Any], original: Sequence[Any], known: Sequence[Any], first: Any) -> list[Any]:
    """The original entries, and around them those that libraries added before and after the entry `first`."""
    at = current.index(first) if first in current else 0
    before, after = ([entry for entry in part if entry not in known] for part in (current[:at], current[at:]))
    return [*before, *original, *after]


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """Import without garbage collections, which take an eighth of the time of importing torch and find nothing. A
    setting of the collector that a module makes is kept."""
    before = gc.get_threshold()
    never = (2**31 - 1, *before[1:])
    gc.set_threshold(*never)
    try:
        yield
    finally:
        if gc.get_threshold() == never:
            gc.set_threshold(*before)


def import_modules(
    load: Callable[[str], str | None], names: Sequence[str], find_blocker: Callable[[], str | None]
) -> tuple[list[str], list[str], str | None, str]:
    """Import modules one by one, until there is a reason not to fork.

    Returns the imported modules, a note on each skipped one, and the reason with the module that caused it; the reason
    is None and the module empty on success.
    """
    imported: list[str] = []
    skipped: list[str] = []
    for name in names:
        if (problem := load(name)) is None:
            imported.append(name)
        else:
            skipped.append(problem)
        reason = find_blocker()
        if reason is not None:
            return imported, skipped, reason, name
    return imported, skipped, None, ""


CAPACITY = 1 << 18
"""Bytes for the names of one worker: torch with its compiler is about 60 KB."""

_HEADER = 8

PATH_MARK = "="
"""Before an entry of `sys.path` in the log; no module has such a name."""


class ImportLog:
    """The names of modules that a worker imports, in shared memory: the worker writes, the template reads.

    Anonymous shared memory leaves no descriptor open in the worker, can neither block nor raise a signal there, and is
    gone with its last process. When it is full, further names are dropped.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._memory = mmap.mmap(-1, capacity)
        self._capacity = capacity

    def append(self, name: str) -> bool:
        """Add a name; False if there is no room or the template has called `finish`."""
        if self._memory[4]:
            return False
        used = int.from_bytes(self._memory[:4], "little")
        line = name.encode("utf-8", "replace") + b"\n"
        start = _HEADER + used
        if start + len(line) > self._capacity:
            return False
        self._memory[start : start + len(line)] = line
        # The count is written last, so that the reader never sees half a name.
        self._memory[:4] = (used + len(line)).to_bytes(4, "little")
        return True

    def note_device_change(self) -> None:
        """The worker has changed a variable that an accelerator's library reads."""
        self._memory[5] = 1

    @property
    def device_changed(self) -> bool:
        """Whether the worker has noted that."""
        return bool(self._memory[5])

    def finish(self) -> list[str]:
        """Stop the writer and return the names."""
        self._memory[4] = 1
        return self.names()

    def names(self) -> list[str]:
        """The names until now."""
        used = int.from_bytes(self._memory[:4], "little")
        return self._memory[_HEADER : _HEADER + used].decode("utf-8", "replace").splitlines()


DEVICE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""Variables that are read when a device is opened. One that a script sets before would come too late in a process that
has opened its device already."""


class ImportRecorder:
    """The first finder in a worker's `sys.meta_path`: records each module that is to be imported, and finds none. With
    `paths` it also records each entry of `sys.path`, as `PATH_MARK` and the entry, once it is there.

    It removes itself once the log takes no more, and in any process that is forked from the worker. It also notes
    whether a variable of the device is not the one of `environment`, with which the worker has begun.
    """

    def __init__(self, log: ImportLog, environment: Mapping[str, str], paths: bool = False) -> None:
        self._log = log
        self._given = {name: environment.get(name) for name in DEVICE_VARIABLES}
        self._paths = paths
        self._known_path: list[str] = []
        self._process = os.getpid()
        self._lock = _thread.allocate_lock()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if os.getpid() != self._process:
            self._leave()
            return
        # Many libraries look whether torch or jax is installed, and import neither.
        if sys._getframe(2).f_globals.get("__name__") == "importlib.util":
            return
        if any(os.environ.get(name) != value for name, value in self._given.items()):
            self._log.note_device_change()
        with self._lock:
            accepted = (not self._paths or self._note_path()) and self._log.append(fullname)
        if not accepted:
            self._leave()

    def _note_path(self) -> bool:
        """Record the entries of `sys.path` that are new; False if the log takes no more."""
        if sys.path == self._known_path:
            return True
        new = [entry for entry in sys.path if entry not in self._known_path and isinstance(entry, str)]
        self._known_path = list(sys.path)
        return all(self._log.append(PATH_MARK + os.path.abspath(entry)) for entry in new)

    def _leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
