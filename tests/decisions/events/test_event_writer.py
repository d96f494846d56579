"""The files of the event log: rotation, a disk that is full or slow, and reading what is left."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
import pytest

from dlrover_run.events import writer
from dlrover_run.events.reader import AgentLog, NoEventLog, latest_run, merged, read_logs
from dlrover_run.events.records import (
    FILE_NAME,
    SCHEMA,
    CheckpointSeen,
    Event,
    JobEnded,
    LogGap,
    LogOpened,
    StopRequested,
    WorkerExited,
    WorkerFailed,
)
from dlrover_run.events.writer import EventFile, EventWriter

NOW = datetime(2026, 11, 22, 4, 12, 31, 337000, tzinfo=UTC)
FAILED = WorkerFailed(round=1, rank=0, local_rank=0, pid=9, code=1, cause="exception", what="raised KeyError: 1")


def opened(host: str = "n01") -> LogOpened:
    return LogOpened(schema=SCHEMA, job="j", host=host, node_id=host, pid=1, workers=1, began=1.0)


def steps(number: int) -> list[Event]:
    return [CheckpointSeen(step=step) for step in range(number)]


def written(path: Path, *events: Event, warn: Callable[[str], None] = print, **limits: int) -> EventWriter:
    """Write events, and wait until they are in the file."""
    log = EventWriter(EventFile(path, opened(), **limits), warn, lambda: NOW, lambda: 8123.4114567)
    for event in events:
        log.emit(event)
    assert log.close()
    return log


def test_a_file_that_another_program_moves_removes_or_truncates_is_followed(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    file = EventFile(path, opened())
    file.append(steps(1)[0])
    path.rename(tmp_path / "moved")
    file.append(StopRequested(signal="SIGTERM"))
    file.append(StopRequested(signal="SIGINT"))
    assert len((tmp_path / "moved").read_text().splitlines()) == 2
    assert ["opened" in line or "stop" in line for line in path.read_text().splitlines()] == [True] * 3
    path.unlink()
    file.append(FAILED)
    assert "KeyError" in path.read_text().splitlines()[1]
    os.truncate(path, 0)
    file.append(FAILED)
    first, second = path.read_text().splitlines()
    assert "dlrover.log.opened" in first
    assert "KeyError" in second
    file.close()


def test_each_line_is_one_object_with_its_name_and_times(tmp_path: Path) -> None:
    written(tmp_path / FILE_NAME, StopRequested(signal="SIGTERM"), FAILED)
    first, second, third = (tmp_path / FILE_NAME).read_text().splitlines()
    assert first.startswith('{"event":"dlrover.log.opened"')
    assert second == (
        '{"event":"dlrover.stop.requested","time":"2026-11-22T04:12:31.337000Z","mono":8123.411457,"signal":"SIGTERM"}'
    )
    assert '"severity":"ERROR"' in third


def test_without_an_event_there_is_neither_a_file_nor_a_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    log = EventWriter(EventFile(tmp_path / FILE_NAME, opened()), print)
    # A thread of an earlier test may end meanwhile.
    assert not set(threading.enumerate()) - before
    assert log.close()
    log.emit(CheckpointSeen())
    assert not list(tmp_path.iterdir())
    with pytest.raises(NoEventLog):
        read_logs(tmp_path)


def test_files_are_rotated_and_bounded_and_each_begins_with_the_agent(tmp_path: Path) -> None:
    written(tmp_path / FILE_NAME, *steps(200), max_bytes=2000, kept_files=2)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == [FILE_NAME, f"{FILE_NAME}.1", f"{FILE_NAME}.2"]
    assert all(path.stat().st_size <= 2000 for path in files)
    assert all(path.read_text().startswith('{"event":"dlrover.log.opened"') for path in files)
    (log,) = read_logs(tmp_path)
    kept = [event.step for event in log.events if isinstance(event, CheckpointSeen)]
    assert kept == list(range(200 - len(kept), 200))
    assert log.torn_head


def test_a_rotation_that_drops_no_file_is_no_torn_log(tmp_path: Path) -> None:
    written(tmp_path / FILE_NAME, *steps(40), max_bytes=2000, kept_files=9)
    (log,) = read_logs(tmp_path)
    assert len(log.events) == 40
    assert not log.torn_head


def test_only_failures_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("dlrover_run.events.writer.os.fsync", synced.append)
    written(tmp_path / FILE_NAME, *steps(3), FAILED)
    assert len(synced) == 1


def test_all_that_waits_is_written_before_the_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced_at: list[int] = []
    opened_at, may_open = threading.Event(), threading.Event()

    class SlowToOpen(EventFile):
        def append(self, event: Event) -> None:
            opened_at.set()
            assert may_open.wait(60)
            super().append(event)

    path = tmp_path / FILE_NAME
    monkeypatch.setattr("dlrover_run.events.writer.os.fsync", lambda fd: synced_at.append(os.fstat(fd).st_size))
    log = EventWriter(SlowToOpen(path, opened()), print)
    log.emit(FAILED)
    assert opened_at.wait(60)
    for event in (FAILED, *steps(3)):
        log.emit(event)
    may_open.set()
    assert log.close(timeout=60)
    assert synced_at == [path.stat().st_size], "once, with every line written"


class DiskFullFor(EventFile):
    """A disk that is full while some steps are written."""

    def __init__(self, path: Path, *steps: int) -> None:
        super().__init__(path, opened())
        self._steps = steps

    def append(self, event: Event) -> None:
        if isinstance(event, CheckpointSeen) and event.step in self._steps:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().append(event)


def test_a_disk_that_is_full_is_named_once_and_the_gap_is_noted(tmp_path: Path) -> None:
    warnings: list[str] = []
    log = EventWriter(DiskFullFor(tmp_path / FILE_NAME, 1, 2, 4), warnings.append)
    for event in steps(6):
        log.emit(event)
    assert log.close()
    (found,) = read_logs(tmp_path)
    steps_written = [event.step for event in found.events if isinstance(event, CheckpointSeen)]
    assert steps_written == [0, 3, 5]
    assert sum(event.dropped for event in found.events if isinstance(event, LogGap)) == 3
    assert len(warnings) == 1
    assert str(tmp_path / FILE_NAME) in warnings[0]


def test_a_line_that_a_full_disk_cut_costs_no_other_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = EventFile(tmp_path / FILE_NAME, opened())
    file.append(CheckpointSeen(step=1))
    room, write = [20, 0], os.write

    def fill(fd: int, data: bytes) -> int:
        if (left := room.pop(0)) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:left])

    with monkeypatch.context() as patch:
        patch.setattr("dlrover_run.events.writer.os.write", fill)
        with pytest.raises(OSError, match="space"):
            file.append(CheckpointSeen(step=2))
    file.append(CheckpointSeen(step=3))
    file.close()
    (found,) = read_logs(tmp_path)
    assert [event.step for event in found.events if isinstance(event, CheckpointSeen)] == [1, 3]
    assert found.unread == 1


def test_a_disk_that_is_full_at_the_start_costs_no_later_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = EventFile(tmp_path / FILE_NAME, opened())
    with monkeypatch.context() as patch:
        patch.setattr("dlrover_run.events.writer.os.write", fail)
        with pytest.raises(OSError, match="space"):
            file.append(CheckpointSeen(step=1))
    file.append(CheckpointSeen(step=2))
    file.close()
    (found,) = read_logs(tmp_path)
    assert [event.step for event in found.events if isinstance(event, CheckpointSeen)] == [2]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    warnings: list[str] = []
    written(tmp_path / "file" / FILE_NAME, *steps(3), warn=warnings.append)
    assert len(warnings) == 1


def test_a_disk_that_blocks_holds_up_neither_an_event_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, blocked = threading.Event(), threading.Event()
    write = os.write

    def wait(fd: int, data: bytes) -> int:
        writing.set()
        blocked.wait(60)
        return write(fd, data)

    monkeypatch.setattr("dlrover_run.events.writer.os.write", wait)
    monkeypatch.setattr(writer, "MAX_PENDING", 10)
    log = EventWriter(EventFile(tmp_path / FILE_NAME, opened()), print)
    first, *others = steps(50)
    log.emit(first)
    # The thread has taken the first one, and takes no other, so all that is dropped comes after those that are kept.
    assert writing.wait(60)
    for event in others:
        log.emit(event)
    assert not log.close(timeout=0.01)
    blocked.set()
    assert log.close(timeout=60)
    (found,) = read_logs(tmp_path)
    kept = [event.step for event in found.events if isinstance(event, CheckpointSeen)]
    assert kept == list(range(1 + writer.MAX_PENDING))
    assert found.events[-1] == msgspec.structs.replace(found.events[-1], dropped=50 - len(kept))


def test_lines_of_a_later_version_are_counted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    written(path, *steps(1))
    with path.open("a") as file:
        file.write('{"event":"dlrover.worker.teleported","mono":1}\n')
        file.write('{"event":"dlrover.checkpoint.seen","step":7,"color":"red"}\n')
        file.write('{"event":"dlrover.checkpoint.se')
    (log,) = read_logs(path)
    assert [event.step for event in log.events if isinstance(event, CheckpointSeen)] == [0, 7]
    assert log.unread == 2


def test_a_line_without_an_end_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    written(path, *steps(1))
    with path.open("ab") as file:
        file.write(b"x" * 3_000_000 + b"\n")
        file.write(b'{"event":"dlrover.checkpoint.seen","step":7}\n')
    (log,) = read_logs(path)
    assert [event.step for event in log.events if isinstance(event, CheckpointSeen)] == [0, 7]
    assert log.unread == 1


def test_the_logs_of_several_agents_are_merged_by_time(tmp_path: Path) -> None:
    for host, seconds in (("n02", (3, 4, 1)), ("n01", (2, 5))):
        times = iter([NOW.replace(second=second) for second in seconds])
        log = EventWriter(EventFile(tmp_path / f"{host}.{FILE_NAME}", opened(host)), print, partial(next, times))
        for second in seconds:
            log.emit(CheckpointSeen(step=second))
        assert log.close()
    logs = read_logs(tmp_path)
    entries = [(one.opened.host, one.event.step) for one in merged(logs) if isinstance(one.event, CheckpointSeen)]
    # The clock of n02 was set back; its events keep their order.
    assert entries == [("n01", 2), ("n02", 3), ("n02", 4), ("n02", 1), ("n01", 5)]


def test_the_latest_run_of_a_directory_of_several_jobs() -> None:
    def log(job: str, second: int, *events: Event) -> AgentLog:
        head = msgspec.structs.replace(opened(), job=job, time=NOW.replace(second=second))
        return AgentLog(
            head, tuple(msgspec.structs.replace(each, time=NOW.replace(second=second + 5)) for each in events)
        )

    other, ended, killed, again = log("k", 8), log("j", 1, JobEnded(phase="failed")), log("j", 10), log("j", 20)
    assert latest_run([ended, other, killed, again]) == [killed, again]
    assert latest_run([ended, other]) == [other]
    assert latest_run([]) == []


def test_a_worker_that_was_stopped_is_no_failure() -> None:
    stopped = WorkerExited(round=1, rank=0, local_rank=0, pid=9, code=-15, stopped_with="SIGTERM")
    assert not stopped.failed
