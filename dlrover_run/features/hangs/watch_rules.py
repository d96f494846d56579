"""The rules of an observer that only watches the workers: it is on or off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from dlrover_run.coordination.records.rules import RulesPart


class WatchRules(msgspec.Struct, RulesPart, frozen=True, forbid_unknown_fields=True):
    """With `watched` 1 nodes report what the observer needs of their workers."""

    watched: int = 0

    subject: ClassVar[str]
    """What is looked for, in the plural."""
    flags: ClassVar[Mapping[str, str]] = {"watched": "--stall-action"}
    value_names: ClassVar[Mapping[str, Mapping[int, str]]] = {"watched": {0: "off", 1: "on"}}

    @property
    def applies(self) -> bool:
        return self.watched != 0

    def problem(self) -> str | None:
        return None if self.watched in (0, 1) else f"{self.subject} are looked for or not"
