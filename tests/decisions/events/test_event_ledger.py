"""The time ledger of a job, from made-up event logs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_run.events import live
from dlrover_run.events.ledger import Ledger, build_ledger
from dlrover_run.events.live import MAX_CHECKPOINTS, LiveLedger
from dlrover_run.events.reader import AgentLog, parse_log
from dlrover_run.events.records import (
    AgentEnded,
    CheckEnded,
    CheckpointRestored,
    CheckpointSeen,
    CheckStarted,
    DevicesFreed,
    Event,
    Events,
    JobEnded,
    LogGap,
    LogOpened,
    NodeWaiting,
    RoundClosed,
    RoundFormed,
    StopRequested,
    StragglerFound,
    StragglerGone,
    WorkerExited,
    WorkerKept,
    WorkerProgress,
    WorkerReady,
    WorkerResumed,
    WorkerStalled,
    WorkerStarted,
)
from dlrover_run.events.timeline import TimePhase

BEGAN = datetime(2026, 11, 22, 4, 0, tzinfo=UTC)
STAGES = ("store", "step")


def opened(workers: int = 1, stages: tuple[str, ...] = STAGES, began: float = 100.0) -> LogOpened:
    return LogOpened(
        time=BEGAN, mono=began, schema=1, job="j", host="n01", node_id="a", pid=1, workers=workers, began=began,
        stages=stages,
    )  # fmt: skip


def at(seconds: float, event: Event) -> Event:
    """The event `seconds` after the agent began."""
    return msgspec.structs.replace(event, time=BEGAN + timedelta(seconds=seconds), mono=100.0 + seconds)


def formed(number: int, failed: int | None = None) -> RoundFormed:
    return RoundFormed(
        round=number, epoch=1, node=0, nodes=1, first_rank=0, workers=2, world_size=2, restarts=number - 1,
        failed_rank=failed,
    )  # fmt: skip


def started(local_rank: int = 0, number: int = 1, role: str = "") -> WorkerStarted:
    return WorkerStarted(
        round=number, rank=local_rank, local_rank=local_rank, role=role, pid=10 + local_rank,
        trains=role != "evaluator",
    )  # fmt: skip


def ready(stage: str, local_rank: int = 0, number: int = 1, since: float | None = None) -> WorkerReady:
    return WorkerReady(round=number, rank=local_rank, local_rank=local_rank, stage=stage, since=since)


def exited(
    code: int, local_rank: int = 0, number: int = 1, stopped_with: str = "", role: str = "", since: float | None = None
) -> WorkerExited:
    return WorkerExited(
        round=number, rank=local_rank, local_rank=local_rank, role=role, pid=10 + local_rank, code=code,
        stopped_with=stopped_with, since=None if since is None else 100 + since,
    )  # fmt: skip


def ledger_of(
    *events: Event, head: LogOpened | None = None, until: float | None = None, running: bool = False
) -> Ledger:
    end = None if until is None else BEGAN + timedelta(seconds=until)
    return build_ledger([AgentLog(head or opened(), events)], end, running)


def seconds(ledger: Ledger, local_rank: int = 0) -> dict[str, float]:
    """The seconds of one local rank in each phase that it has had."""
    place = ledger.places[local_rank]
    return {phase.value: place.total(phase) / 1e6 for phase in TimePhase if place.total(phase)}


RUNS: dict[str, tuple[LogOpened, list[Event], dict[str, float]]] = {
    "the interpreter of a script that is over does not train": (opened(), [
        at(0, formed(1)), at(0, started()), at(0, ready("step")), at(10, exited(0, since=8)),
        at(11, JobEnded(phase="finished")), at(12, AgentEnded(exit_code=0, reason="success")),
    ], {"train": 8.0, "stop": 4.0}),
    "nor does that of one that has failed": (opened(), [
        at(0, formed(1)), at(0, started()), at(0, ready("step")), at(4, CheckpointSeen()),
        at(10, exited(1, since=8)), at(10, RoundClosed(round=1, epoch=1, failed=True)),
        at(12, formed(2, failed=0)), at(13, started(number=2)), at(13, AgentEnded(exit_code=0, reason="success")),
    ], {"train": 4.0, "lost": 4.0, "restart": 5.0}),
    "a job that succeeds loses nothing": (opened(), [
        at(0, formed(1)), at(0, started()), at(0, ready("step")), at(4, CheckpointSeen()), at(10, exited(0)),
        at(11, JobEnded(phase="finished")), at(11, RoundClosed(round=1, epoch=1)),
        at(12, AgentEnded(exit_code=0, reason="success")),
    ], {"train": 10.0, "stop": 2.0}),
    "a job that fails loses the work since its checkpoint": (opened(), [
        at(0, formed(1)), at(0, started()), at(0, ready("step")), at(4, CheckpointSeen()),
        at(10, JobEnded(phase="failed")), at(10, RoundClosed(round=1, epoch=1, failed=True)),
        at(12, AgentEnded(exit_code=72, reason="peer failed")),
    ], {"train": 4.0, "lost": 6.0, "stop": 2.0}),
    "a failure on another node loses the work of this one once": (opened(), [
        at(0, formed(1)), at(0, started()), at(0, ready("step")), at(4, CheckpointSeen()),
        at(10, RoundClosed(round=1, epoch=1, failed=True)), at(11, exited(-15, stopped_with="SIGTERM")),
        at(12, formed(2, failed=1)), at(13, started(number=2)), at(13, AgentEnded(exit_code=0, reason="success")),
    ], {"train": 4.0, "lost": 6.0, "restart": 3.0}),
    "the time in which a loader of the last round still holds a device is not that of the restart": (opened(), [
        at(0, formed(1)), at(0, started()), at(0, ready("step")), at(10, exited(1)),
        at(10, RoundClosed(round=1, epoch=1, failed=True)), at(11, formed(2, failed=0)),
        at(15, DevicesFreed(since=112.0, processes=3)), at(16, started(number=2)),
        at(16, AgentEnded(exit_code=0, reason="success")),
    ], {"train": 10.0, "restart": 3.0, "device": 3.0}),
    "a worker that keeps its process has lost nothing": (opened(), [
        at(0, formed(1)), at(0, started()), at(0, ready("step")), at(4, CheckpointSeen()),
        at(10, RoundClosed(round=1, epoch=1, failed=True)), at(10, formed(2, failed=1)),
        at(12, WorkerKept(round=2, rank=0, local_rank=0, pid=10)), at(12, ready("store", number=2)),
        at(13, ready("step", number=2)), at(20, exited(0, number=2)), at(20, AgentEnded(exit_code=0, reason="success")),
    ], {"train": 17.0, "restart": 2.0, "init": 1.0}),
    "what a worker has kept is lost with it": (opened(), [
        at(0, formed(1)), at(0, started()), at(0, ready("step")), at(4, CheckpointSeen()),
        at(10, RoundClosed(round=1, epoch=1, failed=True)), at(10, formed(2, failed=1)),
        at(12, WorkerKept(round=2, rank=0, local_rank=0, pid=10)), at(12, ready("step", number=2)),
        at(20, RoundClosed(round=2, epoch=1, failed=True)), at(20, AgentEnded(exit_code=0, reason="success")),
    ], {"train": 4.0, "restart": 2.0, "lost": 14.0}),
    "a stall begins when progress ended": (opened(), [
        at(0, started()), at(0, ready("step")),
        at(12, WorkerStalled(round=1, rank=0, local_rank=0, since=107.0)),
        at(20, WorkerResumed(round=1, rank=0, local_rank=0)),
        at(30, exited(0)), at(30, AgentEnded(exit_code=0, reason="success")),
    ], {"train": 17.0, "stalled": 13.0}),
    "without observed stages a worker trains from its start": (opened(stages=()), [
        at(2, started()), at(9, exited(0)), at(9, AgentEnded(exit_code=0, reason="success")),
    ], {"start": 2.0, "train": 7.0}),
    "after a request to stop nothing trains": (opened(), [
        at(0, started()), at(0, ready("step")), at(5, StopRequested(signal="SIGTERM")),
        at(8, exited(143)), at(9, AgentEnded(exit_code=143, reason="stopped")),
    ], {"train": 5.0, "stop": 4.0}),
    "time whose events were dropped is unknown until an event shows the phase": (opened(), [
        at(0, started()), at(0, ready("step")), at(5, CheckpointSeen()), at(25, LogGap(dropped=3)),
        at(30, WorkerProgress(round=1, rank=0, local_rank=0, steps=9)), at(40, exited(0)),
        at(40, AgentEnded(exit_code=0, reason="success")),
    ], {"train": 15.0, "unknown": 25.0}),
}  # fmt: skip


@pytest.mark.parametrize(("head", "events", "expected"), RUNS.values(), ids=RUNS)
def test_the_seconds_of_each_phase(head: LogOpened, events: list[Event], expected: dict[str, float]) -> None:
    assert seconds(ledger_of(*events, head=head)) == expected


def test_a_run_without_faults() -> None:
    found = ledger_of(
        at(1, NodeWaiting(reasons=())),
        at(3, CheckStarted()),
        at(4, CheckEnded(status="passed")),
        at(5, formed(1)),
        at(5.5, started()),
        at(8, ready("store")),
        at(10, ready("step")),
        at(90, exited(0)),
        at(91, JobEnded(phase="finished")),
        at(92, AgentEnded(exit_code=0, reason="success")),
    )
    assert seconds(found) == {
        "start": 1.5, "rendezvous": 3.0, "check": 1.0, "import": 2.5, "init": 2.0, "train": 80.0, "stop": 2.0,
    }  # fmt: skip
    assert found.ettr == pytest.approx(80 / 92)


def test_work_since_the_last_checkpoint_is_lost_with_the_round() -> None:
    found = ledger_of(
        at(0, formed(1)), at(0, started()), at(0, ready("step")), at(6, CheckpointSeen()),
        at(10, exited(-9)),
        at(10.5, formed(2)), at(11, started(number=2)), at(12, ready("step", number=2)),
        at(20, exited(0, number=2)), at(20, AgentEnded(exit_code=0, reason="success")),
    )  # fmt: skip
    assert seconds(found) == {"import": 1.0, "train": 6 + 8.0, "lost": 4.0, "restart": 1.0}
    assert found.has_checkpoints


def test_without_a_checkpoint_in_the_log_no_work_counts_as_lost() -> None:
    found = ledger_of(at(0, started()), at(0, ready("step")), at(10, exited(-9)), at(10, JobEnded(phase="failed")))
    assert seconds(found) == {"train": 10.0}
    assert not found.has_checkpoints


def test_a_failure_ends_the_training_of_the_other_workers_too() -> None:
    found = ledger_of(
        at(0, formed(1)), at(0, started(0)), at(0, started(1)), at(0, ready("step", 0)), at(0, ready("step", 1)),
        at(10, exited(-9, 0)), at(12, exited(-15, 1, stopped_with="SIGTERM")),
        at(13, formed(2)), at(14, started(0, 2)), at(14, started(1, 2)),
        at(14, AgentEnded(exit_code=0, reason="success")),
        head=opened(workers=2),
    )  # fmt: skip
    assert seconds(found, 0) == seconds(found, 1) == {"train": 10.0, "restart": 4.0}


def test_the_end_of_an_agent_that_was_killed_is_unknown() -> None:
    events = (at(0, started()), at(0, ready("step")), at(5, CheckpointSeen()))
    assert seconds(ledger_of(*events, until=60)) == {"train": 5.0, "unknown": 55.0}
    assert seconds(ledger_of(*events, until=60, running=True)) == {"train": 60.0}
    assert seconds(ledger_of(*events)) == {"train": 5.0}


def test_time_in_files_that_were_rotated_away_is_unknown() -> None:
    head = msgspec.structs.replace(opened(), part=1)
    log = AgentLog(head, (at(50, ready("step")), at(60, started()), at(61, ready("step"))))
    assert seconds(build_ledger([log])) == {"unknown": 60.0, "import": 1.0}


def test_a_checkpoint_of_one_node_is_one_of_all() -> None:
    def log(node: str, *own: Event, began: float) -> AgentLog:
        events = [at(0, formed(1)), at(0, started()), at(0, ready("step")), *own, at(10, exited(-9)), at(11, formed(2))]
        head = msgspec.structs.replace(opened(), node_id=node, mono=began, began=began)
        # Each host has a monotonic clock of its own.
        shifted = tuple(msgspec.structs.replace(each, mono=each.mono - 100 + began) for each in events)
        return AgentLog(head, shifted)

    found = build_ledger([log("a", at(6, CheckpointSeen()), began=100.0), log("b", began=7000.0)])
    assert [place.total(TimePhase.LOST) for place in found.places] == [4_000_000, 4_000_000]
    assert [place.wall for place in found.places] == [11_000_000, 11_000_000]


def test_a_stage_may_be_reported_later() -> None:
    events = at(0, formed(1)), at(1, started()), at(4, ready("store", since=103.5)), at(9, ready("step", since=106.0))
    assert seconds(ledger_of(*events, at(10, exited(0)))) == {"start": 1.0, "import": 2.5, "init": 2.5, "train": 4.0}


def test_what_a_script_never_shows_is_not_waited_for() -> None:
    head = (at(0, formed(1)), at(1, started()))
    # Not known yet, or it could not start; then a script without process groups, and one that counts no steps.
    assert seconds(ledger_of(*head), 0) == {"start": 1.0}
    assert seconds(ledger_of(*head, at(5, exited(1)))) == {"start": 1.0, "import": 4.0}
    assert seconds(ledger_of(*head, at(5, exited(0)))) == {"start": 1.0, "train": 4.0}
    assert seconds(ledger_of(*head, at(95, exited(-9)))) == {"start": 1.0, "train": 94.0}
    assert seconds(ledger_of(*head, at(3, ready("store")), at(5, exited(0)))) == {
        "start": 1.0, "import": 2.0, "train": 2.0,
    }  # fmt: skip


class TestTasks:
    """A job with parameter servers: each task lives by itself, and the model may go back to a checkpoint."""

    HEAD = opened(workers=0)

    def test_the_end_of_one_task_does_not_change_the_others(self) -> None:
        found = ledger_of(
            at(1, NodeWaiting(reasons=())),
            at(2, started(0, role="ps")), at(3, started(1, role="worker")),
            at(4, ready("step", 0)), at(5, ready("store", 1)), at(6, ready("step", 1)),
            at(10, exited(75, 1, role="worker")), at(12, started(1, 2, role="worker")),
            at(13, ready("step", 1, 2)), at(20, exited(0, 1, 2, role="worker")),
            at(21, JobEnded(phase="finished")), at(22, exited(-15, 0, stopped_with="SIGTERM", role="ps")),
            head=self.HEAD,
        )  # fmt: skip
        assert seconds(found, 0) == {"start": 1.0, "rendezvous": 1.0, "import": 2.0, "train": 17.0, "stop": 1.0}
        assert seconds(found, 1) == {
            "start": 1.0, "rendezvous": 2.0, "import": 3.0, "init": 1.0, "train": 11.0, "restart": 2.0, "stop": 2.0,
        }  # fmt: skip

    def test_a_task_of_a_later_version_has_no_time_before_it(self) -> None:
        found = ledger_of(
            at(2, started(0, role="chief")), at(3, ready("step", 0)), at(10, started(1, 2, role="worker")),
            at(11, ready("step", 1)), at(20, exited(-15, 1, stopped_with="SIGTERM", role="worker")),
            at(30, exited(0, 0, role="chief")), head=self.HEAD,
        )  # fmt: skip
        # It did not start again: it was not needed any more.
        assert seconds(found, 1) == {"import": 1.0, "train": 9.0, "stop": 10.0}

    def test_a_restored_model_loses_the_work_since_its_checkpoint(self) -> None:
        found = ledger_of(
            at(0, started(0, role="chief")), at(0, started(1, role="evaluator")),
            at(0, ready("step", 0)), at(0, ready("step", 1)),
            at(4, CheckpointSeen(step=40)), at(6, CheckpointSeen(step=60)),
            at(10, exited(75, 0, role="chief")), at(11, started(0, 2, role="chief")),
            at(12, CheckpointRestored(step=40)), at(12, ready("step", 0)), at(20, exited(0, 0, role="chief")),
            head=self.HEAD,
        )  # fmt: skip
        assert seconds(found, 0) == {"train": 4.0 + 8.0, "lost": 6.0, "restart": 1.0, "import": 1.0}
        assert seconds(found, 1) == {"train": 20.0}


LOCAL_RANKS = st.integers(0, 3)
"""One more than the agent of `logs` has."""

ROLES = st.sampled_from(("", "worker", "evaluator"))

EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(NodeWaiting, reasons=st.just(())),
    st.builds(CheckStarted),
    st.builds(CheckEnded, status=st.just("passed")),
    st.builds(formed, st.integers(1, 3)),
    st.builds(RoundClosed, round=st.integers(1, 3), epoch=st.just(1), failed=st.booleans()),
    st.builds(started, LOCAL_RANKS, st.integers(1, 2), ROLES),
    st.builds(ready, st.sampled_from((*STAGES, "another")), LOCAL_RANKS),
    st.builds(
        exited, st.sampled_from((0, 1, -9)), LOCAL_RANKS, stopped_with=st.sampled_from(("", "SIGTERM")), role=ROLES
    ),
    st.builds(
        WorkerStalled,
        round=st.just(1),
        rank=LOCAL_RANKS,
        local_rank=LOCAL_RANKS,
        since=st.floats(-1e4, 1e4, allow_nan=False),
    ),
    st.builds(WorkerResumed, round=st.just(1), rank=LOCAL_RANKS, local_rank=LOCAL_RANKS),
    st.builds(WorkerProgress, round=st.just(1), rank=LOCAL_RANKS, local_rank=LOCAL_RANKS),
    st.builds(WorkerKept, round=st.just(1), rank=st.just(0), local_rank=st.integers(0, 1), pid=st.just(10)),
    st.builds(CheckpointSeen, step=st.none() | st.integers(0, 3)),
    st.builds(CheckpointRestored, step=st.integers(0, 3)),
    st.builds(StopRequested, signal=st.just("SIGTERM")),
    st.builds(JobEnded, phase=st.sampled_from(("finished", "failed"))),
    st.builds(LogGap, dropped=st.integers(1, 9)),
    st.builds(AgentEnded, exit_code=st.just(0), reason=st.just("success")),
)


@st.composite
def logs(draw: st.DrawFn) -> tuple[LogOpened, list[Event]]:
    """A log of any events in any order, whose clock may also go back."""
    now = 0.0
    events = []
    for event in draw(st.lists(EVENTS, max_size=12)):
        now += draw(st.floats(-5, 50, allow_nan=False))
        events.append(at(now, event))
    head = opened(workers=draw(st.integers(0, 3)), stages=draw(st.sampled_from(((), STAGES))))
    return head, events


def assert_invariant(ledger: Ledger, head: LogOpened, last: float | None = None) -> None:
    """The phases of each place add up to its wall clock, with neither a gap nor an overlap."""
    assert len(ledger.places) == head.workers or not head.workers
    for place in ledger.places:
        assert all(each.start < each.end for each in place.segments)
        for one, following in itertools.pairwise(place.segments):
            assert one.end == following.start
            assert one.phase is not following.phase
        assert not place.segments or not head.workers or place.segments[0].start == round(head.began * 1e6)
        assert sum(place.total(phase) for phase in TimePhase) == place.wall
    # All places of one agent have the same wall clock: no rank is missing for a part of it.
    if last is not None and head.workers:
        assert {place.wall for place in ledger.places} <= {round((last - head.began) * 1e6)}
    assert sum(ledger.totals().values()) == ledger.wall
    assert ledger.ettr is None or 0 <= ledger.ettr <= 1


def latest(head: LogOpened, events: Sequence[Event]) -> float:
    return max([head.began, *(event.mono for event in events)])


@given(logs(), st.none() | st.floats(0, 5000), st.booleans())
def test_the_phases_add_up_to_the_wall_clock(
    log: tuple[LogOpened, list[Event]], until: float | None, running: bool
) -> None:
    head, events = log
    end = None if until is None else BEGAN + timedelta(seconds=until)
    ledger = build_ledger([AgentLog(head, tuple(events))], end, running)
    assert_invariant(ledger, head, latest(head, events) if until is None else None)


@given(logs(), st.data())
def test_they_add_up_for_a_truncated_file(log: tuple[LogOpened, list[Event]], data: st.DataObject) -> None:
    head, events = log
    content = b"".join(msgspec.json.encode(event) + b"\n" for event in (head, *events))
    cut = content[: data.draw(st.integers(0, len(content)))]
    found = parse_log(cut.splitlines())
    if found is None:
        assert len(cut) < len(msgspec.json.encode(head))
        return
    assert found.events == tuple(events[: len(found.events)])
    assert found.unread <= 1
    assert_invariant(build_ledger([found]), head, latest(head, found.events))


@given(logs(), st.binary(max_size=40), st.data())
def test_they_add_up_with_damaged_lines(log: tuple[LogOpened, list[Event]], damage: bytes, data: st.DataObject) -> None:
    head, events = log
    lines = [msgspec.json.encode(event) for event in events]
    lines.insert(data.draw(st.integers(0, len(lines))), b"x" + damage.replace(b"\n", b""))
    found = parse_log([msgspec.json.encode(head), *lines])
    assert found is not None
    assert found.events == tuple(events)
    assert found.unread == 1
    assert_invariant(build_ledger([found]), head)


@pytest.mark.parametrize(
    "name", [name for name, run in RUNS.items() if not any(isinstance(event, LogGap) for event in run[1])]
)
def test_the_ledger_of_a_running_agent_is_that_of_its_log(name: str) -> None:
    """After each event, and some time later."""
    head, events, _ = RUNS[name]
    now = [head.mono]
    written: list[Event] = []
    log = Events()
    log.emit = written.append  # type: ignore[method-assign]
    ledger = LiveLedger(head, log, lambda: now[0])
    for place, event in enumerate(events):
        now[0] = max(now[0], event.mono)
        ledger.emit(event)
        assert ledger.is_behind == (not isinstance(event, WorkerProgress))
        for later in (0.0, 5.0):
            now[0] += later
            until = AgentLog(head, (*events[: place + 1], Event(mono=now[0] + 1e-6)))
            known = build_ledger([until], running=True)
            found = ledger.times()
            assert found.seconds == {
                phase.value: round(spent / 1e6, 3) for phase, spent in known.totals().items() if spent >= 1000
            }
            assert sum(found.places.values()) == sum(bool(one.segments) for one in known.places)
            ledger.is_behind = False
        now[0] -= 5.0
    assert written == events, "they go on to the log"


def test_of_many_checkpoints_the_last_ones_are_kept() -> None:
    now = [100.0]
    ledger = LiveLedger(opened(), Events(), lambda: now[0])
    for event in (formed(1), started(), ready("step")):
        ledger.emit(event)
    for _ in range(10 * MAX_CHECKPOINTS):
        now[0] += 1
        ledger.emit(CheckpointSeen())
    now[0] += 3
    ledger.emit(RoundClosed(round=1, epoch=1, failed=True))
    assert ledger.times().seconds == {"train": 10.0 * MAX_CHECKPOINTS, "lost": 3.0}
    assert ledger.times().places == {"restart": 1}
    now[0] += 2
    assert ledger.times().seconds["restart"] == 2.0
    assert not ledger.is_behind


def test_of_many_rounds_only_the_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    whole = LiveLedger(opened(), Events(), lambda: now[0])
    short = LiveLedger(opened(), Events(), lambda: now[0])
    for number in range(1, 50):
        closed = RoundClosed(round=number, epoch=1, failed=True)
        for seconds_later, event in (
            (1, formed(number)), (1, started(0, number)), (2, ready("store", 0, number)), (1, ready("step", 0, number)),
            (5, CheckpointSeen()), (3, exited(1, 0, number)), (0, closed),
        ):  # fmt: skip
            now[0] += seconds_later
            monkeypatch.setattr(live, "MAX_EVENTS", 10)
            short.emit(event)
            monkeypatch.setattr(live, "MAX_EVENTS", 10_000)
            whole.emit(event)
        assert short.times() == whole.times()
    assert short.times().seconds["lost"] == 49 * 3.0
    assert len(short._events) < 20


def test_of_many_stalls_in_one_round_only_the_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    whole = LiveLedger(opened(), Events(), lambda: now[0])
    short = LiveLedger(opened(), Events(), lambda: now[0])
    place = {"round": 1, "rank": 0, "local_rank": 0}
    for _ in range(100):
        stalled, slow = WorkerStalled(**place, since=now[0] + 1), StragglerFound(**place)
        for event in (formed(1), started(), ready("step")) if now[0] == 100.0 else ():
            whole.emit(event)
            short.emit(event)
        for seconds_later, event in ((3, stalled), (4, WorkerResumed(**place)), (1, slow), (1, StragglerGone(**place))):
            now[0] += seconds_later
            monkeypatch.setattr(live, "MAX_EVENTS", 10)
            short.emit(event)
            monkeypatch.setattr(live, "MAX_EVENTS", 10_000)
            whole.emit(event)
        assert short.times() == whole.times()
    assert short.times().seconds == {"train": 300.0, "stalled": 600.0}
    assert len(short._events) < 20
