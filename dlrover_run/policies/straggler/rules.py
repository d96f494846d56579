"""What is fixed for a job whose stragglers are looked for before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from dlrover_run.coordination.policy_records import PolicyRules
from dlrover_run.policies.straggler.model import StragglerAssignment, StragglerNodeReport, StragglerState


class StragglerRules(msgspec.Struct, PolicyRules, frozen=True, forbid_unknown_fields=True, tag="straggler"):
    """With `watched` 1 nodes report what their workers wait for."""

    watched: int = 0

    flags: ClassVar[Mapping[str, str]] = {"watched": "--stall-action"}
    value_names: ClassVar[Mapping[str, Mapping[int, str]]] = {"watched": {0: "off", 1: "on"}}

    @property
    def applies(self) -> bool:
        return self.watched != 0

    def problem(self) -> str | None:
        return None if self.watched in (0, 1) else "stragglers are looked for or not"


RECORDS = (StragglerRules, StragglerState, StragglerNodeReport, StragglerAssignment)
