"""What a node watches for `--reload`, as its flags give it."""

from __future__ import annotations

import msgspec


class ReloadSettings(msgspec.Struct, frozen=True):
    """`directories`: each Python file below them counts, whether a worker has imported it or not; absolute paths."""

    directories: tuple[str, ...] = ()
