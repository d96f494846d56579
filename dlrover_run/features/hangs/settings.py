"""What a node does about hangs, as its flags give it."""

from __future__ import annotations

from typing import Literal

import msgspec

StallAction = Literal["report", "dump", "restart"]
"""What follows when workers make no progress; each includes those before it."""


class HangSettings(msgspec.Struct, frozen=True):
    """`action` is what follows when the workers of a round make no progress for `timeout` seconds, None for a time that
    is learned from their pauses."""

    action: StallAction = "report"
    timeout: float | None = None
