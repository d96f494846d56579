"""The event logs that agents keep without a flag: where they are, who can read them, and which are removed."""

from __future__ import annotations

import asyncio
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dlrover_run.command_line.program import DLROVER_RUN
from dlrover_run.events import state_directory
from dlrover_run.events.reader import AgentLog, latest_run, other_runs, read_logs, runs_of
from dlrover_run.events.records import AgentEnded, JobEnded, LogOpened, RoundFormed, StopRequested
from dlrover_run.events.state_directory import KeptFile, file_name, name_prefix, prepare, superfluous
from dlrover_run.events.writer import EventFile, EventWriter
from dlrover_run.features.operate.commands import asker, completion
from dlrover_run.features.operate.jobs import ended
from dlrover_run.features.operate.jobs.ended import EndedJobs
from dlrover_run.features.operate.jobs.event_logs import named_logs
from dlrover_run.features.operate.jobs.find import JobElsewhere
from dlrover_run.spec import SpecError
from dlrover_run.words.reasons import Code

OTHER = 2_000_000_000
"""No pid of a process."""


ROUND: dict[str, Any] = {
    "round": 1, "epoch": 1, "node": 0, "nodes": 2, "first_rank": 0, "workers": 4, "world_size": 8, "restarts": 0,
}  # fmt: skip


def no_pid(pid: int) -> bool:
    return False


def opened(job: str) -> LogOpened:
    return LogOpened(time=datetime.now(UTC), schema=1, job=job, host="n1", node_id="a", pid=1, workers=1, began=1)


def keep(directory: Path, job: str, pid: int, **options: object) -> Path:
    """Write a log as an agent without flags does."""
    path = directory / file_name(job, "n1", pid)
    file = EventFile(path, opened(job), prepare=lambda: prepare(directory), private=True)
    writer = EventWriter(file, lambda sentence: None)
    writer.emit(StopRequested(signal="SIGTERM"))
    assert writer.close()
    return path


def test_only_the_user_can_read_them(tmp_path: Path) -> None:
    directory = tmp_path / "state" / "dlrover-run" / "events"
    path = keep(directory, "a", OTHER)
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (directory.parent, directory, path)]
    assert modes == [0o700, 0o700, 0o600]


def test_the_latest_logs_are_kept_and_those_of_agents_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_directory, "KEPT_LOGS", 1)
    monkeypatch.setattr(state_directory, "MAX_LOGS", 2)
    names = [file_name("job", "n1", pid) for pid in (1, 2, 3, 4)]
    files = [KeptFile(name, float(place)) for place, name in enumerate(names)]
    # Its rotated file goes with a log, and what is no log stays.
    files += [KeptFile(f"{names[0]}.1", 0.0), KeptFile("notes.txt", 0.0)]
    assert superfluous(files, no_pid, now=4.0) == [names[1], names[0], f"{names[0]}.1"]
    assert superfluous(files, lambda pid: pid == 2, now=4.0) == [names[0], f"{names[0]}.1"]


def test_the_job_of_the_night_outlives_a_thousand_short_ones_and_a_hundred_last_ones_any_time() -> None:
    day = 24 * 3600.0
    night = KeptFile(file_name("night", "n1", 1), 0.0, 200_000)
    short = [KeptFile(file_name(f"test-{pid}", "n1", pid), float(pid), 4000) for pid in range(2, 1500)]
    assert superfluous([night, *short], no_pid, now=day / 2) == []
    later = superfluous([night, *short], no_pid, now=30 * day)
    assert night.name in later
    assert len(short) + 1 - len(later) == state_directory.KEPT_LOGS


def test_the_logs_are_bounded_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_directory, "KEPT_LOGS", 1)
    monkeypatch.setattr(state_directory, "MAX_TOTAL_BYTES", 100)
    files = [KeptFile(file_name("job", "n1", pid), float(pid), 40) for pid in (1, 2, 3)]
    assert superfluous(files, no_pid, now=4.0) == [files[0].name]


def test_a_job_that_begins_removes_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_directory, "KEPT_LOGS", 1)
    old, new = keep(tmp_path, "a", OTHER), keep(tmp_path, "b", OTHER + 1)
    os.utime(old, (1, 1))
    last = keep(tmp_path, "c", OTHER + 2)
    assert [old.exists(), new.exists(), last.exists()] == [False, True, True]


def test_a_job_with_a_log_elsewhere_has_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = keep(tmp_path / "logs", "a", OTHER)
    directory = state_directory.state_directory(os.environ)
    assert directory is not None
    prepare(directory, file_name("a", "n1", OTHER), path)
    assert [job.name for job in EndedJobs()] == ["a"]
    path.unlink()
    assert EndedJobs().find(None) is None


