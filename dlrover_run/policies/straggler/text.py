"""The codes of stragglers, which are those of `stragglers.finding`."""

from __future__ import annotations

from dlrover_run.stragglers.finding import StragglerCode

__all__ = ["StragglerCode"]
