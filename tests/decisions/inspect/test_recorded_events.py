"""What recorded event logs of real jobs show of their restarts: the time that was lost, and the time that was not.

`scaled`: a job of two nodes, `scale --nodes=1` after 6 s, and `scale --nodes=2` 9 s later. `killed`: rank 1 of two gets
SIGKILL, and the new workers need 4 s to their first step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from dlrover_run.events.ledger import build_ledger
from dlrover_run.events.reader import AgentLog, read_logs
from dlrover_run.events.records import NodeWaiting, RoundFormed, WorkerStarted
from dlrover_run.events.timeline import MICROSECONDS, TimePhase
from dlrover_run.features.inspect.answers import WhyCode
from dlrover_run.features.inspect.why import Question, explain

RECORDED = Path(__file__).parent / "recorded_events"


def seconds_of(logs: Sequence[AgentLog], code: WhyCode) -> list[float]:
    """The seconds of the answers with that code to `why --last-restart`."""
    lines = explain(logs, Question.LAST_RESTART).lines
    return [float(reason.params["seconds"]) for line in lines for reason in line if reason.code == code.code]  # type: ignore[arg-type]


def test_the_time_of_a_spare_is_no_restart() -> None:
    logs = read_logs(RECORDED / "scaled")
    totals = {phase: spent / MICROSECONDS for phase, spent in build_ledger(logs).totals().items()}
    assert totals[TimePhase.SPARE] == pytest.approx(8.9, abs=0.1)
    assert totals[TimePhase.RESTART] < 0.1
    ettr = build_ledger(logs).ettr
    assert ettr is not None
    assert ettr > 0.95


def test_a_spare_that_steps_in_was_not_down_meanwhile() -> None:
    logs = read_logs(RECORDED / "scaled")
    # Node 0 had workers in the round before, which was stopped for the larger one.
    assert seconds_of(logs, WhyCode.DOWN) == [pytest.approx(0.02, abs=0.01)]
    assert seconds_of(logs, WhyCode.NEXT_STEP) == [pytest.approx(0.22, abs=0.05)]


def test_a_restart_costs_the_time_to_the_next_step() -> None:
    logs = read_logs(RECORDED / "killed")
    assert seconds_of(logs, WhyCode.DOWN) == [pytest.approx(0.03, abs=0.02)]
    assert seconds_of(logs, WhyCode.NEXT_STEP) == [pytest.approx(4.2, abs=0.05)]


def test_until_the_next_step_it_says_that_there_is_none() -> None:
    (log,) = read_logs(RECORDED / "killed")
    last = max(place for place, event in enumerate(log.events) if isinstance(event, WorkerStarted))
    codes = explain([AgentLog(log.opened, log.events[: last + 1])], Question.LAST_RESTART).codes
    assert codes[2:] == (("why.down",), ("why.no_step_yet",), ("why.lost_unknown",), ("why.torn",))


def test_nodes_that_are_all_new_are_compared_by_the_time_of_day() -> None:
    (log,) = read_logs(RECORDED / "killed")
    cut = next(place for place, event in enumerate(log.events) if isinstance(event, RoundFormed) and event.round == 2)
    new = msgspec.structs.replace(log.opened, node_id="another", host="another")
    logs = [AgentLog(log.opened, log.events[:cut]), AgentLog(new, log.events[cut:])]
    assert seconds_of(logs, WhyCode.DOWN) == [pytest.approx(0.03, abs=0.02)]


def test_a_round_without_workers_in_between_does_not_hide_the_end_of_the_one_before() -> None:
    """Two nodes joined in turn: the second round was over before a worker of it ran."""
    (log,) = read_logs(RECORDED / "killed")
    cut = next(place for place, event in enumerate(log.events) if isinstance(event, RoundFormed) and event.round == 2)

    def later(event: object) -> object:
        return msgspec.structs.replace(event, round=3) if getattr(event, "round", 0) == 2 else event  # type: ignore[type-var]

    events = (*log.events[: cut + 1], *map(later, log.events[cut:]))
    logs = [AgentLog(log.opened, events)]  # type: ignore[arg-type]
    assert seconds_of(logs, WhyCode.DOWN) == [pytest.approx(0.03, abs=0.02)]
    assert WhyCode.FAILED_WORKER.code in explain(logs, Question.LAST_RESTART).codes[1]


def test_a_spare_does_not_hide_the_job() -> None:
    node_0, node_1 = sorted(read_logs(RECORDED / "scaled"), key=lambda log: log.opened.host)
    ends = [
        max(place for place, event in enumerate(log.events) if isinstance(event, kind) and event.time < until)
        for log, kind, until in (
            (node_0, WorkerStarted, node_1.events[-1].time),
            (node_1, NodeWaiting, node_1.events[-1].time),
        )
    ]
    logs = [AgentLog(log.opened, log.events[: end + 1]) for log, end in zip((node_0, node_1), ends, strict=True)]
    answer = explain(logs, Question.NOW, logs[0].last.time)
    assert answer.codes[0][0] == WhyCode.ROUND_FORMED.code
    assert answer.text.splitlines()[-1] == "node 1 waits to step in as a spare"


def test_logs_without_an_end_are_named_in_one_line() -> None:
    logs = [AgentLog(log.opened, log.events[:4]) for log in read_logs(RECORDED / "scaled")]
    assert explain(logs, Question.NOW).text.splitlines()[1:] == [
        "the logs of node 0 and node 1 have no end: their agents were killed, or still run"
    ]


def test_times_are_local_for_a_person_and_have_a_zone_for_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        answer = explain(read_logs(RECORDED / "killed"), Question.LAST_RESTART)
        assert answer.text.startswith("round 2 was formed at 2026-11-26 21:22:39 with 1 node, ")
        assert answer.lines[0][0].params["at"] == "2026-11-27T02:22:39+00:00"
    finally:
        monkeypatch.undo()
        time.tzset()