def test_the_last_job_is_meant_or_the_one_that_a_word_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory = state_directory.state_directory(os.environ)
    assert directory is not None
    for place, job in enumerate(("resnet", "gpt/3", "bert")):
        os.utime(keep(directory, job, OTHER + place), (place, place))
    words = (None, "resnet", "res", "gpt/3", str(OTHER + 1), "llama")
    found = [EndedJobs().find(word) for word in words]
    assert [job and job.name for job in found] == ["bert", "resnet", "resnet", "gpt/3", "gpt/3", None]


def test_the_candidates_of_the_shell_are_read_from_first_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_whole(path: Path) -> None:
        raise AssertionError(f"{path} is read as a whole while the user types")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(completion, "complete_job", lambda incomplete: ["gpt-run"])
    monkeypatch.setattr(ended, "read_log", read_whole)
    directory = state_directory.state_directory(os.environ)
    assert directory is not None
    for place, job in enumerate(("gpt/3", "gpt-run", "gpt_3", "gpt/3", "bert")):
        os.utime(keep(directory, job, OTHER + place), (place, place))
    assert completion.complete_any_job("gpt") == ["gpt-run", "gpt/3", "gpt_3"]
    monkeypatch.setattr(completion, "MAX_ENDED", 1)
    assert completion.complete_any_job("") == ["gpt-run", "bert"]


def test_a_log_without_a_time_in_its_first_line_is_a_run() -> None:
    """As in a log that was written by hand."""
    log = AgentLog(LogOpened(schema=1, job="a", host="n1", node_id="a", pid=1, workers=1, began=1))
    assert latest_run([log]) == [log], "`runs_of` would not end"
    assert runs_of([log]) == [[log]]


def test_the_states_of_jobs_that_have_ended(tmp_path: Path) -> None:
    """Two runs of one name are two jobs, a log without an end is of agents that were killed, and a job whose agent runs
    has not ended."""
    stopped = JobEnded(phase="failed", reasons=(Code.STOPPED_ON_REQUEST(by="ann"),))
    for pid, job, events in (
        (OTHER, "a", [JobEnded(phase="finished"), AgentEnded(exit_code=0, reason="success")]),
        (OTHER + 1, "a", [JobEnded(phase="failed")]),
        (OTHER + 2, "b", [stopped]),
        (OTHER + 3, "c", [AgentEnded(exit_code=143, reason="stopped")]),
        (OTHER + 4, "d", []),
    ):
        path = tmp_path / file_name(job, "n1", pid)
        writer = EventWriter(EventFile(path, opened(job)), lambda sentence: None)
        for event in (RoundFormed(**ROUND), *events):
            writer.emit(event)
        assert writer.close()
        os.utime(path, (pid - OTHER, pid - OTHER))
    jobs = list(EndedJobs(tmp_path))
    assert [(job.name, job.state) for job in jobs] == [
        ("d", "no end"), ("c", "stopped"), ("b", "stopped"), ("a", "failed"), ("a", "succeeded"),
    ]  # fmt: skip
    assert {(job.nodes, job.workers) for job in jobs} == {(2, 8)}


def test_why_of_the_only_job_that_runs_names_the_one_that_has_just_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory = state_directory.state_directory(os.environ)
    assert directory is not None
    keep(directory, "bert", OTHER)

    async def find(*_: object) -> JobElsewhere:
        return object.__new__(JobElsewhere)

    monkeypatch.setattr(asker, "find_job", find)
    here = asker.Asker(DLROVER_RUN, "why", "10", {"rdzv_id": None})
    assert asyncio.run(here.read_logs(None))[0] == []
    assert "'bert' has ended: `dlrover-run why bert`" in capsys.readouterr().err


def test_a_home_of_another_user_or_none_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_directory.state_directory({}) == tmp_path / ".local" / "state" / "dlrover-run" / "events"
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert state_directory.state_directory({}) is None
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    assert state_directory.state_directory({}) is None


def test_other_jobs_files_are_not_read(tmp_path: Path) -> None:
    keep(tmp_path, "a", OTHER)
    damaged = tmp_path / file_name("b", "n1", OTHER)
    damaged.mkdir()
    assert [log.opened.job for log in read_logs(tmp_path, "a")] == ["a"]
    assert name_prefix("a.b") == "a.b."


def test_a_named_job_of_a_shared_directory_is_read_and_the_others_are_named(tmp_path: Path) -> None:
    keep(tmp_path, "2.0", OTHER)
    keep(tmp_path, "2.0-restart1", OTHER + 1)
    last = named_logs(str(tmp_path))
    assert ([log.opened.job for log in last.logs], last.others) == (["2.0-restart1"], ["2.0"])
    first = named_logs(str(tmp_path), "2.0")
    assert ([log.opened.job for log in first.logs], first.others) == (["2.0"], ["2.0-restart1"])
    assert other_runs(first.logs, first.logs) == []
    with pytest.raises(SpecError, match=r"no event log of the job 'x', but of 2\.0 and 2\.0-restart1"):
        named_logs(str(tmp_path), "x")
