"""How much a user wants to read: the variable LOGLEVEL, as torchrun has it."""

from __future__ import annotations

from collections.abc import Mapping


def is_debug(environ: Mapping[str, str]) -> bool:
    """Whether the user wants what only helps to find a defect (LOGLEVEL=DEBUG)."""
    return environ.get("LOGLEVEL", "").upper() == "DEBUG"


def traceback_lines(error: BaseException) -> list[str]:
    """Where an internal error was raised, in one line for each function: for a log, with LOGLEVEL=DEBUG, after the line
    that says what failed. No two lines are the same but in a recursion, as some logs leave a repeated line out."""
    # Only a defect needs it.
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    return [f"debug: {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]
