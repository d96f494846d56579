"""What is fixed for a job whose stalls are looked for before it starts."""

from __future__ import annotations

from typing import Any, ClassVar

from dlrover_run.features.hangs.watch_rules import WatchRules


class StallRules(WatchRules, frozen=True, forbid_unknown_fields=True, tag="stalls"):
    """Nodes report when their workers make no progress. What follows a stall is each node's own."""

    subject: ClassVar[str] = "stalls"


def __getattr__(name: str) -> Any:
    if name != "RECORDS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported only where a part is decoded: the start of a launcher does not wait for it.
    from dlrover_run.features.hangs.stalls.model import StallAssignment, StallNodeReport, StallState

    return (StallRules, StallState, StallNodeReport, StallAssignment)
