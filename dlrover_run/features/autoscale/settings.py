"""What one node does for a job that scales itself."""

from __future__ import annotations

import msgspec


class AutoscaleSettings(msgspec.Struct, frozen=True):
    """`command` are the words of the command that starts and ends nodes, empty without one."""

    command: tuple[str, ...] = ()
