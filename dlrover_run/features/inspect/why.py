"""Answers of the event log to `why`: why a job restarted, failed, is slow, or was slow to start. Pure."""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from dlrover_run.events.ledger import PlaceTimes, agent_times, build_ledger, is_spare
from dlrover_run.events.reader import AgentLog, merged
from dlrover_run.events.records import (
    AgentEnded,
    JobEnded,
    NodeWaiting,
    RoundClosed,
    RoundFormed,
    WorkerExited,
    WorkerResumed,
    WorkerStalled,
    WorkerStarted,
)
from dlrover_run.events.timeline import MICROSECONDS, TimePhase
from dlrover_run.features.inspect.answers import WhyAnswer, WhyCode, clock_text
from dlrover_run.features.inspect.restarts import failures, last_restart, last_round, last_task_failure
from dlrover_run.features.inspect.slow import shares, stragglers
from dlrover_run.words.reasons import Code, Reason, Reasons, sentence, shown_names


class Question(enum.StrEnum):
    """What a user asks."""

    NOW = "now"
    LAST_RESTART = "last restart"
    SLOW = "slow"
    START = "start"


def explain(logs: Sequence[AgentLog], question: Question, until: datetime | None = None) -> WhyAnswer:
    """Answer a question from the logs of all agents of a job, as far as they show. With `until`, agents without an end
    run, and that is now; without, their logs are all there is."""
    if question is Question.NOW:
        lines = _now(logs)
    elif question is Question.LAST_RESTART:
        lines = last_restart(logs)
    elif question is Question.SLOW:
        lines = [shares(build_ledger(logs, until, running=until is not None)), *stragglers(logs)]
    else:
        lines = _start(logs, until)
    return WhyAnswer((*lines, *_limits(logs, until is not None)))


def _limits(logs: Sequence[AgentLog], running: bool) -> list[Reasons]:
    """What the logs do not show."""
    lines: list[Reasons] = []
    torn = [] if running else [log for log in logs if log.ended is None]
    if len(torn) == 1:
        lines.append((WhyCode.TORN(host=torn[0].opened.host, at=clock_text(torn[0].last.time)),))
    elif torn:
        lines.append((WhyCode.TORN_LOGS(names=shown_names(sorted(log.opened.host for log in torn))),))
    # The last line of an agent that runs or was killed may be incomplete.
    unread = [log for log in logs if log.unread > (log.ended is None)]
    return [*lines, *((WhyCode.UNREAD(host=log.opened.host, number=log.unread),) for log in unread)]


def _now(logs: Sequence[AgentLog]) -> list[Reasons]:
    """The state that the log ends with, and why it is so."""
    if stalls := _stalls(logs):
        return stalls
    entries = list(merged(logs))
    end = next((entry.event for entry in reversed(entries) if isinstance(entry.event, JobEnded)), None)
    if end is not None:
        return [*_job_end(logs, end), *_stalls_before(logs)]
    if logs and all(log.ended is not None for log in logs):
        return [
            (
                WhyCode.AGENT_ENDED(host=entry.opened.host, at=clock_text(last.time), code=last.exit_code),
                *sentence(last.what or last.reason),
            )
            for entry in entries
            if isinstance(last := entry.event, AgentEnded)
        ] + _stalls_before(logs)
    waiting = [
        (log.opened.host, state) for log in logs if log.ended is None and isinstance(state := _state(log), NodeWaiting)
    ]
    trains = any(isinstance(_state(log), RoundFormed) for log in logs if log.ended is None)
    if waiting and not trains:
        return [(WhyCode.WAITS(host=host), *state.reasons) for host, state in waiting]
    # Nodes that wait while others train are not the answer. Spares are counted here: the number in an event is that of
    # the time at which its node began to wait.
    spares = [host for host, state in waiting if is_spare(state)]
    others: list[Reasons] = [
        (WhyCode.WAITS(host=host), *state.reasons) for host, state in waiting if not is_spare(state)
    ]
    if spares:
        others.append((WhyCode.SPARES(names=shown_names(sorted(spares)), number=len(spares)),))
    return [*_training(logs), *others]


def _training(logs: Sequence[AgentLog]) -> list[Reasons]:
    """Why there is the round that runs, or that its tasks do."""
    latest = last_round(logs)
    if latest is None:
        return _tasks(logs)
    if latest.round > 1:
        return last_restart(logs)
    return [(WhyCode.TRAINS(round=latest.round, at=clock_text(latest.time)),)]


def _job_end(logs: Sequence[AgentLog], end: JobEnded) -> list[Reasons]:
    at, latest = clock_text(end.time), last_round(logs)
    if end.phase != "failed":
        return [(WhyCode.JOB_SUCCEEDED(at=at, number=end.restarts),)]
    if Code.STOPPED_ON_REQUEST.within(end.reasons):
        return [(WhyCode.JOB_STOPPED(at=at), *end.reasons)]
    failed = last_task_failure(logs)[:1] if latest is None else failures(logs, range(latest.round, latest.round + 1))
    return [(WhyCode.JOB_FAILED(at=at), *end.reasons), *failed]


