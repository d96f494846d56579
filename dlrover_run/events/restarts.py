"""What the event log shows of the last restart: its cause, the failures, and the work that it cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dlrover_run.coordination.reasons import Reasons
from dlrover_run.events.answers import WhyCode, clock_text
from dlrover_run.events.ledger import agent_times, build_ledger, checkpoints_elsewhere
from dlrover_run.events.reader import AgentLog, merged
from dlrover_run.events.records import (
    LogOpened,
    RoundClosed,
    RoundFormed,
    WorkerExited,
    WorkerFailed,
    WorkerKept,
    WorkerStarted,
)
from dlrover_run.events.timeline import MICROSECONDS, TimePhase
from dlrover_run.failures.causes import Cause


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
    before = last_round(logs, besides=latest)
    if before is None:
        return [(WhyCode.NO_RESTART(),)]
    head: Reasons = (WhyCode.ROUND_FORMED(round=latest.round, at=clock_text(latest.time), nodes=latest.nodes),)
    if latest.reasons:
        head = (*head, WhyCode.BECAUSE(), *latest.reasons)
    return [head, *failures(logs, before), *_cost(logs, latest)]


def failures(logs: Sequence[AgentLog], of: RoundFormed) -> list[Reasons]:
    """The failures of one round, in the order of their times; those that other failures explain only if there is no
    other."""
    failed = [
        (entry.opened, entry.event)
        for entry in merged(logs)
        if isinstance(entry.event, WorkerFailed) and entry.event.round == of.round
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
    return (failed, WhyCode.LIVED(seconds=event.mono - starts[-1])) if starts else (failed,)


def _cost(logs: Sequence[AgentLog], latest: RoundFormed) -> list[Reasons]:
    """The time without workers before the latest round, on the node where it was longest, and the lost work."""
    down = [seconds for log in logs if (seconds := _down(log, latest)) is not None]
    lines: list[Reasons] = [(WhyCode.DOWN(seconds=max(down)),) if down else (WhyCode.STILL_DOWN(),)]
    if not build_ledger(logs).has_checkpoints:
        return [*lines, (WhyCode.LOST_UNKNOWN(),)]
    kept = any(isinstance(event, WorkerKept) and event.round == latest.round for log in logs for event in log.events)
    lost = 0 if kept else max((_lost_before(logs, log, latest) for log in logs), default=0)
    return [*lines, (WhyCode.LOST_WORK(seconds=lost / MICROSECONDS),)]


def _down(log: AgentLog, latest: RoundFormed) -> float | None:
    """The seconds from the end of the round before the latest one to the start of the latest one's last worker; None
    if this agent had no workers in both."""
    broken: float | None = None
    running = False
    up: float | None = None
    for event in log.events:
        match event:
            case WorkerStarted(round=number) if number == latest.round:
                up = event.mono
            case WorkerStarted():
                broken, running = None, True
            case WorkerExited() | RoundClosed() | RoundFormed() if running and broken is None:
                broken = event.mono
    return None if broken is None or up is None else max(0.0, up - broken)


def _lost_before(logs: Sequence[AgentLog], log: AgentLog, latest: RoundFormed) -> int:
    """The microseconds of a worker of this agent that the end of the round before the latest one lost."""
    after = next((place for place, event in enumerate(log.events) if _is_of(event, latest)), len(log.events))
    before = next((place for place in range(after - 1, -1, -1) if isinstance(log.events[place], RoundFormed)), 0)
    elsewhere = checkpoints_elsewhere(logs, log)
    whole, earlier = (
        agent_times(AgentLog(log.opened, log.events[:end]), elsewhere=elsewhere) for end in (after + 1, before + 1)
    )
    pairs = zip(whole, earlier, strict=True)
    return max((one.total(TimePhase.LOST) - other.total(TimePhase.LOST) for one, other in pairs), default=0)


def _is_of(event: object, latest: RoundFormed) -> bool:
    return isinstance(event, RoundFormed) and (event.epoch, event.round) == (latest.epoch, latest.round)
