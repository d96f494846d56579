"""The codes of stalls, which are those of `stall.guilt`."""

from __future__ import annotations

from dlrover_run.stall.guilt import GuiltCode

__all__ = ["GuiltCode"]
