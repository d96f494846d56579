"""Decides which worker the others wait for. Pure: a list of rules, tried in order; each finding names its evidence.

Rules that need one sample come first: a stopped process needs no further proof. Then stacks, which show who is not in
a collective. Then the connections: a worker that waits in a collective has sent its part, so the one that has sent
nothing for the longest time, or has received what it has not answered, is the one that they wait for. In doubt there
is no finding: a wrong rank is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dlrover_run.coordination.reasons import ReasonCode, Reasons, register
from dlrover_run.evidence.records import Evidence
from dlrover_run.stall.detector import BUSY_SHARE
from dlrover_run.stall.stacks import Frame, Stack

AGE_MARGIN = 0.05
"""Seconds by which the last data of a worker must be older than that of all others. Within a collective all of them
send within milliseconds; the one that is late has sent nothing since the collective before."""


class GuiltCode(ReasonCode):
    """Why the other workers wait for a worker; the texts continue the worker's name."""

    STOPPED = "is stopped by a signal"
    BLOCKED_IN_KERNEL = "waits for a disk or a device"
    ENDED = "has ended"
    CHILD_LOST = "waits for a child that is stopped or dead"
    SPINNING = "uses its processor in one place"
    LOCKED = "waits for a lock"
    ELSEWHERE = "is not in the collective in which the others wait"
    OTHER_COLLECTIVE = "waits in another collective than the others"
    SENT_NOTHING = "has sent nothing for longer than the others"
    OWES_DATA = "has received data that it has not answered"
    NETWORK = "has sent data that is not acknowledged"
    UNKNOWN = "the evidence names no rank"
    LATE = "has not connected to the store long after the first worker"
    PLACE = ", at {file}:{line} in {function}"


register(GuiltCode, "stall.")


@dataclass(frozen=True)
class Finding:
    """The workers that the others wait for, why, the user's line where the first of them is, and the evidence: codes
    of the rules that agree, and figures."""

    code: GuiltCode
    ranks: tuple[int, ...] = ()
    line: Frame | None = None
    agree: tuple[GuiltCode, ...] = ()
    seconds: float = 0.0

    @property
    def reasons(self) -> Reasons:
        """Why, and where, as reasons that continue the name of a worker."""
        if self.line is None:
            return (self.code(),)
        return (self.code(), GuiltCode.PLACE(**self.line._asdict()))


class Suspect(NamedTuple):
    """What is known of one worker when a stall was found. `evidence` None: it has ended, or is on a node of which
    nothing is known. `share` is the share of a processor that it used during the stall, `balance` the change of
    received less acknowledged bytes since the workers were last at rest, None if that is not known."""

    rank: int
    evidence: Evidence | None
    stack: Stack | None = None
    share: float = 0.0
    balance: int | None = None
    ended: bool = False


def find_guilty(suspects: Sequence[Suspect]) -> Finding:
    """The workers that the others wait for. The order of `suspects` means nothing."""
    known = sorted(suspects, key=lambda one: one.rank)
    findings = [finding for rule in _RULES if (finding := rule(known)) is not None]
    if not findings:
        return Finding(GuiltCode.UNKNOWN)
    first = findings[0]
    agree = tuple(one.code for one in findings[1:] if one.ranks == first.ranks)
    return Finding(first.code, first.ranks, _line(known, first.ranks), agree, first.seconds)


def _line(suspects: Sequence[Suspect], ranks: tuple[int, ...]) -> Frame | None:
    lines = {one.rank: one.stack.user_line for one in suspects if one.stack is not None}
    return next((line for rank in ranks if (line := lines.get(rank)) is not None), None)


def _some(code: GuiltCode, suspects: Sequence[Suspect], guilty: Callable[[Suspect], bool]) -> Finding | None:
    """The workers for which the condition holds, unless it holds for all of several: then it explains nothing."""
    ranks = tuple(one.rank for one in suspects if guilty(one))
    if not ranks or (len(ranks) == len(suspects) > 1):
        return None
    return Finding(code, ranks)


