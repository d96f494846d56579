"""The hooks of a node, as its flags give them."""

from __future__ import annotations

import msgspec

TIMEOUT = 60.0
"""Seconds for a command without `--hook-timeout`: long enough to copy logs, short beside a restart of a large job."""


class HookSettings(msgspec.Struct, frozen=True):
    """The commands as words, in the order in which they were given, by the name of their event. Each is stopped after
    `timeout` seconds."""

    commands: dict[str, tuple[tuple[str, ...], ...]] = msgspec.field(default_factory=dict)
    timeout: float = TIMEOUT
