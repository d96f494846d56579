"""The codes of stalls, which are those of `features.hangs.search.codes`."""

from __future__ import annotations

from dlrover_run.features.hangs.search.codes import GuiltCode

__all__ = ["GuiltCode"]
