"""The files of the modules that a worker and the template have imported: what a person edits, and what is kept.

A worker records the names of its modules and the entries of its `sys.path`; here they become paths, so that the worker
itself does nothing more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from .import_scan import SITE_DIRECTORIES, ImportRoots, is_shared, resolve
from .importer import PATH_MARK

MAX_MISSING = 20
"""Names without a module whose possible files are returned: the last ones, as the import that failed is among them."""


class SourceFiles:
    """Remembers what each name was found to be, as a job asks again and again."""

    def __init__(self) -> None:
        self._own: dict[str, str] = {}
        self._shared: set[str] = set()

    def find(
        self,
        recorded: Sequence[str],
        program: tuple[str | None, str],
        search_path: Sequence[str],
        where: ImportRoots,
        finders: Sequence[Any],
    ) -> dict[str, list[str]]:
        """`own`: the files of the user's own modules among `recorded`, the log of a worker. `missing`: the files in
        which modules would be found that do not exist. `kept`: the files of the installed modules in this process."""
        # What a script puts into the path, it puts at the begin as a rule.
        added = [line[len(PATH_MARK) :] for line in recorded if line.startswith(PATH_MARK)]
        path = list(dict.fromkeys([*(entry for entry in added if entry not in search_path), *search_path]))
        names = [line for line in recorded if not line.startswith(PATH_MARK)]
        kind, target = program
        if kind == "module":
            names = [target, f"{target}.__main__", *names]
        missing: dict[str, None] = {}
        for name in names:
            if name in self._own or name in self._shared or name in sys.modules:
                continue
            spec = resolve(name, path, finders)
            if spec is None:
                if "." not in name:
                    missing.setdefault(name)
            elif is_shared(spec, where):
                self._shared.add(name)
            elif (file := _file_of(spec)) is not None:
                self._own[name] = file
        possible = [
            os.path.join(entry, file)
            for name in list(missing)[-MAX_MISSING:]
            for entry in path
            if os.path.isdir(entry) and not where.is_shared(entry)
            for file in (f"{name}.py", os.path.join(name, "__init__.py"))
        ]
        return {"own": list(dict.fromkeys(self._own.values())), "missing": possible, "kept": _kept()}


def _file_of(spec: ModuleSpec) -> str | None:
    """The file of a module; None for a directory without code."""
    return spec.origin if spec.has_location and spec.origin is not None and os.path.isfile(spec.origin) else None


def _kept() -> list[str]:
    """The files of the modules in this process that are in a site-packages directory."""
    specs = (getattr(module, "__spec__", None) for module in list(sys.modules.values()))
    files = {spec.origin for spec in specs if isinstance(spec, ModuleSpec) and spec.has_location}
    return sorted(file for file in files if file is not None and any(f"/{name}/" in file for name in SITE_DIRECTORIES))
