"""Which variable of a script counts its steps, where nothing but its checkpoints says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

NAMES = ("global_step", "step", "train_step", "iterations", "_iterations")
"""What it is called in scripts, and what optimizers call theirs; the first that is found nearest to the top counts."""

DEEPEST = 3
"""How far below a checkpoint it is looked for: checkpoint, model, optimizer, variable."""

MOST_LOOKED_AT = 2000
"""Parts of a checkpoint that are looked at."""


def read_step(managers: Iterable[Any], saved: Iterable[Any]) -> int | None:
    """The step that the model is at; None where the script counts none."""
    for manager in managers:
        counter = getattr(manager, "_step_counter", None)
        if counter is not None:
            return max(0, int(counter.numpy()))
    for checkpoint in saved:
        variable = _find(checkpoint)
        if variable is not None:
            return max(0, int(variable.numpy()))
    return None


def _find(root: Any) -> Any:
    waiting = deque([(root, 0)])
    seen = {id(root)}
    while waiting and len(seen) < MOST_LOOKED_AT:
        parent, depth = waiting.popleft()
        children: dict[str, Any] = {}
        with suppress(Exception):
            children = parent._trackable_children()
        for name in NAMES:
            if _counts(children.get(name)):
                return children[name]
        for child in children.values():
            if depth < DEEPEST and id(child) not in seen:
                seen.add(id(child))
                waiting.append((child, depth + 1))
    return None


def _counts(variable: Any) -> bool:
    """Whether it is a whole number in a variable."""
    with suppress(Exception):
        return bool(variable.dtype.is_integer) and variable.shape.rank == 0 and hasattr(variable, "numpy")
    return False
