"""What a node and the coordinator exchange about the stalls of one round of several nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.features.hangs.search.round_detectors import ENOUGH_WITNESSES
from dlrover_run.features.hangs.stalls.model import (
    MAX_SUSPECTS,
    StallAssignment,
    StallFinding,
    StallNodeReport,
    StallQuestion,
)
from dlrover_run.observe.records import Evidence


class StallExchange:
    """The node's side of one round: it reports which of its workers are quiet, answers whether others train, and takes
    each finding once. `wake` has a report built; `witnesses` is that of `RoundDetectors`."""

    def __init__(
        self, key: RoundKey, wake: Callable[[], None], witnesses: Callable[[float], int] = lambda since: 0
    ) -> None:
        self._key = key
        self._wake = wake
        self._witnesses = witnesses
        self._quiet: StallNodeReport | None = None
        self._confirmed = 0
        self._confirmed_alone = 0
        self._question = 0
        self._asked_at: float | None = None
        self._found = 0

    def note_quiet(self, quiet: StallNodeReport | None) -> None:
        """Report that workers of this node make no progress, or, with None, that they do again."""
        self._quiet = None if quiet is None or len(quiet.suspects) > MAX_SUSPECTS else quiet
        self._wake()

    def observe(self, samples: Sequence[Evidence]) -> None:
        """Take the evidence of all workers at one time: answer the question of the coordinator as soon as workers have
        trained since."""
        if not self._question or self._found >= ENOUGH_WITNESSES:
            return
        if self._asked_at is None:
            self._asked_at = samples[0].at
        found = self._witnesses(self._asked_at)
        if found > self._found:
            self._found = found
            self._wake()

    def add_to_report(self, report: NodeReport) -> NodeReport:
        """A report on this round, together with what is known of its quiet workers."""
        part = self._quiet
        if self._found:
            part = msgspec.structs.replace(part or StallNodeReport(), answered=self._question, witnesses=self._found)
        if part is None:
            return report
        return msgspec.structs.replace(report, parts=with_part(report.parts, part))

    def follow(self, assignment: Assignment) -> StallFinding | None:
        """Take the latest assignment. Returns what the coordinator has found, once; None if that is not new."""
        part = StallAssignment.get(assignment.parts)
        self._take_question(part.question)
        found = part.finding
        # Without a quiet worker the finding crossed the report that the workers of this node make progress again.
        if self._quiet is None or found is None or found.key != self._key:
            return None
        if found.alone and found.number != self._confirmed_alone:
            self._confirmed_alone = found.number
        elif not found.alone and found.number > self._confirmed:
            self._confirmed = found.number
        else:
            return None
        return found

    def _take_question(self, question: StallQuestion | None) -> None:
        number = 0 if question is None or question.key != self._key else question.number
        if number != self._question:
            answered, self._question, self._asked_at, self._found = self._found, number, None, 0
            if answered:
                self._wake()
