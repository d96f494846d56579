"""How much a user wants to read: the variable LOGLEVEL, as torchrun has it."""

from __future__ import annotations

from collections.abc import Mapping


def is_debug(environ: Mapping[str, str]) -> bool:
    """Whether the user wants what only helps to find a defect (LOGLEVEL=DEBUG)."""
    return environ.get("LOGLEVEL", "").upper() == "DEBUG"
