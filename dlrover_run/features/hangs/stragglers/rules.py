"""What is fixed for a job whose stragglers are looked for before it starts."""

from __future__ import annotations

from typing import Any, ClassVar

from dlrover_run.features.hangs.watch_rules import WatchRules


class StragglerRules(WatchRules, frozen=True, forbid_unknown_fields=True, tag="stragglers"):
    """Nodes report what their workers wait for."""

    subject: ClassVar[str] = "stragglers"


def __getattr__(name: str) -> Any:
    if name != "RECORDS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported only where a part is decoded: the start of a launcher does not wait for it.
    from dlrover_run.features.hangs.stragglers.model import StragglerAssignment, StragglerNodeReport, StragglerState

    return (StragglerRules, StragglerState, StragglerNodeReport, StragglerAssignment)
