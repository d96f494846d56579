"""Decides which worker the others wait for. Pure: a list of rules, of which the first that finds
something counts; each finding names its evidence. Positions in collectives come before them, unless the state of a
process explains more (`find_guilty`).

Rules that need one sample come first: a stopped process needs no further proof. Then stacks, which show who is not in
a collective. Then the connections: a worker that waits in a collective has sent its part, so the one that has sent
nothing for the longest time is the one that they wait for. In doubt there is no finding: a wrong rank is worse than
none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_finding

from msgspec.structs import replace

from dlrover_run.features.hangs.collectives.compare import LagKind
from dlrover_run.features.hangs.search.behind import (
    awaited_reason,
    even_reasons,
    first_lag,
    guilty_ranks,
    lag_code,
    lag_reasons,
    same_operation,
    same_operation_reason,
)
from dlrover_run.features.hangs.search.codes import GuiltCode
from dlrover_run.features.hangs.search.suspects import Place, Suspect
from dlrover_run.stacks.stack import Frame
from dlrover_run.words.reasons import Reasons

AGE_MARGIN = 0.05
"""Seconds by which the last data of a worker must be older than that of all others. Within a collective all of them
send within milliseconds; the one that is late has sent nothing since the collective before."""

NODES_AGE_MARGIN = 2.0
"""The same for workers of several nodes, whose ages are measured from the last data between them that each node has
seen: a node looks at its connections once a second."""


@dataclass(frozen=True)
class Finding:
    """The workers that the others wait for, why, the user's line where the first of them is, and the evidence: codes
    of the rules that agree, and figures. Of workers that wait for each other, `other_line` is where those are that wait
    at another line. It is good evidence only after `min_quiet` seconds without progress. `others_go_on`: no other
    worker waits for these, or only some do. `sentence` are the reasons by the positions in collectives, in place of
    code and line; `more` follows the code, and `last` the line. `is_certain`: it is a hang, however long a worker may
    compute."""

    code: GuiltCode
    ranks: tuple[int, ...] = ()
    line: Frame | None = None
    agree: tuple[GuiltCode, ...] = ()
    seconds: float = 0.0
    min_quiet: float = 0.0
    other_line: Frame | None = None
    others_go_on: bool = False
    sentence: Reasons = ()
    more: Reasons = ()
    last: Reasons = ()
    is_certain: bool = False

    @property
    def reasons(self) -> Reasons:
        """Why, and where, as reasons that continue the name of a worker."""
        if self.sentence:
            return self.sentence
        go_on = (GuiltCode.OTHERS_GO_ON(),) if self.others_go_on else ()
        why = (self.code(), *go_on, *self.more)
        if self.line is not None:
            why = (*why, GuiltCode.PLACE(**self.line._asdict()))
        if self.other_line is not None:
            why = (*why, GuiltCode.OTHER_PLACE(**self.other_line._asdict()))
        return (*why, *self.last)


CERTAIN = frozenset({GuiltCode.STOPPED, GuiltCode.BLOCKED_IN_KERNEL, GuiltCode.LATE})
"""Findings that need no worker that waits in a collective: the state of a process is proof enough."""

BUSY_DEVICE = 50
"""Percent of its device that a worker uses whose kernels run, or wait within a collective."""

ALL_MAY_WAIT = frozenset(
    {
        GuiltCode.ON_DEVICE,
        GuiltCode.OTHER_WAIT,
        GuiltCode.DIFFERENT_WAITS,
        GuiltCode.OTHER_COLLECTIVE,
        GuiltCode.DIFFERENT_COLLECTIVES,
        GuiltCode.NETWORK,
        GuiltCode.UNKNOWN,
    }
)
"""Findings with which all workers may wait in one operation."""

STATES = CERTAIN | {GuiltCode.ENDED}
"""Findings by what the kernel says of a process."""


def find_stall(suspects: Sequence[Suspect], *, trains: bool, age_margin: float = AGE_MARGIN) -> Finding | None:
    """The workers that the others wait for, of all workers of a round, none of which makes progress. None if it is not
    certain that this is a stall: workers that wait for requests, or for the time, make no progress either.

    So one of them must wait for another one, or `trains`: they have counted steps, or the user has set the limit. A
    worker that has ended explains the others only if one of them waits in a collective: the last one may save alone.
    One that waits for its device may wait for another worker. Where a worker has `moved` since the stall began, the
    job goes on, however slowly.
    """
    running = [one for one in suspects if not one.ended]
    waits = any(map(_waits, running)) or (len(suspects) > 1 and any(map(_on_device, running)))
    waits = waits or first_lag(suspects) is not None
    if not running:
        return None
    finding = find_guilty(suspects if waits else running, age_margin)
    if any(one.moved for one in running) and finding.code not in CERTAIN:
        return None
    trains = trains and len(running) == len(suspects)
    return finding if waits or trains or finding.code in CERTAIN else None


def find_alone(suspects: Sequence[Suspect]) -> Finding | None:
    """The workers that hang by themselves, of those that make no progress while others train. None if each of these may
    wait for one that works: it is in a collective, or nothing shows that it trains."""
    quiet = sorted((one for one in suspects if one.alone and not one.ended), key=lambda one: one.rank)
    waits = any(map(_waits, quiet))
    guilty = [one for one in quiet if _is_alone(one, waits)]
    ranks = tuple(one.rank for one in guilty)
    code = next((code for code, holds in _ALONE.items() if guilty and all(map(holds, guilty))), GuiltCode.IDLE)
    return Finding(code, ranks, _line(guilty, ranks), others_go_on=True) if guilty else None


def _is_alone(one: Suspect, waits: bool) -> bool:
    if one.state in ("T", "D"):
        return True
    return one.place in (Place.LOCK, Place.ELSEWHERE) and (waits or one.counts)


def ranks_to_restart(finding: Finding, suspects: Sequence[Suspect]) -> tuple[int, ...]:
    """The workers whose end restarts the round: those that the others wait for. Where none of them runs, the first that
    does, as any failure ends the round."""
    running = sorted(one.rank for one in suspects if not one.ended)
    return tuple(rank for rank in finding.ranks if rank in running) or tuple(running[:1])


def _in_same_operation(found: Finding, suspects: Sequence[Suspect]) -> Finding:
    """A finding of workers that may all be in one operation: then no kernel computes, and a network that loses data is
    the cause."""
    operation = same_operation(suspects)
    entered = () if operation is None or found.ranks else (same_operation_reason(operation),)
    is_certain = operation is not None and found.code is GuiltCode.NETWORK
    even = even_reasons(suspects) if not entered and found.code in ALL_MAY_WAIT else ()
    if found.code is not GuiltCode.ON_DEVICE:
        return replace_finding(found, more=entered, last=even, is_certain=is_certain)
    uses = [one.device.own for one in suspects if one.device is not None and one.device.own is not None]
    busy = len(uses) == len(suspects) and min(uses) >= BUSY_DEVICE
    last = GuiltCode.DEVICES_BUSY() if busy else GuiltCode.UNEXPLAINED()
    known = (*entered, *even)
    return replace_finding(found, sentence=(*found.reasons, *known, *(() if known and not busy else (last,))))


def _find_without_positions(suspects: Sequence[Suspect], age_margin: float) -> Finding:
    known = _with_one_way_to_wait(sorted(suspects, key=lambda one: one.rank))
    findings = [finding for rule in _RULES if (finding := rule(known)) is not None]
    pair = _different_collectives(known)
    # In two collectives the ages say which of them began later, which need not be the wrong one.
    if pair is None and (oldest := _sent_nothing(known, age_margin)) is not None:
        findings.append(oldest)
    if not findings:
        return pair or _same_wait(known) or Finding(GuiltCode.UNKNOWN)
    first = findings[0]
    agree = tuple(one.code for one in findings[1:] if one.ranks == first.ranks)
    return Finding(first.code, first.ranks, _line(known, first.ranks), agree, first.seconds)


def find_guilty(suspects: Sequence[Suspect], age_margin: float = AGE_MARGIN) -> Finding:
    """The workers that the others wait for. The order of `suspects` means nothing.

    The positions in collectives say it with certainty, unless the state of a process does for other ranks: one that is
    stopped or blocked answers no question."""
    found, known = _find_without_positions(suspects, age_margin), sorted(suspects, key=lambda one: one.rank)
    lag = first_lag(known)
    if lag is None:
        return _in_same_operation(found, known)
    ranks = guilty_ranks(lag)
    is_explained = bool(found.ranks) and set(found.ranks) <= set(ranks)
    by_state = found.code in STATES and not is_explained
    # A process that only computes answers NCCL, and the kernel acknowledges for it.
    unheard = lag.kind in (LagKind.SILENT, LagKind.APART)
    is_cut = unheard and any(one.unsent for one in known if one.rank in ranks)
    says_more = is_explained and not (lag.is_even and len(found.ranks) == len(ranks))
    if by_state or (unheard and says_more):
        return replace_finding(found, more=(awaited_reason(lag),), is_certain=found.is_certain or is_cut)
    return Finding(
        lag_code(lag),
        ranks,
        _line(known, lag.ranks),
        (found.code,) if found.ranks == ranks else (),
        sentence=lag_reasons(lag, known),
        is_certain=is_cut or lag.kind in (LagKind.MISMATCH, LagKind.ORDER),
    )


def _line(suspects: Sequence[Suspect], ranks: tuple[int, ...]) -> Frame | None:
    lines = {one.rank: one.user_line for one in suspects}
    return next((line for rank in ranks if (line := lines.get(rank)) is not None), None)


def _some(code: GuiltCode, suspects: Sequence[Suspect], guilty: Callable[[Suspect], bool]) -> Finding | None:
    """The workers for which the condition holds, unless it holds for all of several: then it explains nothing."""
    ranks = tuple(one.rank for one in suspects if guilty(one))
    if not ranks or (len(ranks) == len(suspects) > 1):
        return None
    return Finding(code, ranks)


def _late(suspects: Sequence[Suspect]) -> Finding | None:
    return _some(GuiltCode.LATE, suspects, lambda one: one.late)


def _stopped(suspects: Sequence[Suspect]) -> Finding | None:
    return _some(GuiltCode.STOPPED, suspects, lambda one: one.state == "T")


def _blocked(suspects: Sequence[Suspect]) -> Finding | None:
    return _some(GuiltCode.BLOCKED_IN_KERNEL, suspects, lambda one: one.state == "D")


def _ended(suspects: Sequence[Suspect]) -> Finding | None:
    return _some(GuiltCode.ENDED, suspects, lambda one: one.ended)


def _waits(one: Suspect) -> bool:
    return one.place is Place.COLLECTIVE


def _on_device(one: Suspect) -> bool:
    return one.place is Place.DEVICE


def _with_one_way_to_wait(suspects: Sequence[Suspect]) -> list[Suspect]:
    """The same workers, without a wait for a device that is none: all workers of a job wait for it in the same way, so
    one that sleeps while others spin waits for something else. Without an accelerator, one that spins while others are
    in a collective does not wait at all."""
    spin = any(one.busy and _on_device(one) for one in suspects)
    computes = any(map(_waits, suspects)) and not any(one.has_device for one in suspects)
    return [
        replace(one, place=Place.ELSEWHERE, outside=False)
        if _on_device(one) and (computes or (spin and not one.busy))
        else one
        for one in suspects
    ]


def _elsewhere(suspects: Sequence[Suspect]) -> Finding | None:
    """The workers outside a collective and not on their devices, if others are, or if there is only one worker."""
    in_collective = any(map(_waits, suspects))
    code = GuiltCode.ELSEWHERE if in_collective or len(suspects) == 1 else GuiltCode.OFF_DEVICE
    found = _some(code, suspects, lambda one: one.place in (Place.LOCK, Place.ELSEWHERE))
    if found is None or (len(suspects) > 1 and not in_collective and not any(map(_on_device, suspects))):
        return None
    outside = [one for one in suspects if one.rank in found.ranks]
    for code, holds in _KINDS.items():
        ranks = tuple(one.rank for one in outside if holds(one))
        if ranks:
            # One lost child explains the worker that waits for it better than another rank that is merely late.
            return Finding(code, ranks)
    return found


_KINDS: Mapping[GuiltCode, Callable[[Suspect], bool]] = {
    GuiltCode.CHILD_LOST: lambda one: one.lost_child,
    GuiltCode.SPINNING: lambda one: one.busy,
    GuiltCode.LOCKED: lambda one: one.place is Place.LOCK,
}


_ALONE: Mapping[GuiltCode, Callable[[Suspect], bool]] = {
    GuiltCode.STOPPED: lambda one: one.state == "T",
    GuiltCode.BLOCKED_IN_KERNEL: lambda one: one.state == "D",
    **_KINDS,
}


def _sent_nothing(suspects: Sequence[Suspect], margin: float) -> Finding | None:
    ages = [(one.sent_age, one.rank) for one in suspects if one.sent_age is not None]
    if len(ages) < len(suspects) or len(ages) < 2:
        return None
    oldest, second = sorted(ages, reverse=True)[:2]
    if oldest[0] - second[0] < margin:
        return None
    return Finding(GuiltCode.SENT_NOTHING, (oldest[1],), seconds=oldest[0])


def _other_collective(suspects: Sequence[Suspect]) -> Finding | None:
    """The fewest workers that wait at another line. Of two groups of the same size, none is the outlier."""
    groups = sorted(_by_line(suspects).values(), key=len)
    if len(groups) < 2 or len(groups[0]) == len(groups[1]):
        return None
    return Finding(GuiltCode.OTHER_COLLECTIVE, tuple(groups[0]))


def _different_collectives(suspects: Sequence[Suspect]) -> Finding | None:
    """All workers, if they wait at two lines and nothing says which is wrong: a person sees it by the lines."""
    groups = _by_line(suspects)
    if len(groups) != 2 or None in groups:
        return None
    first, other = groups
    ranks = tuple(one.rank for one in suspects)
    return Finding(GuiltCode.DIFFERENT_COLLECTIVES, ranks, first, other_line=other)


def _other_wait(suspects: Sequence[Suspect]) -> Finding | None:
    """As `_other_collective`, of workers that all wait for their devices."""
    groups = sorted(_by_line(suspects, _on_device).values(), key=len)
    if len(groups) < 2 or len(groups[0]) == len(groups[1]):
        return None
    return Finding(GuiltCode.OTHER_WAIT, tuple(groups[0]))


def _same_wait(suspects: Sequence[Suspect]) -> Finding | None:
    """Workers that all wait for their devices, with nothing to choose between them."""
    groups = _by_line(suspects, _on_device)
    if not groups:
        return None
    first, *others = groups
    if len(others) == 1:
        ranks = tuple(one.rank for one in suspects)
        return Finding(GuiltCode.DIFFERENT_WAITS, ranks, first, other_line=others[0])
    return Finding(GuiltCode.ON_DEVICE, line=first)


def _by_line(suspects: Sequence[Suspect], waits: Callable[[Suspect], bool] = _waits) -> dict[Frame | None, list[int]]:
    """The workers by the line at which each waits; nothing unless all of them do."""
    lines: dict[Frame | None, list[int]] = {}
    for one in suspects if all(map(waits, suspects)) else ():
        lines.setdefault(one.user_line, []).append(one.rank)
    return lines


def _network(suspects: Sequence[Suspect]) -> Finding | None:
    """The workers with the most such connections: one that is cut off has them to all its peers, and each of these has
    one to it."""
    most = max((one.unsent for one in suspects), default=0)
    if not most or len(suspects) < 2:
        return None
    return Finding(GuiltCode.NETWORK, tuple(one.rank for one in suspects if one.unsent == most))


_RULES = (_late, _ended, _stopped, _blocked, _elsewhere, _other_collective, _other_wait, _network)


def is_certain_early(finding: Finding | None, suspects: Sequence[Suspect]) -> bool:
    """Whether a finding is a stall before the pauses of a round are known: ranks are in different operations, or each
    that it names is stopped, waits for a lost child, or sleeps beyond the time after which it would be named. A first
    step that compiles, loads data or connects does nothing of that."""
    if finding is None or is_held_back(finding, suspects):
        return False
    named = [one for one in suspects if one.rank in finding.ranks]
    never_ends = [one.state == "T" or one.lost_child or (one.sleeps and not one.outside) for one in named]
    return finding.is_certain or (bool(named) and all(never_ends))


def is_held_back(finding: Finding, suspects: Sequence[Suspect]) -> bool:
    """Whether a finding has to wait, because a worker that it names waits outside, or any where it names none."""
    if finding.is_certain:
        return False
    known = _with_one_way_to_wait(suspects)
    concerned = [one for one in known if one.rank in finding.ranks or not finding.ranks]
    return any(one.outside for one in concerned)