def _state(one: Suspect) -> str:
    return one.evidence.figures.own.state if one.evidence is not None and one.evidence.figures is not None else ""


def _stopped(suspects: Sequence[Suspect]) -> Finding | None:
    return _some(GuiltCode.STOPPED, suspects, lambda one: _state(one) == "T")


def _blocked(suspects: Sequence[Suspect]) -> Finding | None:
    return _some(GuiltCode.BLOCKED_IN_KERNEL, suspects, lambda one: _state(one) == "D")


def _ended(suspects: Sequence[Suspect]) -> Finding | None:
    return _some(GuiltCode.ENDED, suspects, lambda one: one.ended)


def _outside(one: Suspect) -> bool:
    return one.stack is not None and bool(one.stack.main) and not one.stack.in_collective


def _waits(one: Suspect) -> bool:
    return one.stack is not None and one.stack.in_collective


def _elsewhere(suspects: Sequence[Suspect]) -> Finding | None:
    """The workers outside a collective, if others are in one, or if there is only one worker."""
    found = _some(GuiltCode.ELSEWHERE, suspects, _outside)
    if found is None or (len(suspects) > 1 and not any(map(_waits, suspects))):
        return None
    outside = [one for one in suspects if one.rank in found.ranks]
    for code, holds in _KINDS.items():
        ranks = tuple(one.rank for one in outside if holds(one))
        if ranks:
            # One lost child explains the worker that waits for it better than another rank that is merely late.
            return Finding(code, ranks)
    return found


def _child_lost(one: Suspect) -> bool:
    if one.evidence is None or one.evidence.figures is None:
        return False
    lost = any(child.state in "TZ" for child in one.evidence.figures.children)
    return lost and one.stack is not None and one.stack.in_loader


_KINDS: Mapping[GuiltCode, Callable[[Suspect], bool]] = {
    GuiltCode.CHILD_LOST: _child_lost,
    GuiltCode.SPINNING: lambda one: one.share >= BUSY_SHARE,
    GuiltCode.LOCKED: lambda one: one.stack is not None and one.stack.in_lock,
}


def _sent_nothing(suspects: Sequence[Suspect]) -> Finding | None:
    ages = [
        (one.evidence.traffic.sent_age, one.rank)
        for one in suspects
        if one.evidence is not None and one.evidence.traffic.sent_age is not None
    ]
    if len(ages) < len(suspects) or len(ages) < 2:
        return None
    oldest, second = sorted(ages, reverse=True)[:2]
    if oldest[0] - second[0] < AGE_MARGIN:
        return None
    return Finding(GuiltCode.SENT_NOTHING, (oldest[1],), seconds=oldest[0])


def _owes_data(suspects: Sequence[Suspect]) -> Finding | None:
    if len(suspects) < 2 or any(one.balance is None for one in suspects):
        return None
    return _some(GuiltCode.OWES_DATA, suspects, lambda one: (one.balance or 0) > 0)


def _other_collective(suspects: Sequence[Suspect]) -> Finding | None:
    """The fewest workers that wait at another line. Of two groups of the same size, none is the outlier."""
    if not all(map(_waits, suspects)):
        return None
    lines: dict[Frame | None, list[int]] = {}
    for one in suspects:
        assert one.stack is not None
        lines.setdefault(one.stack.user_line, []).append(one.rank)
    groups = sorted(lines.values(), key=len)
    if len(groups) < 2 or len(groups[0]) == len(groups[1]):
        return None
    return Finding(GuiltCode.OTHER_COLLECTIVE, tuple(groups[0]))


def _network(suspects: Sequence[Suspect]) -> Finding | None:
    ranks = tuple(one.rank for one in suspects if one.evidence is not None and one.evidence.traffic.unsent)
    return Finding(GuiltCode.NETWORK, ranks) if ranks and len(suspects) > 1 else None


_RULES = (_ended, _stopped, _blocked, _elsewhere, _other_collective, _network, _sent_nothing, _owes_data)
