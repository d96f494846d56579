"""Counts the steps of torch's optimizer in the worker's progress page (`--progress=optimizer`).

torch is not imported here. The hook is registered once the script imports torch's optimizers, or at once in a worker
whose template has done that. It needs the standard library only, as it is loaded into the user's interpreter.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULE = "torch.optim.optimizer"

Add = Callable[[int], None]


class OptimizerHook:
    """A hook that torch calls after each step of any optimizer. The steps of one optimizer are counted, the first that
    makes one while no other is known: a script may have two, and still makes one step at a time."""

    def __init__(self, add: Add, source: int) -> None:
        self._add = add
        self._source = source
        self._counted: Callable[[], Any] = lambda: None

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        counted = self._counted()
        if counted is None:
            self._counted = weakref.ref(optimizer)
        elif counted is not optimizer:
            return
        self._add(self._source)


def install(add: Add, source: int) -> None:
    """Have steps counted with `add(source)`, now or once torch's optimizers are imported."""
    counter = OptimizerHook(add, source)
    loaded = sys.modules.get(MODULE)
    if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
        _register(loaded, counter)
    else:
        sys.meta_path.insert(0, _HookFinder(counter))


def _register(module: Any, counter: OptimizerHook) -> None:
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None:
        print("dlrover-run: --progress=optimizer has no effect: it requires torch 2.0 or later", file=sys.stderr)
    else:
        register(counter)


class _HookFinder:
    """Finds the module with the other finders, and registers the counter once it is loaded. Twin of the finder in
    `tf_ps_runner/worker/patching.py`, which an interpreter without this package loads."""

    def __init__(self, counter: OptimizerHook) -> None:
        self._counter = counter

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            find: Callable[..., ModuleSpec | None] | None = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    self._register_after(spec.loader)
                return spec
        return None

    def _register_after(self, loader: Any) -> None:
        # The loader stays the module's own, since libraries look at it.
        exec_module = loader.exec_module

        def exec_and_register(module: ModuleType) -> None:
            exec_module(module)
            _register(module, self._counter)

        loader.exec_module = exec_and_register
