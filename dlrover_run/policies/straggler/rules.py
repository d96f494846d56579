"""What is fixed for a job whose stragglers are looked for before it starts."""

from __future__ import annotations

from typing import ClassVar

from dlrover_run.policies.straggler.model import StragglerAssignment, StragglerNodeReport, StragglerState
from dlrover_run.policies.watch_rules import WatchRules


class StragglerRules(WatchRules, frozen=True, forbid_unknown_fields=True, tag="straggler"):
    """Nodes report what their workers wait for."""

    subject: ClassVar[str] = "stragglers"


RECORDS = (StragglerRules, StragglerState, StragglerNodeReport, StragglerAssignment)
