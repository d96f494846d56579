"""What is fixed for a job whose stalls are looked for before it starts."""

from __future__ import annotations

from typing import ClassVar

from dlrover_run.policies.stall.model import StallAssignment, StallNodeReport, StallState
from dlrover_run.policies.watch_rules import WatchRules


class StallRules(WatchRules, frozen=True, forbid_unknown_fields=True, tag="stall"):
    """Nodes report when their workers make no progress. What follows a stall is each node's own."""

    subject: ClassVar[str] = "stalls"


RECORDS = (StallRules, StallState, StallNodeReport, StallAssignment)
