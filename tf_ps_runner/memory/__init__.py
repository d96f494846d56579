"""The memory limits of tasks: how they are enforced, and how an end for memory is recognised."""

from __future__ import annotations

MIB = 1 << 20
"""Bytes of a MiB, in which the records count."""

NO_LIMIT = 1 << 44
"""More MiB than any machine has."""

NEAR_LIMIT = 0.9
"""The part of its limit above which a task is near it: a server is then replaced in a planned change, before it is
killed. Closer would leave too little time to save; further would replace healthy servers."""


def is_near_limit(usage: int, limit: int) -> bool:
    """Whether a task with this usage is near its limit, both in MiB. A limit of 0 is none."""
    return limit > 0 and usage > limit * NEAR_LIMIT
