"""The answers of `why`, from made-up event logs: codes with parameters, and a few rendered texts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from support.golden import assert_screens

from dlrover_run.events.reader import AgentLog
from dlrover_run.events.records import (
    AgentEnded,
    CheckpointSeen,
    Event,
    JobEnded,
    LogOpened,
    NodeWaiting,
    RoundClosed,
    RoundFormed,
    StragglerFound,
    StragglerGone,
    WorkerExited,
    WorkerFailed,
    WorkerProgress,
    WorkerReady,
    WorkerResumed,
    WorkerStalled,
    WorkerStarted,
)
from dlrover_run.features.hangs.search.codes import GuiltCode
from dlrover_run.features.hangs.stragglers.finding import Straggler
from dlrover_run.features.inspect.answers import WhyAnswer, WhyCode
from dlrover_run.features.inspect.why import Question, explain
from dlrover_run.words.reasons import Code, Reason

BEGAN = datetime(2026, 11, 22, 4, 0, tzinfo=UTC)


def log_of(host: str, *events: tuple[float, Event], workers: int = 1, unread: int = 0) -> AgentLog:
    """The log of an agent that began at BEGAN; its monotonic clock is that of its host alone."""
    offset = 1000.0 * len(host)
    timed = (
        msgspec.structs.replace(event, time=BEGAN + timedelta(seconds=seconds), mono=offset + seconds)
        for seconds, event in events
    )
    opened = LogOpened(
        time=BEGAN, mono=offset, schema=1, job="j", host=host, node_id=host, pid=1, workers=workers, began=offset,
        stages=("store", "step"),
    )  # fmt: skip
    return AgentLog(opened, tuple(timed), unread)


def formed(number: int, *reasons: Reason, nodes: int = 2) -> RoundFormed:
    return RoundFormed(
        round=number, epoch=1, node=0, nodes=nodes, first_rank=0, workers=1, world_size=nodes, restarts=number - 1,
        reasons=reasons,
    )  # fmt: skip


def started(rank: int, number: int) -> WorkerStarted:
    return WorkerStarted(round=number, rank=rank, local_rank=0, pid=50 + rank)


def step(rank: int, number: int) -> WorkerReady:
    return WorkerReady(round=number, rank=rank, local_rank=0, stage="step")


def exited(rank: int, number: int, code: int, stopped_with: str = "") -> WorkerExited:
    return WorkerExited(round=number, rank=rank, local_rank=0, pid=50 + rank, code=code, stopped_with=stopped_with)


def failed(rank: int, number: int) -> WorkerFailed:
    what = "was killed by SIGKILL: the kernel's memory limit was hit"
    return WorkerFailed(round=number, rank=rank, local_rank=0, pid=50 + rank, code=-9, cause="oom", what=what)


END = AgentEnded(exit_code=0, reason="success")
FAILURE = Code.WORKER_FAILED(rank=1, node="node 1 (n02)", what="was killed by SIGKILL")

RESTARTED = [
    log_of(
        "n1", (0, formed(1)), (1, started(0, 1)), (2, step(0, 1)), (6, CheckpointSeen()),
        (10.2, RoundClosed(round=1, epoch=1, failed=True)), (10.5, exited(0, 1, -15, "SIGTERM")),
        (11, formed(2, FAILURE)), (11.4, started(0, 2)), (12, step(0, 2)), (30, exited(0, 2, 0)),
        (31, JobEnded(phase="finished", restarts=1)), (31, END),
    ),
    log_of(
        "n02", (0, formed(1)), (1, started(1, 1)), (2, step(1, 1)), (10, exited(1, 1, -9)), (10.1, failed(1, 1)),
        (11, formed(2, FAILURE)), (13, started(1, 2)), (14, step(1, 2)), (30, exited(1, 2, 0)),
        (31, JobEnded(phase="finished", restarts=1)), (31, END),
    ),
]  # fmt: skip


@pytest.fixture(autouse=True)
def clock_of_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A local clock that differs from UTC."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def params(answer: WhyAnswer, code: WhyCode) -> list[dict[str, object]]:
    """The parameters of each reason with that code."""
    return [dict(reason.params) for line in answer.lines for reason in line if reason.code == code.code]


def test_the_last_restart_has_a_cause_a_time_and_a_cost() -> None:
    answer = explain(RESTARTED, Question.LAST_RESTART)
    assert answer.codes == (
        ("why.round_formed", "why.because", "worker_failed"),
        ("why.failed_worker", "why.lived"),
        ("why.down",),
        ("why.next_step",),
        ("why.lost_work",),
    )
    assert params(answer, WhyCode.FAILED_WORKER)[0] | {"what": ""} == {
        "name": "rank 1",
        "host": "n02",
        "pid": 51,
        "what": "",
    }
    # The node whose workers came back last, by the clock of that node alone.
    assert params(answer, WhyCode.DOWN)[0]["seconds"] == pytest.approx(3.0)
    assert params(answer, WhyCode.NEXT_STEP)[0]["seconds"] == pytest.approx(4.0)
    assert params(answer, WhyCode.LOST_WORK)[0]["seconds"] == pytest.approx(4.2)
    assert params(answer, WhyCode.ROUND_FORMED)[0]["at"] == "2026-11-22T04:00:11+00:00"


def test_a_job_without_a_restart() -> None:
    answer = explain([log_of("n1", (0, formed(1)), (1, started(0, 1)), (5, END))], Question.LAST_RESTART)
    assert answer.codes == (("why.no_restart",),)
    assert explain([log_of("n1", (5, END))], Question.LAST_RESTART).codes == (("why.no_round",),)


def test_without_a_checkpoint_no_lost_work_is_reported() -> None:
    logs = [
        log_of(
            "n1", (0, formed(1)), (0, started(0, 1)), (5, exited(0, 1, 1)), (6, formed(2)), (7, started(0, 2)), (8, END)
        )
    ]  # fmt: skip
    answer = explain(logs, Question.LAST_RESTART)
    assert answer.codes == (("why.round_formed",), ("why.down",), ("why.lost_unknown",))


def test_a_restart_that_is_not_complete() -> None:
    log = log_of("n1", (0, formed(1)), (0, started(0, 1)), (5, exited(0, 1, 1)), (6, formed(2)))
    answer = explain([log], Question.LAST_RESTART, until=BEGAN + timedelta(seconds=60))
    assert answer.codes[1:] == (("why.still_down",), ("why.lost_unknown",))


def test_a_job_that_failed_names_its_last_failure() -> None:
    log = log_of(
        "n02", (0, formed(1)), (1, started(1, 1)), (10, exited(1, 1, -9)), (10.1, failed(1, 1)),
        (11, JobEnded(phase="failed", reasons=(FAILURE,))), (12, AgentEnded(exit_code=137, reason="worker failed")),
    )  # fmt: skip
    answer = explain([log], Question.NOW)
    assert answer.codes == (("why.job_failed", "worker_failed"), ("why.failed_worker", "why.lived"))


def test_a_job_that_succeeded() -> None:
    assert explain(RESTARTED, Question.NOW).codes == (("why.job_succeeded",),)


def test_a_launcher_that_ended_without_a_decision_gives_its_reason() -> None:
    log = log_of("n1", (5, AgentEnded(exit_code=71, reason="cannot join", what="the master does not answer")))
    answer = explain([log], Question.NOW)
    assert answer.codes == (("why.agent_ended", "sentence"),)


def test_a_stall_names_the_guilty_rank_first_and_ends_with_its_cause() -> None:
    def stalled(rank: int, guilty: bool) -> WorkerStalled:
        return WorkerStalled(round=1, rank=rank, local_rank=0, since=1000.0, guilty=guilty)

    first = [(0.0, formed(1)), (1.0, started(0, 1)), (9.0, stalled(0, False))]
    logs = [log_of("n1", *first), log_of("n02", (0, formed(1)), (1, started(1, 1)), (9.1, stalled(1, True)))]
    now = BEGAN + timedelta(seconds=20)
    answer = explain(logs, Question.NOW, now)
    assert [one["name"] for one in params(answer, WhyCode.STALLED)] == ["rank 1", "rank 0"]
    resumed = log_of("n1", *first, (15, WorkerResumed(round=1, rank=0, local_rank=0)))
    assert explain([resumed], Question.NOW, now).codes == (("why.trains",),)
    assert explain([log_of("n1", *first, (15, formed(2)))], Question.NOW, now).codes[0][0] == "why.round_formed"


def test_a_job_that_ended_while_it_hung_says_so() -> None:
    """The one that waits gives up by itself, as after a timeout of NCCL, and the launcher stops the other one."""

    def hung(rank: int, guilty: bool, *after: tuple[float, Event]) -> AgentLog:
        stalled = WorkerStalled(round=1, rank=rank, local_rank=0, since=2003.0, guilty=guilty)
        return log_of(f"n{rank}", (0, formed(1)), (1, started(rank, 1)), (9, stalled), *after)

    ends = ((31, JobEnded(phase="failed", reasons=(FAILURE,))), (32, AgentEnded(exit_code=1, reason="worker failed")))
    waits = hung(1, False, (30, exited(1, 1, 1)), (30.1, failed(1, 1)), *ends)
    guilty = hung(0, True, (30.5, exited(0, 1, -15, "SIGTERM")), *ends)
    answer = explain([waits, guilty], Question.NOW)
    assert answer.codes[0][0] == "why.job_failed"
    assert [one["name"] for one in params(answer, WhyCode.HAD_STALLED)] == ["rank 0"]
    unnamed = hung(0, False, (30.5, exited(0, 1, -15, "SIGTERM")), *ends)
    assert len(params(explain([waits, unnamed], Question.NOW), WhyCode.HAD_STALLED)) == 1
    for later in ((15, WorkerResumed(round=1, rank=0, local_rank=0)), (15, exited(0, 1, 0)), (15, formed(2))):
        assert not params(explain([hung(0, True, later, *ends)], Question.NOW), WhyCode.HAD_STALLED)


def test_a_waiting_job_is_explained() -> None:
    waiting = NodeWaiting(reasons=(Code.NODES_OF(number=1, wanted=2),))
    now = BEGAN + timedelta(seconds=20)
    assert explain([log_of("n1", (1, waiting))], Question.NOW, now).codes == (("why.waits", "nodes_of"),)
    log = log_of("n1", (0, formed(1)), (9, RoundClosed(round=1, epoch=1)), (10, waiting))
    assert explain([log], Question.NOW, now).codes == (("why.waits", "nodes_of"),)


def test_slow_shows_the_shares_of_time_and_the_rank_that_waits_longest_for_data() -> None:
    def progress(rank: int, waited: float) -> WorkerProgress:
        return WorkerProgress(round=1, rank=rank, local_rank=0, waited=waited)

    def log(rank: int, waited: float) -> AgentLog:
        events = [(0.0, formed(1)), (1.0, started(rank, 1)), (5.0, step(rank, 1))]
        figures = [(10.0, progress(rank, 1.0)), (20.0, progress(rank, 1.0 + waited))]
        return log_of(f"n{rank}", *events, *figures, (20, END))

    answer = explain([log(0, 0.3), log(1, 4.2), log(2, 0.2)], Question.SLOW)
    assert answer.codes == (("why.trained_all", "why.shares", "why.share", "why.share"), ("why.waits_for_data",))
    assert " s, the sum of 3 workers, were training" in answer.text
    assert params(answer, WhyCode.TRAINED_ALL)[0]["percent"] == pytest.approx(75.0)
    shares = {"own": pytest.approx(42), "others": pytest.approx(2)}
    assert params(answer, WhyCode.WAITS_FOR_DATA) == [{"rank": 1, "host": "n1", **shares}]
    assert explain([log(0, 4.0), log(1, 3.9)], Question.SLOW).codes[1] == ("why.no_straggler",)
    assert explain([log(0, 4.0)], Question.SLOW).codes[1] == ("why.no_progress",)


def straggler(rank: int, number: int) -> StragglerFound:
    reasons = Straggler(rank, "data", 0.6, 0.02, 0.55).reasons
    return StragglerFound(round=number, rank=rank, local_rank=0, reasons=reasons)


def no_straggler(rank: int, number: int) -> StragglerGone:
    return StragglerGone(round=number, rank=rank, local_rank=0)


@pytest.mark.parametrize(
    ("events", "times"),
    [
        ([(20, straggler(1, 1))], [None]),
        ([(20, straggler(1, 1)), (50, no_straggler(1, 1))], [30]),
        ([(20, straggler(1, 1)), (25, straggler(1, 1)), (50, no_straggler(1, 1)), (60, straggler(1, 1))], [None, 30]),
        ([(20, straggler(1, 1)), (40, exited(1, 1, -9)), (41, no_straggler(1, 1))], [20]),
        ([(20, straggler(1, 1)), (40, RoundClosed(round=1, epoch=1)), (50, formed(2))], [20]),
        ([(20, straggler(1, 1)), (30, no_straggler(1, 1)), (40, straggler(1, 1)), (90, END)], [50, 10]),
        ([(20, no_straggler(1, 1))], []),
    ],
)
def test_slow_names_the_stragglers_that_were_found_with_their_times(
    events: list[tuple[float, Event]], times: list[float | None]
) -> None:
    log = log_of("n02", (0, formed(1)), (1, started(1, 1)), *events)
    answer = explain([log_of("n1", (0, formed(1))), log], Question.SLOW, log.last.time)
    named = [line for line in answer.lines if line[1:] == straggler(1, 1).reasons]
    assert [line[0].params.get("seconds") for line in named] == times
    assert {(line[0].params["name"], line[0].params["host"]) for line in named} <= {("rank 1", "n02")}


def test_start_names_the_worker_that_trained_last_and_what_its_node_waited_for() -> None:
    waiting = NodeWaiting(reasons=(Code.NODES_OF(number=1, wanted=2),))
    quick = log_of("n1", (3, formed(1)), (3, started(0, 1)), (4, step(0, 1)), (9, END))
    slow = log_of("n02", (1, waiting), (3, formed(1)), (3, started(1, 1)), (8, step(1, 1)), (9, END))
    answer = explain([quick, slow], Question.START)
    assert answer.codes == (("why.start_took", "why.part", "why.part", "why.part"), ("why.waited", "nodes_of"))
    assert params(answer, WhyCode.START_TOOK) == [{"seconds": 8.0, "local_rank": 0, "host": "n02"}]
    assert params(answer, WhyCode.PART)[0] == {"phase": "import", "seconds": 5.0}


def test_a_start_that_is_not_over() -> None:
    log = log_of("n1", (3, formed(1)), (3, started(0, 1)))
    answer = explain([log], Question.START, BEGAN + timedelta(seconds=60))
    assert params(answer, WhyCode.NOT_TRAINING) == [{"seconds": 60.0, "local_rank": 0, "host": "n1"}]


def test_what_the_log_does_not_show_is_reported() -> None:
    log = log_of("n1", (0, formed(1)), unread=3)
    assert explain([log], Question.NOW).codes[-2:] == (("why.torn",), ("why.unread",))
    # A line that an agent is still writing is no damage.
    assert "why.unread" not in str(explain([log_of("n1", (0, formed(1)), unread=1)], Question.NOW).codes)


@pytest.mark.parametrize("question", list(Question))
def test_no_log_at_all_has_an_answer(question: Question) -> None:
    assert explain([], question).lines
    assert explain([log_of("n1")], question, BEGAN).lines


def test_a_failure_caused_by_another_one_is_left_out() -> None:
    def broken(host: str, rank: int, cause: str) -> AgentLog:
        event = msgspec.structs.replace(failed(rank, 1), cause=cause)
        return log_of(host, (0, formed(1)), (1, started(rank, 1)), (10, exited(rank, 1, 1)), (10.1, event))

    again = log_of("n3", (0, formed(1)), (11, formed(2)))
    logs = [broken("n1", 0, "lost_peer"), broken("n02", 1, "exception"), again]
    assert [one["name"] for one in params(explain(logs, Question.LAST_RESTART), WhyCode.FAILED_WORKER)] == ["rank 1"]
    logs = [broken("n1", 0, "lost_peer"), again]
    assert [one["name"] for one in params(explain(logs, Question.LAST_RESTART), WhyCode.FAILED_WORKER)] == ["rank 0"]


class TestTasks:
    """A job with parameter servers has no rounds: each task fails and comes back by itself."""

    @staticmethod
    def started(pid: int, version: int = 1) -> WorkerStarted:
        return WorkerStarted(round=version, rank=1, local_rank=0, role="worker", pid=pid)

    def test_the_last_failure_names_the_task_and_when_it_ran_again(self) -> None:
        broken = WorkerFailed(
            round=1, rank=1, local_rank=0, role="worker", pid=7, code=-9, cause="signal", what="was killed by SIGKILL"
        )
        logs = [log_of("n1", (0, self.started(7)), (9, broken), workers=0)]
        now = BEGAN + timedelta(seconds=60)
        answer = explain(logs, Question.LAST_RESTART, now)
        assert answer.codes == (("why.failed_worker", "why.lived"), ("why.task_still_down",))
        assert answer.text.startswith("worker 1 on n1 (pid 7) was killed by SIGKILL, 9.0 s after its start")
        # It starts again on another node.
        logs.append(log_of("n02", (11, self.started(8, 2)), workers=0))
        answer = explain(logs, Question.LAST_RESTART, now)
        assert params(answer, WhyCode.TASK_DOWN) == [{"seconds": pytest.approx(2.0)}]

    def test_a_job_that_failed_and_one_that_runs(self) -> None:
        logs = [log_of("n1", (0, self.started(7)), (1, self.started(8)), workers=0)]
        answer = explain(logs, Question.NOW, BEGAN + timedelta(seconds=60))
        assert params(answer, WhyCode.TASKS) == [{"number": 2, "version": 1}]
        assert explain(logs, Question.LAST_RESTART, BEGAN).codes == (("why.no_restart",),)


def test_the_answers_are_those_of_the_golden_file() -> None:
    straggled = log_of(
        "n02", (0, formed(1)), (1, started(1, 1)), (20, straggler(1, 1)), (50, no_straggler(1, 1)), (60, END)
    )  # fmt: skip
    refused = log_of("n1", (5, AgentEnded(exit_code=71, reason="cannot join", what="the master does not answer")))
    ends = ((11, JobEnded(phase="failed", reasons=(FAILURE,))), (12, AgentEnded(exit_code=137, reason="worker failed")))
    lost = log_of("n02", (0, formed(1)), (1, started(1, 1)), (10, exited(1, 1, -9)), (10.1, failed(1, 1)), *ends)
    hangs = WorkerStalled(
        round=1, rank=0, local_rank=0, since=2005.0, guilty=True, reasons=(GuiltCode.STOPPED(),)
    )  # fmt: skip
    stalled = log_of("n1", (0, formed(1)), (1, started(0, 1)), (9, hangs))
    given_up = log_of(
        "n1", (0, formed(1)), (1, started(0, 1)), (9, hangs), (30, exited(0, 1, -15, "SIGTERM")),
        (31, AgentEnded(exit_code=143, reason="signal", what="SIGTERM stopped the job")),
    )  # fmt: skip
    waiting = log_of("n1", (1, NodeWaiting(reasons=(Code.NODES_OF(number=1, wanted=2),))))
    now = BEGAN + timedelta(seconds=60)
    screens = {f"a job with a restart: {question.value}": explain(RESTARTED, question).text for question in Question}
    screens |= {
        "a job that failed": explain([lost], Question.NOW).text,
        "a launcher that could not join": explain([refused], Question.NOW).text,
        "a worker that hangs": explain([stalled], Question.NOW, now).text,
        "a job that was stopped as it hung": explain([given_up], Question.NOW).text,
        "a job that waits": explain([waiting], Question.NOW, now).text,
        "a straggler": explain([straggled], Question.SLOW).text,
        "no log at all": explain([], Question.NOW).text,
    }
    assert_screens(Path(__file__).with_name("why.txt"), screens)
