"""Patches modules of TensorFlow right after they are imported, and reports which attributes this TensorFlow lacks.

A change is a function that takes a module and returns its patches. It first resolves every attribute that they need,
including those that are used only later, and raises MissingAttribute if one is not found. The patches are applied
together or not at all: without one of them the script runs without that protection, and a sentence names it.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple


class Patch(NamedTuple):
    """One attribute to replace: `owner.name` becomes `replacement`."""

    owner: Any
    name: str
    replacement: object


Change = Callable[[Any], Sequence[Patch]]
"""Takes a module, and returns what to replace in it. Raises MissingAttribute, and replaces nothing itself."""


class MissingAttribute(Exception):
    """This TensorFlow has no such attribute or parameter; the text names it. Raised only while a module is patched,
    never in a call of the script."""


_declared: list[tuple[str, str, Change]] = []

_changes: dict[str, list[tuple[str, Change]]] = {}
"""The changes of modules that are not imported yet."""

_missing_patches: list[tuple[str, str]] = []


def patch_module(module: str, without: str) -> Callable[[Change], Change]:
    """Declare a change of a module, for `install`. `without` is a clause on what is missing if it cannot be
    applied, such as `a worker may wait 30 seconds for the model`."""

    def declare(change: Change) -> Change:
        _declared.append((module, without, change))
        return change

    return declare


def install() -> None:
    """Apply each declared change, now or once its module is imported."""
    for declared in _declared:
        after_import(*declared)


def after_import(module: str, without: str, change: Change) -> None:
    """Apply a change to a module, now or once it is imported. `without` is as in `patch_module`."""
    loaded = sys.modules.get(module)
    if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
        _apply(loaded, without, change)
        return
    _changes.setdefault(module, []).append((without, change))
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def pending_modules() -> list[str]:
    """The modules to be patched once they are imported."""
    return sorted(_changes)


def missing_patches() -> list[str]:
    """A sentence for each change that could not be applied, once each."""
    version = getattr(sys.modules.get("tensorflow"), "__version__", "")
    sentences = [f"TensorFlow {version} has no {name}: {without}" for name, without in _missing_patches]
    _missing_patches.clear()
    return sentences


def require_attr(owner: Any, path: str) -> Any:
    """An attribute that must exist, or an attribute of it, as in `errors.CancelledError`. Raises MissingAttribute."""
    for name in path.split("."):
        found = getattr(owner, name, None)
        if found is None:
            raise MissingAttribute(f"{getattr(owner, '__name__', owner)}.{name}")
        owner = found
    return owner


def require_params(function: Callable[..., Any], *names: str) -> None:
    """Raise MissingAttribute unless a function has parameters of these names."""
    known = inspect.signature(function).parameters
    for name in names:
        if name not in known:
            raise MissingAttribute(f"parameter {name} of {function.__qualname__}")


def require_instance_attrs(constructor: Callable[..., Any], *names: str) -> None:
    """Raise MissingAttribute unless a constructor, or another method, sets instance attributes of these names. No class
    has them, and this finds them without an instance."""
    function = inspect.unwrap(constructor)
    known = {instruction.argval for instruction in dis.get_instructions(function) if instruction.opname == "STORE_ATTR"}
    for name in names:
        if name not in known:
            raise MissingAttribute(f"attribute {name} set by {function.__qualname__}")


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Patch:
    """The patch that replaces `owner.name` by `around`, which is called with the original first. Raises
    MissingAttribute."""
    original = require_attr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return Patch(owner, name, wrapped)


def _apply(module: ModuleType, without: str, change: Change) -> None:
    applied: list[Patch] = []
    try:
        for patch in change(module):
            before = Patch(patch.owner, patch.name, getattr(patch.owner, patch.name))
            setattr(*patch)
            applied.append(before)
    except MissingAttribute as missing:
        _missing_patches.append((str(missing), without))
    except Exception as error:
        # Whatever is wrong with the change, the script must still be able to import TensorFlow.
        for before in reversed(applied):
            setattr(*before)
        _missing_patches.append((f"{module.__name__} that can be patched ({type(error).__name__}: {error})", without))


class _Finder:
    """Finds a module to be patched with the other finders, and has its changes applied once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _changes:
            return None
        for finder in sys.meta_path:
            find: Callable[..., ModuleSpec | None] | None = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if finder is not self and find is not None else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    _apply_after(spec.loader)
                return spec
        return None


def _apply_after(loader: Any) -> None:
    """Have the changes applied after the loader has run its module. The loader stays the module's own, since scripts
    look at it."""
    exec_module = loader.exec_module

    def exec_and_patch(module: ModuleType) -> None:
        exec_module(module)
        for without, change in _changes.pop(module.__name__, []):
            _apply(module, without, change)

    loader.exec_module = exec_and_patch
