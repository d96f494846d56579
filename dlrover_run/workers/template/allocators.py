"""Allocators that libraries bring with them, and the threads by which those would forbid a fork.

jemalloc may return memory in a thread of its own, which no fork has: pyarrow asks for that thread when it is imported,
and so do pandas, scikit-learn and datasets, which import pyarrow. jemalloc turns the thread off in every child that is
forked, so a worker of a template loses nothing if the template never had it.
"""

from __future__ import annotations

from collections.abc import Mapping

CONF_VARIABLES = ("MALLOC_CONF", "JE_MALLOC_CONF", "JE_ARROW_MALLOC_CONF", "_RJEM_MALLOC_CONF")
"""The variables that copies of jemalloc read: its own, with its usual prefix, pyarrow's, and that of Rust (polars)."""

NO_THREAD = "background_thread:false"


def without_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a template, in which no jemalloc starts a thread. Other settings are kept: of two settings of
    one option the last counts."""
    own = {name: ",".join(filter(None, [environment.get(name), NO_THREAD])) for name in CONF_VARIABLES}
    return {**environment, **own}
