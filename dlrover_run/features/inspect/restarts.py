"""What the event log shows of the last restart: its cause, the failures, and the work that it cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dlrover_run.events.ledger import agent_times, build_ledger, checkpoints_elsewhere
from dlrover_run.events.reader import AgentLog, merged
from dlrover_run.events.records import (
    AgentEnded,
    Event,
    LogOpened,
    RoundClosed,
    RoundFormed,
    WorkerExited,
    WorkerFailed,
    WorkerKept,
    WorkerReady,
    WorkerResources,
    WorkerStarted,
)
from dlrover_run.events.timeline import MICROSECONDS, TimePhase
from dlrover_run.failures.causes import Cause
from dlrover_run.features.inspect.answers import WhyCode, clock_text
from dlrover_run.words.reasons import Reasons

GIB = 2**30


def last_round(logs: Sequence[AgentLog], besides: RoundFormed | None = None) -> RoundFormed | None:
    """The event of the latest round, `besides` that one if it is given, as the node wrote it that formed it first."""
    rounds = [event for log in logs for event in log.events if isinstance(event, RoundFormed)]
    others = [event for event in rounds if besides is None or not _is_of(event, besides)]
    return min(others, key=lambda event: (-event.epoch, -event.round, event.time), default=None)


def last_restart(logs: Sequence[AgentLog]) -> list[Reasons]:
    """Why the workers were restarted the last time, which workers had failed, and the time that it took."""
    latest = last_round(logs)
    if latest is None:
        return last_task_failure(logs)
    if last_round(logs, besides=latest) is None:
        return [(WhyCode.NO_RESTART(),)]
    head: Reasons = (WhyCode.ROUND_FORMED(round=latest.round, at=clock_text(latest.time), nodes=latest.nodes),)
    if latest.reasons:
        head = (*head, WhyCode.BECAUSE(), *latest.reasons)
    before = _round_with_workers(logs, latest)
    return [head, *failures(logs, range(before, latest.round)), *_cost(logs, before, latest)]


def failures(logs: Sequence[AgentLog], rounds: range) -> list[Reasons]:
    """The failures of these rounds, in the order of their times; those that other failures explain only if there is no
    other."""
    failed = [
        (entry.opened, entry.event)
        for entry in merged(logs)
        if isinstance(entry.event, WorkerFailed) and entry.event.round in rounds
    ]
    roots = [each for each in failed if each[1].cause != Cause.LOST_PEER]
    return [_failure(logs, opened, event) for opened, event in roots or failed]


def last_task_failure(logs: Sequence[AgentLog]) -> list[Reasons]:
    """The last failure of a task, in a job of `tf-ps-run`, which has no rounds, and when that task ran again."""
    last: tuple[LogOpened, WorkerFailed] | None = None
    again: WorkerStarted | None = None
    has_run = False
    for entry in merged(logs):
        match entry.event:
            case WorkerStarted() as start:
                has_run = True
                if last is not None and again is None and (start.role, start.rank) == (last[1].role, last[1].rank):
                    again = start
            case WorkerFailed() as failed:
                last, again = (entry.opened, failed), None
    if last is None:
        return [(WhyCode.NO_RESTART(),) if has_run else (WhyCode.NO_ROUND(),)]
    head = _failure(logs, *last)
    if again is None:
        return [head, (WhyCode.TASK_STILL_DOWN(),)]
    # It may run on another node, whose clock the time of day has to stand for.
    return [head, (WhyCode.TASK_DOWN(seconds=max(0.0, (again.time - last[1].time).total_seconds())),)]


def _failure(logs: Sequence[AgentLog], opened: LogOpened, event: WorkerFailed) -> Reasons:
    failed = WhyCode.FAILED_WORKER(name=event.name, host=opened.host, pid=event.pid, what=event.what)
    starts = [
        start.mono
        for log in logs
        if log.opened.node_id == opened.node_id
        for start in log.events
        if isinstance(start, WorkerStarted) and start.pid == event.pid and start.mono <= event.mono
    ]
    lived = (WhyCode.LIVED(seconds=event.mono - starts[-1]),) if starts else ()
    return (failed, *lived, *_used(logs, opened, event))


def _used(logs: Sequence[AgentLog], opened: LogOpened, event: WorkerFailed) -> Reasons:
    """What a worker that has failed used in the end."""
    found = next(
        (
            used
            for log in logs
            if log.opened.node_id == opened.node_id
            for used in reversed(log.events)
            if isinstance(used, WorkerResources) and used.ended and used.pid == event.pid and used.mono <= event.mono
        ),
        None,
    )
    if found is None:
        return ()
    # The last sample is some seconds old, and has the worker's children too.
    used = max(found.memory, found.peak)
    devices = (
        WhyCode.USED_DEVICE(index=one.index, used=one.memory / GIB, total=one.total / GIB)
        for one in found.devices
        if one.memory is not None and one.total
    )
    return (WhyCode.USED_MEMORY(used=used / GIB, limit=found.limit / GIB), *devices)


def _round_with_workers(logs: Sequence[AgentLog], latest: RoundFormed) -> int:
    """The number of the last round before the latest one in which any worker ran: another round may have been formed
    and ended in between, before its workers were started. Without one, of the round before the latest."""
    ran = {event.round for log in logs for event in log.events if isinstance(event, WorkerStarted | WorkerKept)}
    return max((number for number in ran if number < latest.round), default=latest.round - 1)


def _cost(logs: Sequence[AgentLog], before: int, latest: RoundFormed) -> list[Reasons]:
    """What a restart cost, on the node where that was most: the time from the end of the round `before` until workers
    ran again, that until each had made a step where steps are counted, and the lost work."""
    gaps = [gap for log in logs if (gap := _gap_of(log, before, latest)) is not None]
    if not gaps and (gap := _gap_of_job(logs, before, latest)) is not None:
        gaps = [gap]
    up = [gap.up for gap in gaps if gap.up is not None]
    lines: list[Reasons] = [(WhyCode.DOWN(seconds=max(up)),) if up else (WhyCode.STILL_DOWN(),)]
    counted = [gap for gap in gaps if gap.counts_steps]
    if up and counted:
        steps = [gap.step for gap in counted if gap.step is not None]
        all_step = len(steps) == len(counted)
        lines.append((WhyCode.NEXT_STEP(seconds=max(steps)) if all_step else WhyCode.NO_STEP_YET(),))
    if not build_ledger(logs).has_checkpoints:
        return [*lines, (WhyCode.LOST_UNKNOWN(),)]
    kept = any(isinstance(event, WorkerKept) and event.round == latest.round for log in logs for event in log.events)
    lost = 0 if kept else max((_lost_before(logs, log, before, latest) for log in logs), default=0)
    return [*lines, (WhyCode.LOST_WORK(seconds=lost / MICROSECONDS),)]


class _Gap(NamedTuple):
    """Seconds from the end of a round until the workers of the latest one ran, and until all of them had made a step.
    None: they have not yet. `counts_steps` if steps of one of the two rounds are known."""

    up: float | None
    step: float | None
    counts_steps: bool


def _gap_of(log: AgentLog, before: int, latest: RoundFormed) -> _Gap | None:
    """The gap on one node, by its monotonic clock; None if this agent had no workers in both rounds, as a spare that
    has stepped in: it waited, and nothing was broken."""
    broken: float | None = None
    had_workers, is_in_latest, counts_steps = False, False, False
    up: dict[int, float] = {}
    step: dict[int, float] = {}
    for event in log.events:
        match event:
            case RoundFormed():
                if had_workers and broken is None:
                    broken = event.mono
                is_in_latest = is_in_latest or _is_of(event, latest)
            case WorkerStarted(round=number) | WorkerKept(round=number):
                if is_in_latest and number == latest.round:
                    up[event.local_rank] = event.mono
                elif number == before:
                    had_workers = True
            case WorkerReady(round=number, stage="step") if number in (before, latest.round):
                counts_steps = True
                if number == latest.round:
                    step[event.local_rank] = event.mono if event.since is None else event.since
            case WorkerExited(round=number) if number == before and broken is None and not _is_done(event):
                broken = event.mono
            case RoundClosed(round=number) if number == before and had_workers and broken is None:
                broken = event.mono
    if broken is None or not is_in_latest:
        return None
    last_up, last_step = max(up.values(), default=None), max(step.values(), default=None)
    return _Gap(
        None if last_up is None else max(0.0, last_up - broken),
        None if last_step is None or not up.keys() <= step.keys() else max(0.0, last_step - broken),
        counts_steps,
    )


def _gap_of_job(logs: Sequence[AgentLog], before: int, latest: RoundFormed) -> _Gap | None:
    """The gap where all nodes of the latest round are new, which the time of day has to show."""
    ends = (WorkerExited, RoundClosed, AgentEnded)
    old = [
        log for log in logs if any(isinstance(event, WorkerStarted) and event.round == before for event in log.events)
    ]
    ended = [
        next((event.time for event in log.events if isinstance(event, ends) and not _is_done(event)), log.last.time)
        for log in old
    ]
    starts = [
        event
        for log in logs
        for event in log.events
        if isinstance(event, WorkerStarted | WorkerReady) and event.round == latest.round
    ]
    up = [event.time for event in starts if isinstance(event, WorkerStarted)]
    if not ended or not up:
        return None
    steps = [event.time for event in starts if isinstance(event, WorkerReady) and event.stage == "step"]
    return _Gap(
        max(0.0, (max(up) - min(ended)).total_seconds()),
        max(0.0, (max(steps) - min(ended)).total_seconds()) if len(steps) == len(up) else None,
        bool(steps),
    )


def _is_done(event: Event) -> bool:
    """Whether a worker has ended because its script was over, while others may go on."""
    return isinstance(event, WorkerExited) and event.code == 0 and not event.stopped_with


def _lost_before(logs: Sequence[AgentLog], log: AgentLog, before: int, latest: RoundFormed) -> int:
    """The microseconds of a worker of this agent that were lost between the begin of a round and the latest one."""
    places = {event.round: place for place, event in enumerate(log.events) if isinstance(event, RoundFormed)}
    if before not in places:
        return 0
    after = next((place for place, event in enumerate(log.events) if _is_of(event, latest)), len(log.events))
    elsewhere = checkpoints_elsewhere(logs, log)
    whole, earlier = (
        agent_times(AgentLog(log.opened, log.events[:end]), elsewhere=elsewhere)
        for end in (after + 1, places[before] + 1)
    )
    pairs = zip(whole, earlier, strict=True)
    return max((one.total(TimePhase.LOST) - other.total(TimePhase.LOST) for one, other in pairs), default=0)


def _is_of(event: object, latest: RoundFormed) -> bool:
    return isinstance(event, RoundFormed) and (event.epoch, event.round) == (latest.epoch, latest.round)
