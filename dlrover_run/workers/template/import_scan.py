"""The modules that can be preloaded for a script, found by parsing it, without running any of it.

A module is *shared* if it is in the standard library or in a site-packages (dist-packages) directory, and the user's
*own* if it is anywhere else: next to the script, in PYTHONPATH, in an editable install. Only shared modules are
preloaded; own modules are parsed for the modules that they import.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from typing import Any, NamedTuple

SITE_DIRECTORIES = ("site-packages", "dist-packages")

NEVER_PRELOADED = frozenset({"__main__", "this", "antigravity", "idlelib", "test", "turtledemo", "site"})
"""Modules whose import has a visible effect, such as opening a browser or printing."""

DEVICE_VARIABLE = re.compile(rb"""["']((?:CUDA|HIP|CUBLAS|CUDNN|PYTORCH)_[A-Z0-9_]+)["']""")
"""How a program names a variable that is read when a device is opened or when memory of it is first needed."""

MAX_OWN_FILES = 2000
MAX_SOURCE_BYTES = 4_000_000


class ImportRoots(NamedTuple):
    """The directories of modules: `shared` ones, and the user's `own`, both in the order of sys.path.

    `ours` are the launcher's own directories, which are shared wherever they are.
    """

    shared: Sequence[str] = ()
    own: Sequence[str] = ()
    ours: Sequence[str] = ()

    def is_shared(self, path: str) -> bool:
        """Whether a file is shared: the deepest directory that contains it decides.

        A project directory often contains its virtual environment, and a script may be inside an installed package.
        """
        return _depth(path, (*self.shared, *self.ours)) > _depth(path, self.own)


def _depth(path: str, directories: Iterable[str]) -> int:
    return max((len(d) for d in directories if path == d or path.startswith(d.rstrip("/") + "/")), default=-1)


def find_import_roots(
    search_path: Sequence[str], script_directory: str | None, stdlib: str, ours: Sequence[str] = ()
) -> ImportRoots:
    """Separate shared directories from the user's own.

    `search_path` is sys.path without the script's directory, which is the user's own unless it is shared itself.
    `stdlib` is the directory of the standard library. Directories in one of `ours` are shared too.
    """
    archive = os.path.join(
        os.path.dirname(os.path.dirname(stdlib)), "lib", f"python{sys.version_info[0]}{sys.version_info[1]}.zip"
    )

    def shared(entry: str) -> bool:
        base = os.path.basename(entry.rstrip("/"))
        inside = entry in (archive, stdlib) or entry.startswith(stdlib + "/")
        return base in SITE_DIRECTORIES or inside or _depth(entry, ours) >= 0

    common = tuple(entry for entry in search_path if shared(entry))
    own = tuple(entry for entry in search_path if not shared(entry))
    if script_directory is not None and script_directory not in common:
        own = (script_directory, *own)
    return ImportRoots(common, own, ours)


def resolve(name: str, search_path: Sequence[str], finders: Sequence[Any] = ()) -> ModuleSpec | None:
    """Find a module by its dotted name without executing it or its parents; None if it does not exist.

    `finders` are tried first for the top-level name, as is the finder of an editable install.
    """
    try:
        parent, _, _ = name.rpartition(".")
        if parent:
            package = resolve(parent, search_path, finders)
            inside = package.submodule_search_locations if package is not None else None
            return PathFinder.find_spec(name, list(inside)) if inside is not None else None
        for finder in finders:
            found: ModuleSpec | None = finder.find_spec(name, None, None)
            if found is not None:
                return found
        builtin = BuiltinImporter.find_spec(name) or FrozenImporter.find_spec(name)
        return builtin or PathFinder.find_spec(name, list(search_path))
    except Exception:
        return None


def origin_of(spec: ModuleSpec) -> str | None:
    """The file or directory of a module; None if it is built in or frozen."""
    # A loader may set an origin although the module has no location (setuptools' `distutils`).
    if spec.origin is not None and (spec.has_location or os.path.isabs(spec.origin)):
        return spec.origin
    if spec.submodule_search_locations:
        return next(iter(spec.submodule_search_locations))
    return None


def is_shared(spec: ModuleSpec, where: ImportRoots) -> bool:
    origin = origin_of(spec)
    if origin is None:
        return spec.origin in ("built-in", "frozen")
    return where.is_shared(os.path.abspath(origin))


def can_preload(name: str, where: ImportRoots, search_path: Sequence[str], finders: Sequence[Any] = ()) -> bool:
    """Whether a worker would find this module in a shared directory, so that it can be preloaded."""
    if name.split(".")[0] in NEVER_PRELOADED:
        return False
    spec = resolve(name, search_path, finders)
    return spec is not None and is_shared(spec, where)


class Scan:
    """Walks through the entry script and the user's own modules that it imports, in the order of execution.

    `names` has the shared modules; `package:name` is `from package import name` if `name` may be a submodule.
    `stopped_at` is the line, if any, that changes the effect of later imports; nothing after it is added.
    `device_variable` is a variable of a device that one of these files names, anywhere in it, empty without one.
    """

    def __init__(self, where: ImportRoots, search_path: Sequence[str], finders: Sequence[Any] = ()) -> None:
        self.where = where
        self.search_path = tuple(search_path)
        self.finders = tuple(finders)
        self.names: dict[str, None] = {}
        self.stopped_at: str | None = None
        self.device_variable = ""
        self._seen: set[str] = set()

    def file(self, path: str, package: str, entry: bool) -> None:
        """Add the imports of one source file; `package` is the base of its relative imports."""
        if path in self._seen or len(self._seen) >= MAX_OWN_FILES:
            return
        self._seen.add(path)
        try:
            with open(path, "rb") as source:
                text = source.read(MAX_SOURCE_BYTES + 1)
            tree = ast.parse(text, path) if len(text) <= MAX_SOURCE_BYTES else ast.Module([], [])
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return
        if not self.device_variable and (named := DEVICE_VARIABLE.search(text)) is not None:
            self.device_variable = named.group(1).decode()
        for node in executed_statements(tree.body, entry):
            if changes_later_imports(node):
                self.stopped_at = self.stopped_at or f"{path}:{node.lineno}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.module(alias.name)
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(node, package)
                if base is not None:
                    self._from(base, [alias.name for alias in node.names if alias.name != "*"])

    def module(self, name: str) -> None:
        """Add a shared module, or parse one of the user's own."""
        for full in itertools.accumulate(name.split("."), lambda package, part: f"{package}.{part}"):
            spec = resolve(full, self.search_path, self.finders)
            if spec is None:
                return
            if is_shared(spec, self.where):
                # Importing the whole name imports its parents first.
                if can_preload(name, self.where, self.search_path, self.finders):
                    self._add(name)
                return
            self._read_own(full, spec)

    def _add(self, name: str) -> None:
        if self.stopped_at is None:
            self.names.setdefault(name)

    def _read_own(self, name: str, spec: ModuleSpec) -> None:
        if spec.origin is not None and spec.origin.endswith(".py"):
            package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
            self.file(spec.origin, package, entry=False)

    def _from(self, base: str, attributes: list[str]) -> None:
        self.module(base)
        for attribute in attributes:
            spec = resolve(f"{base}.{attribute}", self.search_path, self.finders)
            if spec is None:
                continue
            if not is_shared(spec, self.where):
                self._read_own(f"{base}.{attribute}", spec)
            elif base in self.names:
                self._add(f"{base}:{attribute}")


def scan_imports(
    kind: str, target: str, where: ImportRoots, search_path: Sequence[str], finders: Sequence[Any] = ()
) -> Scan:
    """Find the shared modules that a program imports while it starts.

    `kind` is `script`, `module` or `run_path`; `search_path` is a worker's sys.path with the script's directory. A
    program that cannot be read or parsed has no imports here; its worker reports the error.
    """
    scan = Scan(where, search_path, finders)
    if kind == "module":
        spec = resolve(target, search_path, finders)
        package = target.rpartition(".")[0]
        if spec is not None and spec.submodule_search_locations is not None:
            if is_shared(spec, where):
                scan.module(target)
            spec, package = resolve(f"{target}.__main__", search_path, finders), target
        if spec is None or spec.origin is None:
            return scan
        if package:
            scan.module(package)
        scan.file(spec.origin, package, entry=True)
    else:
        path = os.path.join(target, "__main__.py") if os.path.isdir(target) else target
        scan.file(os.path.abspath(path), "", entry=True)
    return scan


def executed_statements(body: Sequence[ast.stmt], entry: bool) -> Iterator[ast.stmt]:
    """The simple statements that run while a module is imported, in the order of the text.

    Bodies of functions are left out, because they may never be called, and so are exception handlers, which hold the
    second choice. A body under `if __name__ == "__main__"` counts only for the entry script.
    """
    for node in body:
        if isinstance(node, ast.If):
            if _names(node.test, "TYPE_CHECKING") or (_names(node.test, "__name__") and not entry):
                yield from executed_statements(node.orelse, entry)
            else:
                yield from executed_statements([*node.body, *node.orelse], entry)
        elif isinstance(node, ast.Match):
            for case in node.cases:
                yield from executed_statements(case.body, entry)
        elif not hasattr(node, "body"):
            yield node
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in ("body", "orelse", "finalbody"):
                yield from executed_statements(getattr(node, part, []), entry)


def changes_later_imports(statement: ast.stmt) -> bool:
    """Whether a statement may change the settings or the location of libraries that are imported after it.

    That is a change of os.environ, or of sys.path other than at its end.
    """
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            called, held = _last_name(node.func), _last_name(getattr(node.func, "value", None))
            if called in ("putenv", "unsetenv", "load_dotenv"):
                return True
            if held == "environ" and called in ("setdefault", "update", "pop", "popitem", "clear"):
                return True
            if _is_sys_path(getattr(node.func, "value", None)) and called in ("insert", "remove", "pop", "clear"):
                return True
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
            # An item, such as environ["X"], or the whole object is set.
            changed = node.value if isinstance(node, ast.Subscript) else node
            if _last_name(changed) == "environ" or (_is_sys_path(changed) and not isinstance(statement, ast.AugAssign)):
                return True
    return False


def _last_name(node: object) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _is_sys_path(node: object) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "path" and _last_name(node.value) == "sys"


def _names(test: ast.expr, name: str) -> bool:
    return any(
        (isinstance(part, ast.Name) and part.id == name) or (isinstance(part, ast.Attribute) and part.attr == name)
        for part in ast.walk(test)
    )


def _absolute(node: ast.ImportFrom, package: str) -> str | None:
    if not node.level:
        return node.module
    parts = package.split(".") if package else []
    if len(parts) < node.level:
        return None
    kept = parts[: len(parts) - node.level + 1]
    return ".".join([*kept, node.module] if node.module else kept)
