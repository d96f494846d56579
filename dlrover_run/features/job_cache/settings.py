"""The cache of compiled code, as its flag gives it."""

from __future__ import annotations

import msgspec


class JobCacheSettings(msgspec.Struct, frozen=True):
    """The directory that keeps compiled code over jobs, as an absolute path; empty for none."""

    directory: str = ""