def _state(log: AgentLog) -> RoundFormed | NodeWaiting | None:
    """What the agent did last of being in a round and waiting for one."""
    return next((event for event in reversed(log.events) if isinstance(event, RoundFormed | NodeWaiting)), None)


def _stalls(logs: Sequence[AgentLog]) -> list[Reasons]:
    """The workers that make no progress at the end of the log, those first that keep the others waiting."""
    return [_stall(WhyCode.STALLED, *each) for each in _stalled(logs, ended=False)]


def _stalls_before(logs: Sequence[AgentLog]) -> list[Reasons]:
    """The workers for which the others waited when the job ended, as it was stopped or one that waited gave up."""
    found = _stalled(logs, ended=True)
    guilty = [each for each in found if each[0].guilty]
    return [_stall(WhyCode.HAD_STALLED, *each) for each in guilty or found[:1]]


def _stall(code: WhyCode, event: WorkerStalled, host: str) -> Reasons:
    since = event.time - timedelta(seconds=max(0.0, event.mono - event.since))
    return (code(name=event.name, host=host, at=clock_text(since)), *event.reasons)


def _stalled(logs: Sequence[AgentLog], *, ended: bool) -> list[tuple[WorkerStalled, str]]:
    """The workers that make no progress at the end of the log, and their hosts; with `ended` those that made none when
    their launcher ended or stopped them."""
    found: dict[tuple[int, int], tuple[WorkerStalled, str]] = {}
    for place, log in enumerate(logs):
        for event in log.events:
            match event:
                case WorkerStalled():
                    found[place, event.local_rank] = event, log.opened.host
                case WorkerExited(stopped_with=stopped_with) if ended and stopped_with:
                    pass
                case WorkerResumed() | WorkerExited():
                    found.pop((place, event.local_rank), None)
                case RoundClosed() | JobEnded() | AgentEnded() if ended:
                    pass
                case RoundFormed() | RoundClosed() | JobEnded() | AgentEnded():
                    found = {key: value for key, value in found.items() if key[0] != place}
    return sorted(found.values(), key=lambda each: (not each[0].guilty, each[0].since, each[0].rank))


def _tasks(logs: Sequence[AgentLog]) -> list[Reasons]:
    """How many tasks run at the end of the log."""
    running: dict[tuple[str, int], WorkerStarted] = {}
    for entry in merged(logs):
        match entry.event:
            case WorkerStarted() as start:
                running[entry.opened.node_id, start.pid] = start
            case WorkerExited(pid=pid):
                running.pop((entry.opened.node_id, pid), None)
    if not running:
        return [(WhyCode.NO_ROUND(),)]
    version = max(start.round for start in running.values())
    return [(WhyCode.TASKS(number=len(running), version=version),)]


def _start(logs: Sequence[AgentLog], until: datetime | None) -> list[Reasons]:
    """How long each part of the start took, in the place that trained last."""
    slowest: tuple[bool, int, PlaceTimes] | None = None
    for log in logs:
        for place in agent_times(log, until, running=until is not None):
            began = next((each.start for each in place.segments if each.phase is TimePhase.TRAIN), None)
            took = place.wall if began is None else began - place.segments[0].start
            if slowest is None or (began is None, took) > slowest[:2]:
                slowest = began is None, took, place
    if slowest is None:
        return [(WhyCode.NO_ROUND(),)]
    missing, took, place = slowest
    code = WhyCode.NOT_TRAINING if missing else WhyCode.START_TOOK
    head = code(seconds=took / MICROSECONDS, local_rank=place.local_rank, host=place.opened.host)
    return [(head, *_parts(place, took)), *_first_waits(logs)]


def _parts(place: PlaceTimes, took: int) -> Iterable[Reason]:
    """The phases of the first microseconds of a place, the longest first."""
    totals: Counter[TimePhase] = Counter()
    for each in place.segments:
        if each.start - place.segments[0].start < took:
            totals[each.phase] += each.end - each.start
    return (WhyCode.PART(phase=phase.value, seconds=time / MICROSECONDS) for phase, time in totals.most_common())


def _first_waits(logs: Sequence[AgentLog]) -> list[Reasons]:
    """What the nodes waited for last before their first round, each cause once."""
    lines: dict[Reasons, Reasons] = {}
    for log in logs:
        before = itertools.takewhile(lambda event: not isinstance(event, RoundFormed), log.events)
        waits = [event for event in before if isinstance(event, NodeWaiting)]
        if waits and waits[-1].reasons:
            lines.setdefault(waits[-1].reasons, (WhyCode.WAITED(host=log.opened.host), *waits[-1].reasons))
    return list(lines.values())
