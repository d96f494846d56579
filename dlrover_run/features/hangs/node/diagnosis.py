"""Names the workers for which quiet ones wait. In a round of one node, and for the TensorFlow tasks of a node, the
rules answer at once; with several nodes the coordinator does, by the same rules (`stalls.observer`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_stall
from typing import Protocol

from msgspec.structs import replace

from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.parts import with_part
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.features.hangs.node.stall_report import Names, StallReport
from dlrover_run.features.hangs.search.detector import UNLEARNED_LIMIT, Resumed, StallCode, Stalled
from dlrover_run.features.hangs.search.guilt import (
    Finding,
    find_alone,
    find_stall,
    is_certain_early,
    is_held_back,
    ranks_to_restart,
)
from dlrover_run.features.hangs.search.outside import LearnedPauses
from dlrover_run.features.hangs.search.round_detectors import ENOUGH_WITNESSES
from dlrover_run.features.hangs.search.suspects import Suspect
from dlrover_run.features.hangs.stalls.model import (
    MAX_SUSPECTS,
    StallAssignment,
    StallFinding,
    StallNodeReport,
    StallQuestion,
)
from dlrover_run.observe.records import Evidence
from dlrover_run.stacks.stack import Stack
from dlrover_run.words.reasons import Reasons


@dataclass(frozen=True)
class Quiet:
    """What is known at the time `at` of the workers of this node, of which all or some make no progress. `trains` is
    that of `search.guilt.find_stall`; the workers have last exchanged data at `exchanged_at`, None if never."""

    stalled: Stalled
    at: float
    suspects: tuple[Suspect, ...]
    stacks: Mapping[int, Stack]
    trains: bool
    exchanged_at: float | None

    @property
    def is_alone(self) -> bool:
        """Whether others than those of `stalled` make progress."""
        return self.stalled.code is StallCode.ALONE


class Diagnosis:
    """What the watch of one round calls when its workers make no progress, and when they do again. It owns what is
    known of the present stall. `on_stall` and `on_resume` are the response; `pauses` are those of the job over its
    rounds."""

    def __init__(
        self,
        on_stall: Callable[[StallReport], None],
        on_resume: Callable[[Resumed], None],
        pauses: LearnedPauses,
        names: Names | None = None,
    ) -> None:
        self._on_stall = on_stall
        self._on_resume = on_resume
        self._pauses = pauses
        self._names = names

    @property
    def all_quiet(self) -> bool:
        """Whether this node has reported that none of its workers makes progress: then news of some is news of all."""
        return False

    def observe(self, samples: Sequence[Evidence]) -> None:
        """Take the evidence of all workers at one time, before the detector does."""

    def diagnose(self, quiet: Quiet) -> None:
        """Have the workers named for which these wait."""
        raise NotImplementedError

    def due(self, at: float) -> tuple[Stalled, ...]:
        """The stalls that are to be diagnosed again at this time."""
        return ()

    def resume(self, resumed: Resumed) -> None:
        """Workers make progress again."""
        self._on_resume(resumed)

    def add_to_report(self, report: NodeReport) -> NodeReport:
        """A report on this round, together with what the coordinator has to know of its quiet workers."""
        return report

    def follow(self, assignment: Assignment) -> None:
        """Take the latest assignment, with what the coordinator has found and what it asks."""

    def _report(
        self,
        quiet: Quiet,
        at: float,
        guilty: tuple[int, ...],
        reasons: Reasons,
        to_restart: tuple[int, ...],
        nodes: tuple[str, ...] = (),
    ) -> None:
        self._pauses.end_wait(at)
        seconds = at - quiet.stalled.since
        stacks, names = quiet.stacks, self._names
        self._on_stall(StallReport(quiet.stalled, guilty, reasons, seconds, stacks, to_restart, nodes, names))


class Postponable(Protocol):
    """The part of the detector that a diagnosis uses."""

    def withdraw(self) -> None: ...

    def postpone(self, seconds: float) -> None: ...


def find_in_round(quiet: Quiet) -> Finding | None:
    """The workers for which those of a round wait, all of which are on this node; None if it is no stall."""
    return find_alone(quiet.suspects) if quiet.is_alone else find_stall(quiet.suspects, trains=quiet.trains)


class LocalDiagnosis(Diagnosis):
    """The diagnosis without another node. `find` are the rules, and `names` names what they find."""

    def __init__(
        self,
        detector: Postponable,
        on_stall: Callable[[StallReport], None],
        on_resume: Callable[[Resumed], None],
        pauses: LearnedPauses,
        find: Callable[[Quiet], Finding | None] = find_in_round,
        names: Names | None = None,
    ) -> None:
        super().__init__(on_stall, on_resume, pauses, names)
        self._detector = detector
        self._find = find

    def diagnose(self, quiet: Quiet) -> None:
        finding = self._find(quiet)
        if quiet.stalled.early and not is_certain_early(finding, quiet.suspects):
            self._detector.postpone(UNLEARNED_LIMIT)
        elif finding is None:
            self._detector.withdraw()
        elif is_held_back(finding, quiet.suspects):
            self._pauses.begin_wait(quiet.stalled.since)
            if quiet.is_alone:
                self._detector.withdraw()
            else:
                self._detector.postpone(self._pauses.outside_limit)
        elif quiet.at - quiet.stalled.since < finding.min_quiet:
            self._detector.postpone(finding.min_quiet)
        else:
            to_restart = ranks_to_restart(finding, quiet.suspects)
            self._report(quiet, quiet.at, finding.ranks, finding.reasons, to_restart)


class CoordinatedDiagnosis(Diagnosis):
    """The diagnosis with several nodes, of which this is one: it reports which of its workers are quiet, answers
    whether others train, and acts on each finding once. `key` is the round; `wake` has a report built; `witnesses` is
    that of `RoundDetectors`."""

    def __init__(
        self,
        key: RoundKey,
        wake: Callable[[], None],
        witnesses: Callable[[float], int],
        on_stall: Callable[[StallReport], None],
        on_resume: Callable[[Resumed], None],
        pauses: LearnedPauses,
    ) -> None:
        super().__init__(on_stall, on_resume, pauses)
        self._key = key
        self._wake = wake
        self._witnesses = witnesses
        self._sampled_at = 0.0
        # What all workers showed when they were quiet, and those that are quiet by themselves.
        self._all: Quiet | None = None
        self._alone: Quiet | None = None
        self._part: StallNodeReport | None = None
        self._number = 0
        self._again_at = float("inf")
        self._is_reported = False
        # What has come of the coordinator: the last findings, and the question.
        self._confirmed = 0
        self._confirmed_alone = 0
        self._question = 0
        self._asked_at: float | None = None
        self._found = 0

    @property
    def all_quiet(self) -> bool:
        return self._all is not None

    def observe(self, samples: Sequence[Evidence]) -> None:
        """Answer the question of the coordinator as soon as workers have trained since it came."""
        self._sampled_at = samples[0].at
        if not self._question or self._found >= ENOUGH_WITNESSES:
            return
        if self._asked_at is None:
            self._asked_at = samples[0].at
        found = self._witnesses(self._asked_at)
        if found > self._found:
            self._found = found
            self._wake()

    def diagnose(self, quiet: Quiet) -> None:
        """Have this node report what it has found; whether it is a stall comes back by `follow`."""
        if quiet.is_alone:
            self._alone = quiet
        else:
            self._all = quiet
        partly = self._all is None
        if partly or not quiet.is_alone:
            self._number += 1
        ranks = () if self._alone is None else self._alone.stalled.ranks
        suspects = [replace(one, alone=True) if one.rank in ranks and not one.ended else one for one in quiet.suspects]
        here = [_with_common_age(one, quiet) for one in suspects if one.alone or not partly]
        self._again_at = float("inf")
        if any(one.outside for one in here):
            self._pauses.begin_wait(quiet.stalled.since)
            self._again_at = quiet.stalled.since + self._pauses.outside_limit
        early = quiet.stalled.early
        if early:
            self._again_at = quiet.stalled.since + UNLEARNED_LIMIT
        part = StallNodeReport(self._number, quiet.trains, tuple(here), partly, early=early)
        self._part = part if len(here) <= MAX_SUSPECTS else None
        self._wake()

    def due(self, at: float) -> tuple[Stalled, ...]:
        """What is known of a worker that waits outside, or of workers whose pauses are not known, changes once they
        have waited for too long."""
        known = [replace_stall(quiet.stalled, early=False) for quiet in (self._all, self._alone) if quiet is not None]
        return tuple(known) if at >= self._again_at else ()

    def resume(self, resumed: Resumed) -> None:
        self._all = self._alone = self._part = None
        self._again_at = float("inf")
        self._wake()
        if self._is_reported:
            self._is_reported = False
            self._on_resume(resumed)

    def add_to_report(self, report: NodeReport) -> NodeReport:
        part = self._part
        if self._found:
            part = replace(part or StallNodeReport(), answered=self._question, witnesses=self._found)
        return report if part is None else replace(report, parts=with_part(report.parts, part))

    def follow(self, assignment: Assignment) -> None:
        part = StallAssignment.get(assignment.parts)
        self._take_question(part.question)
        found = part.finding
        if found is None or not self._is_new(found):
            return
        quiet = self._alone if found.alone else self._all
        if quiet is not None:
            self._is_reported = True
            self._report(quiet, self._sampled_at, found.ranks, found.reasons, found.to_restart, found.nodes)

    def _is_new(self, found: StallFinding) -> bool:
        # Without a quiet worker the finding crossed the report that the workers of this node make progress again.
        if self._part is None or found.key != self._key:
            return False
        if found.alone:
            before, self._confirmed_alone = self._confirmed_alone, found.number
            return found.number != before
        before, self._confirmed = self._confirmed, max(found.number, self._confirmed)
        return found.number > before

    def _take_question(self, question: StallQuestion | None) -> None:
        number = 0 if question is None or question.key != self._key else question.number
        if number != self._question:
            answered, self._question, self._asked_at, self._found = self._found, number, None, 0
            if answered:
                self._wake()


def _with_common_age(suspect: Suspect, quiet: Quiet) -> Suspect:
    """The worker with an age that can be compared with those on other nodes, which have clocks of their own: it counts
    from the last data that the node has exchanged."""
    if suspect.sent_age is None or quiet.exchanged_at is None:
        return replace(suspect, sent_age=None)
    return replace(suspect, sent_age=suspect.sent_age - (quiet.at - quiet.exchanged_at))
