"""What is fixed for a job with a node check before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from dlrover_run.coordination.records.rules import NOT_FINITE, Kind, RulesPart, all_finite
from dlrover_run.features.node_check.decision.model import (
    NodeCheckAssignment,
    NodeCheckProgress,
    NodeCheckReport,
    NodeCheckState,
)

STRAGGLER_THRESHOLD = 2.0
"""How many times slower than the others a node has to be to count as a straggler (as DLRover)."""

CHECK_TIMEOUT = 120.0
"""Seconds that a node has for one round of a node check, before what it does is ended and counts as failed. A link
has a quarter of that. The work takes about two seconds; the rest is for a disk from which torch has never been read."""

CHECK_NEVER, CHECK_ONCE, CHECK_ALWAYS = 0, 1, 2
"""When nodes are checked before they train: once in the life of each launcher, or before each round."""


class NodeCheckRules(msgspec.Struct, RulesPart, frozen=True, forbid_unknown_fields=True, tag="node_check"):
    """`check` is when nodes are checked. A node that is `straggler_threshold` times slower than the others is a
    straggler, which leaves with `exclude_stragglers` 1. With `measure_links` 1 every pair of nodes is linked, and the
    speeds are shown."""

    check: int = CHECK_NEVER
    check_timeout: float = CHECK_TIMEOUT
    straggler_threshold: float = STRAGGLER_THRESHOLD
    exclude_stragglers: int = 0
    measure_links: int = 0

    kind: ClassVar[Kind] = "gate"
    flags: ClassVar[Mapping[str, str]] = {
        "check": "--network-check",
        "straggler_threshold": "--straggler-threshold",
        "exclude_stragglers": "--exclude-straggler",
        "measure_links": "--comm-perf-test",
    }
    value_names: ClassVar[Mapping[str, Mapping[int, str]]] = {
        "check": {CHECK_NEVER: "off", CHECK_ONCE: "once", CHECK_ALWAYS: "always"},
        "exclude_stragglers": {0: "off", 1: "on"},
        "measure_links": {0: "off", 1: "on"},
    }

    @property
    def applies(self) -> bool:
        return self.check != CHECK_NEVER

    def problem(self) -> str | None:
        if not all_finite(msgspec.structs.astuple(self)):
            return NOT_FINITE
        if self.check > CHECK_ALWAYS or self.check_timeout <= 0 or self.straggler_threshold <= 1:
            return "a node check needs a known mode, a time and a threshold above 1"
        return None


RECORDS = (NodeCheckRules, NodeCheckState, NodeCheckReport, NodeCheckAssignment, NodeCheckProgress)
