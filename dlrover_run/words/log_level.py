"""How much a user wants to read (the variable LOGLEVEL, as torchrun has it), and what is printed of a defect."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

MAX_ERROR_TEXT = 500
"""Characters of an internal error that are quoted, so that the rest of the sentence fits too."""


def is_debug(environ: Mapping[str, str]) -> bool:
    """Whether the user wants what only helps to find a defect (LOGLEVEL=DEBUG)."""
    return environ.get("LOGLEVEL", "").upper() == "DEBUG"


def internal_error(error: BaseException, where: str = "") -> str:
    """A clause about an error that only a defect raises, in the part of the program that `where` names. Each warning
    about one has it, and `log_frames` comes after it."""
    return f"internal error{where}: {repr(error)[:MAX_ERROR_TEXT]}; please report it"


def log_frames(log: Callable[[str], object], error: BaseException) -> None:
    """Log with LOGLEVEL=DEBUG where an internal error was raised."""
    if is_debug(os.environ):
        for line in traceback_lines(error):
            log(line)


def traceback_lines(error: BaseException) -> list[str]:
    """Where an internal error was raised, in one line for each function: for a log, with LOGLEVEL=DEBUG, after the line
    that says what failed. No two lines are the same but in a recursion, as some logs leave a repeated line out."""
    # Only a defect needs it.
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    return [f"debug: {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]
