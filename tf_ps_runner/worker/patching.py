"""Patches a module of TensorFlow right after it is imported, and reports which attributes this TensorFlow does not
have.

A change is a function that takes the module and returns its patches. It first resolves every attribute that they need,
including those that are used only later, and raises MissingAttribute if one is not found. The patches are applied
together or not at all: without one of them the script runs without that protection, and a sentence names it.
"""

from __future__ import annotations

import dis
import functools
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Sequence
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


_changes: dict[str, list[tuple[str, Change]]] = {}

_missing_patches: list[tuple[str, str]] = []


def after_import(module: str, protection: str, change: Change) -> None:
    """Apply `change` to a module, now or once it is imported. `protection` is a clause that says what is missing if
    that fails, such as `a worker may wait 30 seconds for the model`."""
    loaded = sys.modules.get(module)
    if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
        _apply(loaded, protection, change)
        return
    _changes.setdefault(module, []).append((protection, change))
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def pending_modules() -> list[str]:
    """The modules to be patched once they are imported."""
    return sorted(_changes)


def missing_patches() -> list[str]:
    """A sentence for each change that could not be applied, once each."""
    version = getattr(sys.modules.get("tensorflow"), "__version__", "")
    sentences = [f"TensorFlow {version} has no {place}: {protection}" for place, protection in _missing_patches]
    _missing_patches.clear()
    return sentences


def require_attr(owner: Any, name: str) -> Any:
    """An attribute that must exist. Raises MissingAttribute."""
    found = getattr(owner, name, None)
    if found is None:
        raise MissingAttribute(f"{getattr(owner, '__name__', owner)}.{name}")
    return found


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
    known = {one.argval for one in dis.get_instructions(function) if one.opname == "STORE_ATTR"}
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


def set_default(owner: Any, name: str, parameter: str, value: object, when: Callable[[], bool]) -> Patch:
    """The patch that gives a parameter of `owner.name` another default while `when` is true. Raises
    MissingAttribute."""
    original = require_attr(owner, name)
    require_params(original, parameter)
    signature = inspect.signature(original)

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        if when() and parameter not in signature.bind(*args, **kwargs).arguments:
            kwargs[parameter] = value
        return original(*args, **kwargs)

    return wrap(owner, name, call)


def _apply(module: ModuleType, protection: str, change: Change) -> None:
    applied: list[Patch] = []
    try:
        for patch in change(module):
            before = Patch(patch.owner, patch.name, getattr(patch.owner, patch.name))
            setattr(*patch)
            applied.append(before)
    except MissingAttribute as missing:
        _missing_patches.append((str(missing), protection))
    except Exception as error:
        # Whatever is wrong with the change, the script must still be able to import TensorFlow.
        for before in reversed(applied):
            setattr(*before)
        _missing_patches.append((f"{module.__name__} that we know ({type(error).__name__}: {error})", protection))


class _Finder:
    """Finds what the other finders would find, and has the changes applied once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module that is to be patched; None for all others."""
        if fullname not in _changes:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Loads a module with its own loader, which the module then has, and applies the changes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As its own loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, then the changes."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for protection, change in _changes.pop(module.__name__, []):
            _apply(module, protection, change)
