"""The events that an agent keeps in memory, and which of a running job's logs a command reads."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from dlrover_run.events.reader import AgentLog, parse_log
from dlrover_run.events.recent import RecentEvents
from dlrover_run.events.records import (
    ERROR,
    NO_EVENTS,
    CheckpointSeen,
    Event,
    JobEnded,
    LogOpened,
    RoundFormed,
    StopRequested,
    WorkerProgress,
)
from dlrover_run.events.writer import EventFile, EventWriter
from dlrover_run.features.operate.jobs.event_logs import written_logs
from dlrover_run.features.operate.protocol import AgentInfo

FORMED = RoundFormed(round=1, epoch=1, node=0, nodes=1, first_rank=0, workers=1, world_size=1, restarts=0)
NOW = datetime(2026, 11, 27, 4, tzinfo=UTC)


def opened(pid: int = 1) -> LogOpened:
    return LogOpened(time=NOW, schema=1, job="j", host="n1", node_id="n1", pid=pid, workers=1, began=1.0)


def kept(*events: Event, max_bytes: int = 1000) -> AgentLog:
    """What a reader finds of events of which each name has that room."""
    recent = RecentEvents(opened(), NO_EVENTS, max_bytes)
    for event in events:
        recent.emit(event)
    log = parse_log(recent.lines())
    assert log is not None
    assert log.unread == 0
    return log


def figures(number: int) -> list[Event]:
    return [WorkerProgress(round=1, rank=0, local_rank=0, steps=step, samples=0, waited=0.0) for step in range(number)]


def test_all_events_are_kept_in_their_order_with_their_times_and_severity() -> None:
    log = kept(FORMED, CheckpointSeen(step=1), StopRequested(signal="SIGTERM"), JobEnded(phase="failed", restarts=0))
    assert [type(event) for event in log.events] == [RoundFormed, CheckpointSeen, StopRequested, JobEnded]
    assert not log.torn_head
    assert log.events[-1].severity == ERROR
    assert all(event.time > NOW or event.mono > 0 for event in log.events)


def test_figures_push_out_figures_only() -> None:
    log = kept(FORMED, *figures(1000))
    assert isinstance(log.events[0], RoundFormed)
    steps = [event.steps for event in log.events if isinstance(event, WorkerProgress)]
    assert 1 < len(steps) < 20
    assert steps == list(range(1000 - len(steps), 1000))
    assert not log.torn_head, "what happened is whole"


def test_a_reader_knows_that_earlier_events_are_gone() -> None:
    log = kept(FORMED, *(CheckpointSeen(step=step) for step in range(1000)))
    assert isinstance(log.events[0], RoundFormed)
    assert log.torn_head


def test_an_event_without_room_is_kept_alone() -> None:
    log = kept(*(StopRequested(signal=f"{number}" * 2000) for number in (1, 2)))
    assert [event.signal[0] for event in log.events if isinstance(event, StopRequested)] == ["2"]


def agent(log: Path | str, pid: int) -> AgentInfo:
    return AgentInfo(job="j", program="dlrover-run", backend="memory", host="n1", node_id="x", pid=pid, log=str(log))


def test_the_log_of_another_agent_at_the_same_path_is_not_read(tmp_path: Path) -> None:
    """Of an agent with files of its own, as in a container, the path here is that of another file."""
    path = tmp_path / "events.jsonl"
    writer = EventWriter(EventFile(path, opened(pid=7)), print)
    writer.emit(FORMED)
    assert writer.close()
    own, other, without = agent(path, 7), agent(path, 8), agent("", 9)
    assert [log.opened.pid for log in written_logs([own, without]).logs] == [7]
    assert written_logs([own, without]).unread == [without]
    assert written_logs([other]) == ([], [other])


def test_a_log_that_has_lost_events_is_not_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    lines: list[str] = []
    writer = EventWriter(EventFile(tmp_path / "file" / "events.jsonl", opened()), lines.append)
    recent = RecentEvents(opened(), writer)
    assert recent.path
    recent.emit(FORMED)
    assert recent.close()
    assert len(lines) == 1
    assert recent.path == ""
    assert len(recent.lines()) == 2
