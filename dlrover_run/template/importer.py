"""Import modules into the template, the shared ones alone, and notice what makes it unfit to be forked.

While modules are imported here, `sys.path` holds the shared directories only and finders that installed packages put
into `sys.meta_path` may answer with shared modules only, so the user's own modules cannot get in. Where a worker would
have found one of the user's own modules in place of what was imported here, the template is not what a fresh
interpreter would be, and says so.
"""

from __future__ import annotations

import _thread
import importlib
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from .import_scan import ImportRoots, is_shared, origin_of, resolve

OURS = "_dlrover_template"
"""The name under which this folder is imported here."""


class SharedFinder:
    """Asks the finders that were set aside, and lets only shared modules through."""

    def __init__(self, finders: Sequence[Any], where: ImportRoots) -> None:
        self.finders = tuple(finders)
        self.where = where
        self.kept_out: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The first shared answer of the finders that were set aside."""
        for finder in self.finders:
            spec: ModuleSpec | None = finder.find_spec(fullname, path, target)
            if spec is not None:
                if is_shared(spec, self.where):
                    return spec
                self.kept_out.add(fullname)
                return None
        return None


class MissedImports:
    """Stands last in `sys.meta_path` and notes the top-level modules that nobody found."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Note the name."""
        if path is None:
            self.names.add(fullname)


class Preloader:
    """The state of `sys.path` and `sys.meta_path` while the template imports, and while a worker runs.

    `search_path` is what a worker has in sys.path after the script's directory.
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
        """Import one module (`package:name` as `from package import name` does); why it was skipped, or None."""
        base, _, attribute = name.partition(":")
        try:
            module = importlib.import_module(base)
            if attribute and not hasattr(module, attribute):
                importlib.import_module(f"{base}.{attribute}")
        except BaseException as error:  # An import may raise anything, SystemExit included; the worker meets it again.
            return f"{name}: {type(error).__name__}: {str(error)[:200]}"
        return None

    def drop_strays(self) -> list[str]:
        """Forget modules that came from elsewhere after all, for instance through a path that a library added."""
        strays = []
        for name, module in list(sys.modules.items()):
            spec = getattr(module, "__spec__", None)
            if name in self._startup or name.startswith(OURS) or not isinstance(spec, ModuleSpec):
                continue
            origin = origin_of(spec)
            if origin is not None and not self.where.is_shared(os.path.abspath(origin)):
                del sys.modules[name]
                strays.append(name)
        return strays

    def why_not_the_same(self) -> str | None:
        """Why a fresh interpreter would have imported something else here, or None.

        The user's directories come first in a worker's path, so a file of theirs named as an installed module wins
        there.
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
        """sys.path as a worker has it, after the script's directory: the original and what libraries added."""
        added = [entry for entry in sys.path if entry not in self.where.shared]
        first = sys.path.index(self.where.shared[0]) if self.where.shared and self.where.shared[0] in sys.path else 0
        front = [entry for entry in added if sys.path.index(entry) < first]
        return [*front, *self._search_path, *(entry for entry in added if entry not in front)]

    def worker_finders(self) -> list[Any]:
        """sys.meta_path as a worker has it: the original, and what libraries added at their end of it."""
        known: list[Any] = [*self._original_finders, self.gate, self.missed]
        added = [finder for finder in sys.meta_path if finder not in known]
        first = sys.meta_path.index(self.gate) if self.gate in sys.meta_path else 0
        front = [finder for finder in added if sys.meta_path.index(finder) < first]
        return [*front, *self._original_finders, *(finder for finder in added if finder not in front)]


def import_modules(
    load: Callable[[str], str | None], names: Sequence[str], why_not: Callable[[], str | None]
) -> tuple[list[str], list[str], str | None, str]:
    """Import modules one by one, until there is a reason not to fork.

    Answers the modules imported, a note on each one skipped, and the reason with the module that brought it; the reason
    is None, and the module empty, when all went well.
    """
    imported: list[str] = []
    skipped: list[str] = []
    for name in names:
        problem = load(name)
        if problem is None:
            imported.append(name)
        else:
            skipped.append(problem)
        reason = why_not()
        if reason is not None:
            return imported, skipped, reason, name
    return imported, skipped, None, ""


CAPACITY = 1 << 18
"""Bytes for the names of one worker: torch with its compiler is about 60 KB."""

_HEADER = 8


class ImportLog:
    """A list of module names in memory that processes forked later share: one of them writes, the template reads."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._memory = mmap.mmap(-1, capacity)
        self._capacity = capacity

    def append(self, name: str) -> bool:
        """Add a name; False when there is no room or nobody wants more."""
        if self._memory[4]:
            return False
        used = int.from_bytes(self._memory[:4], "little")
        line = name.encode("utf-8", "replace") + b"\n"
        start = _HEADER + used
        if start + len(line) > self._capacity:
            return False
        self._memory[start : start + len(line)] = line
        # The count comes last, so that a reader never sees half a name.
        self._memory[:4] = (used + len(line)).to_bytes(4, "little")
        return True

    def finish(self) -> list[str]:
        """Tell the writer to stop, and read what it wrote."""
        self._memory[4] = 1
        used = int.from_bytes(self._memory[:4], "little")
        return self._memory[_HEADER : _HEADER + used].decode("utf-8", "replace").splitlines()


class ImportRecorder:
    """Stands first in `sys.meta_path` of one worker, notes each module looked for there and finds none of them.

    It leaves by itself once the log takes no more, and in any process forked from the worker.
    """

    def __init__(self, log: ImportLog) -> None:
        self._log = log
        self._process = os.getpid()
        self._lock = _thread.allocate_lock()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Note the name."""
        if os.getpid() != self._process:
            self._leave()
            return
        with self._lock:
            wanted = self._log.append(fullname)
        if not wanted:
            self._leave()

    def _leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
