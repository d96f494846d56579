"""What follows a stall, by the action that the user has chosen."""

from __future__ import annotations

from dataclasses import replace as replace_report
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from dlrover_run.coordination.records.activity import WAITS, NodeActivity
from dlrover_run.events.records import Event, Events, WorkerResumed, WorkerStalled
from dlrover_run.failures.causes import Cause, cause_of, describe_exit
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.features.hangs.node.stall_report import STACKS_FILE, StallReport
from dlrover_run.features.hangs.node.stall_response import StallResponse
from dlrover_run.features.hangs.search.codes import GuiltCode
from dlrover_run.features.hangs.search.detector import Resumed, StallCode, Stalled
from dlrover_run.features.hangs.search.guilt import Finding
from dlrover_run.features.hangs.settings import StallAction
from dlrover_run.stacks.stack import Frame, Stack, Thread

LINE = Frame("/home/u/train.py", 10, "load")
STACKS = {rank: Stack((Thread("0x1", (LINE,)),)) for rank in (4, 5)}


class Round:
    """Two running workers of round 3."""

    def __init__(self) -> None:
        workers = [
            SimpleNamespace(spec=SimpleNamespace(rank=rank, local_rank=rank - 4), stopped_with=None) for rank in (4, 5)
        ]
        self.group = SimpleNamespace(running=workers)
        self.ranks = SimpleNamespace(round=3)
        self.killed: list[int] = []
        self.reasons: list[str] = []
        self.stalled: dict[int, str] = {}

    def kill(self, ranks: tuple[int, ...], why: str) -> None:
        self.killed += ranks
        self.reasons.append(why)


class Kept(Events):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def report(*guilty: int) -> StallReport:
    finding = Finding(GuiltCode.LOCKED, guilty, LINE) if guilty else Finding(GuiltCode.UNKNOWN)
    stalled = Stalled(StallCode.TRAINING, (4, 5), 100.0, 3.0)
    return StallReport(stalled, guilty, finding.reasons, 4.0, STACKS, guilty or (4,))


def services_of(lines: list[str], events: Kept, directory: Path | None = None, stopping: bool = False) -> Any:
    return SimpleNamespace(
        lines=lines,
        events=events,
        console=SimpleNamespace(info=lines.append),
        run_dir=SimpleNamespace(path=str(directory), keep=directory is not None),
        shutdown=SimpleNamespace(requested=stopping),
    )


def respond(
    action: StallAction, stall: StallReport, directory: Path | None = None, stopping: bool = False
) -> tuple[Round, Kept, list[str]]:
    workers, events, lines = Round(), Kept(), list[str]()
    services = services_of(lines, events, directory, stopping)
    response = StallResponse(workers, action, services)  # type: ignore[arg-type]
    response.on_stall(stall)
    response.on_resume(Resumed(5.0, (4, 5)))
    return workers, events, lines


def test_a_stall_is_reported_with_its_events() -> None:
    workers, kept, lines = respond("report", report(5))
    assert len(lines) == 2
    assert "rank 5" in lines[0]
    assert "/home/u/train.py:10" in lines[0]
    assert workers.killed == []
    stalled = [event for event in kept.events if isinstance(event, WorkerStalled)]
    assert [(event.rank, event.local_rank, event.guilty, event.since) for event in stalled] == [
        (4, 0, False, 100.0),
        (5, 1, True, 100.0),
    ]
    assert [reason.code for reason in stalled[1].reasons] == ["stall.locked", "stall.place"]
    assert [event.rank for event in kept.events if isinstance(event, WorkerResumed)] == [4, 5]


def alone(*guilty: int, ranks: tuple[int, ...] = ()) -> StallReport:
    """A stall of some workers, while others train."""
    finding = Finding(GuiltCode.IDLE, guilty, LINE, others_go_on=True)
    stalled = Stalled(StallCode.ALONE, ranks or guilty, 100.0, 15.0)
    return StallReport(stalled, guilty, finding.reasons, 16.0, STACKS, guilty)


