"""Warm workers, as their flag gives them."""

from __future__ import annotations

import msgspec


class WarmSettings(msgspec.Struct, frozen=True):
    """A job that has this record has a warm worker beside each worker."""
