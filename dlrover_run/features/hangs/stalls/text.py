"""The codes of stalls, which are those of `features.hangs.search.guilt`."""

from __future__ import annotations

from dlrover_run.features.hangs.search.guilt import GuiltCode

__all__ = ["GuiltCode"]