def test_a_worker_that_hangs_while_others_train_is_the_only_one_that_is_stalled() -> None:
    workers, services = Round(), services_of([], Kept())
    response = StallResponse(workers, "restart", services)  # type: ignore[arg-type]
    response.on_stall(alone(5))
    assert workers.stalled == {5: GuiltCode.IDLE.code}
    # The other one waits for it now.
    response.on_stall(alone(5, ranks=(4, 5)))
    assert workers.stalled == {4: WAITS, 5: GuiltCode.IDLE.code}
    stalled = [(event.rank, event.guilty) for event in services.events.events if isinstance(event, WorkerStalled)]
    assert stalled == [(5, True), (4, False)]
    lines = services.lines
    assert workers.killed == [5]
    assert sum("no progress for" in line for line in lines) == 1
    response.on_resume(Resumed(30.0, (4,), alone=True))
    response.on_resume(Resumed(30.0, (4,), alone=True))
    assert workers.stalled == {5: GuiltCode.IDLE.code}
    assert [event.rank for event in services.events.events if isinstance(event, WorkerResumed)] == [4]
    response.on_resume(Resumed(30.0, (4, 5)))
    assert workers.stalled == {}


def test_the_stacks_are_written_to_the_log_directory_or_to_the_console(tmp_path: Path) -> None:
    _, _, lines = respond("dump", report(5), tmp_path)
    assert "train.py:10 in load" in (tmp_path / STACKS_FILE).read_text()
    assert any(STACKS_FILE in line for line in lines)
    _, _, without = respond("dump", report(5))
    assert any("train.py:10 in load" in line for line in without[1:])
    _, _, unwritable = respond("dump", report(5), tmp_path / "missing")
    assert any("train.py:10 in load" in line for line in unwritable[1:])


def test_nothing_is_done_to_workers_that_are_being_stopped() -> None:
    workers, kept, _ = respond("restart", report(5), stopping=True)
    assert workers.killed == []
    assert not [event for event in kept.events if isinstance(event, WorkerStalled)]


def test_the_exit_of_a_worker_that_was_killed_names_the_flag() -> None:
    end = WorkerExit(
        rank=4, local_rank=0, pid=1, code=-9, unix_time=0.0, killed_for="--stall-action=restart, as it made no progress"
    )
    assert "--stall-action" in describe_exit(end)
    assert cause_of(end) is Cause.STALL
    assert cause_of(replace(end, has_lost_peer=True)) is Cause.LOST_PEER


@pytest.mark.parametrize(
    ("guilty", "killed", "says"),
    [
        ((5,), [5], "the worker is killed, and its round ends"),
        ((), [4], "no rank that runs is named: rank 4 is killed, so that the round restarts"),
        ((9,), [], ""),
    ],
)
def test_a_restart_kills_workers_on_their_own_node_only(guilty: tuple[int, ...], killed: list[int], says: str) -> None:
    workers, _, lines = respond("restart", report(*guilty))
    assert workers.killed == killed
    assert [line.startswith(says) for line in lines if "killed" in line] == [True] * len(killed)
    named = ["as it made no progress" in why for why in workers.reasons]
    assert named == [rank in guilty for rank in killed], "a worker is blamed only if the evidence names it"


def test_the_operation_in_which_workers_wait_is_known_until_they_go_on() -> None:
    services = services_of([], Kept())
    response = StallResponse(Round(), "report", services)  # type: ignore[arg-type]
    never = GuiltCode.NEVER_ENTERED(operation="all_reduce", number=4812, group="the default group", size="", waiting=1)
    response.on_stall(replace_report(report(5), reasons=(never,)))
    assert response.awaited == "all_reduce 4,812 of the default group"
    response.on_resume(Resumed(5.0, (4, 5)))
    assert response.awaited == ""
    even = GuiltCode.NONE_BEHIND(operation="all_reduce", number=4812, group="the default group")
    response.on_stall(replace_report(report(5), reasons=(GuiltCode.OTHER_WAIT(), even)))
    assert response.awaited == "", "nothing says that they wait in it"
    long = GuiltCode.AWAITED(operation="\n" * 300, number=10**15, group="g" * 300, size="", waiting=1)
    response.on_stall(replace_report(report(5), reasons=(GuiltCode.STOPPED(), long)))
    sent = NodeActivity((), awaited=response.awaited)
    assert msgspec.json.decode(msgspec.json.encode(sent), type=NodeActivity) == sent
