"""Whether a busy worker spins: many stacks of its main thread, all of them within a few lines. Pure."""

from __future__ import annotations

from collections.abc import Sequence

PROBES = 60
"""Stacks of a busy worker that must stay within one function before it is stalled. One that evaluates a model is in one
of its layers nine times out of ten."""

LOOP_PROBES = 600
"""The same within a function and another one that it calls, which is where a small model is nearly always."""

MAX_SPIN_LINES = 4
"""Innermost lines among which a worker may move and still spin."""

MAX_SPIN_FUNCTIONS = 2
"""Innermost functions among which a worker may move and still spin: a loop, and what it calls."""


def moves(stacks: Sequence[tuple[str, ...]]) -> bool:
    """Whether the innermost frames of these stacks are those of a worker that works."""
    lines = {stack[0] for stack in stacks}
    return len(lines) > MAX_SPIN_LINES or len(_functions(stacks)) > MAX_SPIN_FUNCTIONS


def stays(stacks: Sequence[tuple[str, ...]]) -> bool:
    """Whether these stacks, none of which is elsewhere, are enough to say that the worker spins."""
    return len(stacks) >= (PROBES if len(_functions(stacks)) <= 1 else LOOP_PROBES)


def _functions(stacks: Sequence[tuple[str, ...]]) -> set[str]:
    return {stack[0].rpartition(":")[2] for stack in stacks}
