"""How much memory of a node may hold checkpoints, as its flag gives it."""

from __future__ import annotations

import msgspec


class CheckpointSettings(msgspec.Struct, frozen=True):
    """`limit` is in MiB, None for the default."""

    limit: int | None = None
