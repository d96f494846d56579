"""Answers of the event log to `why`: why a job restarted, failed, is slow, or was slow to start. Pure.

An answer is lines of codes with parameters. `WhyAnswer.text` renders them; the texts are in `WhyCode` alone.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from dlrover_run.coordination.reasons import Code, Reason, ReasonCode, Reasons, register, render, sentence
from dlrover_run.events.ledger import (
    MICROSECONDS,
    Ledger,
    PlaceTimes,
    TimePhase,
    agent_times,
    build_ledger,
    checkpoints_elsewhere,
)
from dlrover_run.events.reader import AgentLog, merged
from dlrover_run.events.records import (
    AgentEnded,
    JobEnded,
    LogOpened,
    NodeWaiting,
    RoundClosed,
    RoundFormed,
    WorkerExited,
    WorkerFailed,
    WorkerKept,
    WorkerProgress,
    WorkerResumed,
    WorkerStalled,
    WorkerStarted,
)
from dlrover_run.events.stragglers import straggler_times
from dlrover_run.failures.causes import Cause

STRAGGLER_MARGIN = 0.1
"""A rank is slow if it waits for the others by at least this part of its time less than their median does."""

MAX_STRAGGLER_TIMES = 8
"""Times of stragglers in one answer, the longest."""


class WhyCode(ReasonCode):
    """What the log answers."""

    NO_ROUND = "no round has been formed"
    NO_RESTART = "the workers have not been restarted"
    ROUND_FORMED = "round {round} was formed at {at} with {nodes:#node}"
    BECAUSE = ", because:"
    FAILED_WORKER = "{name} on {host} (pid {pid}) {what}"
    LIVED = ", {seconds:.1f} s after its start"
    DOWN = "workers ran again after {seconds:.1f} s"
    TASK_DOWN = "it ran again after {seconds:.1f} s"
    TASK_STILL_DOWN = "it has not been started again"
    STILL_DOWN = "its workers have not been started yet"
    LOST_WORK = "{seconds:.1f} s of work since the last checkpoint were lost"
    LOST_UNKNOWN = "the log has no checkpoint, so it does not show how much work was lost"

    TRAINED = "{percent:.1f} % of {seconds:.0f} s were training"
    SHARES = ", the other time:"
    SHARE = "{phase} {percent:.1f} %"
    STRAGGLER = "rank {rank} on {host} waits {own:.0f} % of its time, the others {others:.0f} %"
    STRAGGLES = "{name} on {host} is a straggler since {at}:"
    STRAGGLED = "{name} on {host} was a straggler for {seconds:.0f} s from {at}:"
    NO_STRAGGLER = "no rank waits much less than the others"
    NO_PROGRESS = "the log has no progress of at least two ranks, so it does not show which rank is slow"

    START_TOOK = "training began after {seconds:.1f} s, last on rank {local_rank} of {host}:"
    NOT_TRAINING = "after {seconds:.1f} s there is no training on rank {local_rank} of {host}:"
    PART = "{phase} {seconds:.1f} s"
    WAITED = "{host} waited up to the first round, because:"

    STALLED = "{name} on {host} has made no progress since {at}"
    JOB_FAILED = "the job failed at {at}:"
    JOB_STOPPED = "the job ended at {at}:"
    JOB_SUCCEEDED = "the job succeeded at {at}, after {number:#restart}"
    AGENT_ENDED = "the launcher on {host} ended at {at} with exit code {code}:"
    WAITS = "{host} waits, because:"
    TRAINS = "round {round} trains since {at}"
    TASKS = "{number:#task} of version {version} of the cluster, running"
    TORN = "the log of {host} has no end: its agent was killed after {at}, or it still runs"
    UNREAD = "{number:#line} of the log of {host} could not be read"


register(WhyCode, "why.")


class Question(enum.StrEnum):
    """What a user asks."""

    NOW = "now"
    LAST_RESTART = "last restart"
    SLOW = "slow"
    START = "start"


@dataclass(frozen=True)
class WhyAnswer:
    """What the log shows. Each line is a chain of reasons."""

    lines: tuple[Reasons, ...]

    @property
    def text(self) -> str:
        """The lines as sentences."""
        return "\n".join(map(render, self.lines))

    @property
    def codes(self) -> tuple[tuple[str, ...], ...]:
        """The codes of each line."""
        return tuple(tuple(reason.code for reason in line) for line in self.lines)


def explain(logs: Sequence[AgentLog], question: Question, until: datetime | None = None) -> WhyAnswer:
    """Answer a question from the logs of all agents of a job, as far as they show. With `until`, agents without an end
    run, and that is now; without, their logs are all there is."""
    if question is Question.NOW:
        lines = _now(logs)
    elif question is Question.LAST_RESTART:
        lines = _last_restart(logs)
    elif question is Question.SLOW:
        lines = [_shares(build_ledger(logs, until, running=until is not None)), *_stragglers(logs)]
    else:
        lines = _start(logs, until)
    return WhyAnswer((*lines, *_limits(logs, until is not None)))


def _limits(logs: Sequence[AgentLog], running: bool) -> list[Reasons]:
    """What the logs do not show."""
    lines: list[Reasons] = []
    for log in logs:
        if log.ended is None and not running:
            lines.append((WhyCode.TORN(host=log.opened.host, at=_at(log.last.time)),))
        # The last line of an agent that runs or was killed may be incomplete.
        if log.unread > (log.ended is None):
            lines.append((WhyCode.UNREAD(host=log.opened.host, number=log.unread),))
    return lines


def _now(logs: Sequence[AgentLog]) -> list[Reasons]:
    """The state that the log ends with, and why it is so."""
    if stalls := _stalls(logs):
        return stalls
    entries = list(merged(logs))
    end = next((entry.event for entry in reversed(entries) if isinstance(entry.event, JobEnded)), None)
    if end is not None:
        return _job_end(logs, end)
    if logs and all(log.ended is not None for log in logs):
        return [
            (
                WhyCode.AGENT_ENDED(host=entry.opened.host, at=_at(last.time), code=last.exit_code),
                *sentence(last.what or last.reason),
            )
            for entry in entries
            if isinstance(last := entry.event, AgentEnded)
        ]
    waiting = [
        (WhyCode.WAITS(host=log.opened.host), *state.reasons)
        for log in logs
        if log.ended is None and isinstance(state := _state(log), NodeWaiting)
    ]
    if waiting:
        return waiting
    last_round = _last_round(logs)
    if last_round is None:
        return _tasks(logs)
    if last_round.round > 1:
        return _last_restart(logs)
    return [(WhyCode.TRAINS(round=last_round.round, at=_at(last_round.time)),)]


def _job_end(logs: Sequence[AgentLog], end: JobEnded) -> list[Reasons]:
    at, last_round = _at(end.time), _last_round(logs)
    if end.phase != "failed":
        return [(WhyCode.JOB_SUCCEEDED(at=at, number=end.restarts),)]
    if Code.STOPPED_ON_REQUEST.within(end.reasons):
        return [(WhyCode.JOB_STOPPED(at=at), *end.reasons)]
    failed = _last_task_failure(logs)[:1] if last_round is None else _failures(logs, last_round)
    return [(WhyCode.JOB_FAILED(at=at), *end.reasons), *failed]


def _state(log: AgentLog) -> RoundFormed | NodeWaiting | None:
    """What the agent did last of being in a round and waiting for one."""
    return next((event for event in reversed(log.events) if isinstance(event, RoundFormed | NodeWaiting)), None)


def _stalls(logs: Sequence[AgentLog]) -> list[Reasons]:
    """The workers that make no progress at the end of the log, those first that keep the others waiting."""
    found: dict[tuple[int, int], tuple[WorkerStalled, str]] = {}
    for place, log in enumerate(logs):
        for event in log.events:
            match event:
                case WorkerStalled():
                    found[place, event.local_rank] = event, log.opened.host
                case WorkerResumed() | WorkerExited():
                    found.pop((place, event.local_rank), None)
                case RoundFormed() | RoundClosed() | JobEnded() | AgentEnded():
                    found = {key: value for key, value in found.items() if key[0] != place}
    ordered = sorted(found.values(), key=lambda each: (not each[0].guilty, each[0].since, each[0].rank))
    return [
        (WhyCode.STALLED(name=event.name, host=host, at=_at(event.time)), *event.reasons) for event, host in ordered
    ]


def _last_round(logs: Sequence[AgentLog], besides: RoundFormed | None = None) -> RoundFormed | None:
    """The event of the latest round, `besides` that one if it is given, as the node wrote it that formed it first."""
    rounds = [event for log in logs for event in log.events if isinstance(event, RoundFormed)]
    others = [event for event in rounds if besides is None or not _is_of(event, besides)]
    return min(others, key=lambda event: (-event.epoch, -event.round, event.time), default=None)


def _last_restart(logs: Sequence[AgentLog]) -> list[Reasons]:
    latest = _last_round(logs)
    if latest is None:
        return _last_task_failure(logs)
    before = _last_round(logs, besides=latest)
    if before is None:
        return [(WhyCode.NO_RESTART(),)]
    head: Reasons = (WhyCode.ROUND_FORMED(round=latest.round, at=_at(latest.time), nodes=latest.nodes),)
    if latest.reasons:
        head = (*head, WhyCode.BECAUSE(), *latest.reasons)
    return [head, *_failures(logs, before), *_cost(logs, latest)]


def _is_of(event: object, latest: RoundFormed) -> bool:
    return isinstance(event, RoundFormed) and (event.epoch, event.round) == (latest.epoch, latest.round)


def _failures(logs: Sequence[AgentLog], of: RoundFormed) -> list[Reasons]:
    """The failures of one round, in the order of their times; those that other failures explain only if there is no
    other."""
    failed = [
        (entry.opened, entry.event)
        for entry in merged(logs)
        if isinstance(entry.event, WorkerFailed) and entry.event.round == of.round
    ]
    roots = [each for each in failed if each[1].cause != Cause.LOST_PEER]
    return [_failure(logs, opened, event) for opened, event in roots or failed]


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


def _last_task_failure(logs: Sequence[AgentLog]) -> list[Reasons]:
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


def _shares(ledger: Ledger) -> Reasons:
    """The part of the time that each phase took, the longest first."""
    totals = ledger.totals()
    trained, wall = totals.pop(TimePhase.TRAIN), max(1, ledger.wall)
    others = Counter({phase: time for phase, time in totals.items() if time}).most_common()
    head: Reasons = (WhyCode.TRAINED(percent=100 * trained / wall, seconds=ledger.wall / MICROSECONDS),)
    if others:
        head = (*head, WhyCode.SHARES())
    return (*head, *(WhyCode.SHARE(phase=phase.value, percent=100 * time / wall) for phase, time in others))


def _stragglers(logs: Sequence[AgentLog]) -> list[Reasons]:
    """The ranks for which the others wait: those that were found while the job ran, else the one that waits least by
    what the scripts report."""
    found = straggler_times(logs)[:MAX_STRAGGLER_TIMES]
    if not found:
        return [_straggler(logs)]
    return [
        (
            WhyCode.STRAGGLES(name=one.name, host=one.host, at=_at(one.at))
            if one.seconds is None
            else WhyCode.STRAGGLED(name=one.name, host=one.host, at=_at(one.at), seconds=one.seconds),
            *one.reasons,
        )
        for one in found
    ]


def _straggler(logs: Sequence[AgentLog]) -> Reasons:
    """The rank for which the others wait: the one that waits least itself."""
    ratios = _wait_ratios(logs)
    if len(ratios) < 2:
        return (WhyCode.NO_PROGRESS(),)
    ordered = sorted(ratios, key=lambda each: each[0])
    (own, rank, host), others = ordered[0], [each[0] for each in ordered[1:]]
    usual = others[len(others) // 2]
    if usual - own < STRAGGLER_MARGIN:
        return (WhyCode.NO_STRAGGLER(),)
    return (WhyCode.STRAGGLER(rank=rank, host=host, own=100 * own, others=100 * usual),)


def _wait_ratios(logs: Sequence[AgentLog]) -> list[tuple[float, int, str]]:
    """For each worker of the latest round its part of the time in which it waited, between its first and its last
    figures; its rank, and its host."""
    latest = _last_round(logs)
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


def _at(time: datetime) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC")
