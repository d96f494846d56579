"""What is fixed for a job whose workers start again by a save."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from dlrover_run.coordination.records.rules import RulesPart
from dlrover_run.features.reload.model import ReloadReport, ReloadState


class ReloadRules(msgspec.Struct, RulesPart, frozen=True, forbid_unknown_fields=True, tag="reload"):
    """`enabled` is not 0: a save ends the round and begins the next one. A round whose workers have ended, by a failure
    or by themselves, waits for the next save."""

    enabled: int = 0

    flags: ClassVar[dict[str, str]] = {"enabled": "--reload"}

    @property
    def applies(self) -> bool:
        return self.enabled > 0


RECORDS = (ReloadRules, ReloadState, ReloadReport)
