"""What is fixed for a job whose workers may outlive their round before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from dlrover_run.coordination.records.rules import NOT_FINITE, RulesPart, all_finite
from dlrover_run.features.survivors.model import SurvivorsAssignment, SurvivorsReport, SurvivorsState

RECONFIGURE_TIMEOUT = 30.0
"""Seconds of `--reconfigure-timeout` if it is not given: more than it takes to detect a lost machine."""

START_TIMEOUT = 1800.0
"""Seconds for `SurvivorsRules.start_timeout`: as long as `init_process_group` waits for a worker."""


class SurvivorsRules(msgspec.Struct, RulesPart, frozen=True, forbid_unknown_fields=True, tag="survivors"):
    """Workers may outlive their round, if `reconfigure_timeout` is not 0.

    A worker of an earlier round has `reconfigure_timeout` seconds to leave its last group and to offer a handle for the
    next one; then it is ended and another one starts in its place. The new group has as many seconds to form; then the
    round has failed. Workers that wait for one that has just started give up after `start_timeout` seconds.
    """

    reconfigure_timeout: float = 0.0
    start_timeout: float = START_TIMEOUT

    flags: ClassVar[Mapping[str, str]] = {"reconfigure_timeout": "--reconfigure-timeout"}

    @property
    def applies(self) -> bool:
        return self.reconfigure_timeout > 0

    def problem(self) -> str | None:
        if not all_finite(msgspec.structs.astuple(self)):
            return NOT_FINITE
        if self.reconfigure_timeout and self.start_timeout < self.reconfigure_timeout:
            return "workers that start get no less time than workers that are reconfigured"
        return None


RECORDS = (SurvivorsRules, SurvivorsState, SurvivorsReport, SurvivorsAssignment)
