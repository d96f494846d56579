"""The stragglers in the event log: which worker, and from when to when. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from dlrover_run.coordination.reasons import Reasons
from dlrover_run.events.reader import AgentLog
from dlrover_run.events.records import (
    AgentEnded,
    JobEnded,
    RoundClosed,
    RoundFormed,
    StragglerFound,
    StragglerGone,
    WorkerExited,
)


class StragglerTime(NamedTuple):
    """One time in which the others waited for a worker, for `seconds`. None: it lasts to the end of the log."""

    name: str
    host: str
    at: datetime
    seconds: float | None
    reasons: Reasons


def straggler_times(logs: Sequence[AgentLog]) -> list[StragglerTime]:
    """The times in the logs of all agents: those that last first, then the longest."""
    found = [one for log in logs for one in _times_of(log)]
    return sorted(found, key=lambda one: (one.seconds is not None, -(one.seconds or 0.0), one.at))


def _times_of(log: AgentLog) -> list[StragglerTime]:
    ended: list[StragglerTime] = []
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


def _time(event: StragglerFound, log: AgentLog, seconds: float | None) -> StragglerTime:
    return StragglerTime(event.name, log.opened.host, event.time, seconds, event.reasons)
