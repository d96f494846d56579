"""What is fixed for a job whose restarts are experiments before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from dlrover_run.coordination.records.rules import RulesPart
from dlrover_run.features.experiments.model import ExperimentsAssignment, ExperimentsReport, ExperimentsState


class ExperimentsRules(msgspec.Struct, RulesPart, frozen=True, forbid_unknown_fields=True, tag="experiments"):
    """`on`: what fails again in the same way is traced to what it follows."""

    on: int = 0

    needs_rounds: ClassVar[bool] = True
    flags: ClassVar[Mapping[str, str]] = {"on": "--experiments"}
    value_names: ClassVar[Mapping[str, Mapping[int, str]]] = {"on": {0: "off", 1: "on"}}

    @property
    def applies(self) -> bool:
        return self.on > 0


RECORDS = (ExperimentsRules, ExperimentsState, ExperimentsReport, ExperimentsAssignment)
