"""What the event log shows of a slow job: the parts of its time, and the workers for which the others wait. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from dlrover_run.events.ledger import Ledger
from dlrover_run.events.reader import AgentLog
from dlrover_run.events.records import (
    AgentEnded,
    JobEnded,
    RoundClosed,
    RoundFormed,
    StragglerFound,
    StragglerGone,
    WorkerExited,
    WorkerProgress,
)
from dlrover_run.events.timeline import MICROSECONDS, TimePhase
from dlrover_run.features.inspect.answers import WhyCode, clock_text
from dlrover_run.features.inspect.restarts import last_round
from dlrover_run.words.reasons import Reasons

STRAGGLER_MARGIN = 0.1
"""A rank is slow if it waits for data by at least this part of its time more than the median of the others does."""

MAX_STRAGGLER_TIMES = 8
"""Times of stragglers in one answer, the longest."""


class _StragglerTime(NamedTuple):
    """One time in which the others waited for a worker, for `seconds`. None: it lasts to the end of the log."""

    name: str
    host: str
    at: datetime
    seconds: float | None
    reasons: Reasons


def shares(ledger: Ledger) -> Reasons:
    """The part of the time that each phase took, the longest first."""
    totals = ledger.totals()
    trained, wall = totals.pop(TimePhase.TRAIN), max(1, ledger.wall)
    others = Counter({phase: time for phase, time in totals.items() if time}).most_common()
    percent, seconds, workers = 100 * trained / wall, ledger.wall / MICROSECONDS, len(ledger.places)
    # The sum is more than the job has run for: a reader must not take it for the job's age.
    head: Reasons = (
        WhyCode.TRAINED(percent=percent, seconds=seconds)
        if workers == 1
        else WhyCode.TRAINED_ALL(percent=percent, seconds=seconds, workers=workers),
    )
    if others:
        head = (*head, WhyCode.SHARES())
    return (*head, *(WhyCode.SHARE(phase=phase.value, percent=100 * time / wall) for phase, time in others))


def stragglers(logs: Sequence[AgentLog]) -> list[Reasons]:
    """The ranks for which the others wait: those that were found while the job ran, else the one that waits longest for
    data by what the scripts report."""
    found = _straggler_times(logs)[:MAX_STRAGGLER_TIMES]
    if not found:
        return [_longest_wait(logs)]
    return [
        (
            WhyCode.STRAGGLES(name=one.name, host=one.host, at=clock_text(one.at))
            if one.seconds is None
            else WhyCode.STRAGGLED(name=one.name, host=one.host, at=clock_text(one.at), seconds=one.seconds),
            *one.reasons,
        )
        for one in found
    ]


def _longest_wait(logs: Sequence[AgentLog]) -> Reasons:
    """The rank that waits longest for data, if that is much longer than the others do: they wait for it then."""
    ratios = _wait_ratios(logs)
    if len(ratios) < 2:
        return (WhyCode.NO_PROGRESS(),)
    ordered = sorted(ratios, key=lambda each: -each[0])
    (own, rank, host), others = ordered[0], [each[0] for each in ordered[1:]]
    usual = others[len(others) // 2]
    if own - usual < STRAGGLER_MARGIN:
        return (WhyCode.NO_STRAGGLER(),)
    return (WhyCode.WAITS_FOR_DATA(rank=rank, host=host, own=100 * own, others=100 * usual),)


def _wait_ratios(logs: Sequence[AgentLog]) -> list[tuple[float, int, str]]:
    """For each worker of the latest round its part of the time in which it waited for data, between its first and its
    last figures; its rank, and its host."""
    latest = last_round(logs)
    figures: dict[tuple[int, str], list[WorkerProgress]] = {}
    for log in logs:
        for event in log.events:
            if isinstance(event, WorkerProgress) and latest is not None and event.round == latest.round:
                figures.setdefault((event.rank, log.opened.host), []).append(event)
    return [
        (min(1.0, max(0.0, (known[-1].waited - known[0].waited) / seconds)), rank, host)
        for (rank, host), known in figures.items()
        if (seconds := known[-1].mono - known[0].mono) > 0
    ]


def _straggler_times(logs: Sequence[AgentLog]) -> list[_StragglerTime]:
    """The times in the logs of all agents: those that last first, then the longest."""
    found = [one for log in logs for one in _times_of(log)]
    return sorted(found, key=lambda one: (one.seconds is not None, -(one.seconds or 0.0), one.at))


def _times_of(log: AgentLog) -> list[_StragglerTime]:
    ended: list[_StragglerTime] = []
    begun: dict[int, StragglerFound] = {}

    def close(local_ranks: Sequence[int], mono: float) -> None:
        found = [begun.pop(local_rank) for local_rank in local_ranks if local_rank in begun]
        ended.extend(_time(event, log, mono - event.mono) for event in found)

    for event in log.events:
        match event:
            case StragglerFound():
                begun.setdefault(event.local_rank, event)
            case StragglerGone() | WorkerExited():
                close([event.local_rank], event.mono)
            case RoundFormed() | RoundClosed() | JobEnded() | AgentEnded():
                close(list(begun), event.mono)
    return ended + [_time(event, log, None) for event in begun.values()]


def _time(event: StragglerFound, log: AgentLog, seconds: float | None) -> _StragglerTime:
    return _StragglerTime(event.name, log.opened.host, event.time, seconds, event.reasons)
