"""What the exit of a task means: its cause, and the text for the coordinator and the user."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from loops import in_loop

from dlrover_run.agent.result import JobEnd, resolve_result
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.round import Failure, RoundKey
from dlrover_run.failures.causes import describe_exit
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.observe.page import StepSource
from dlrover_run.output.destinations import Inherited, RankStreams
from dlrover_run.words.reasons import sentence
from tf_ps_runner.agent.exits import (
    REPEATED_BEFORE_STEP,
    REPEATED_WITHIN,
    ExitClassifier,
    ExitInfo,
    classify_exit,
    exception_text,
)
from tf_ps_runner.agent.protocol import Ready, Restored, Step
from tf_ps_runner.agent.report import EventPrinter, task_results
from tf_ps_runner.agent.task_process import TaskProcess
from tf_ps_runner.cluster.model import EndCause, PlannedTask, Role, TaskEnd, TaskKey
from tf_ps_runner.cluster.orders import SHORT_END


def end(code: int, stderr: str = "", stopped: signal.Signals | None = None) -> WorkerExit:
    return WorkerExit(0, 0, 7, code, 1.0, stopped_with=stopped, stderr_tail=stderr, name="worker-0")


def cause(role: Role, code: int, stderr: str = "", stopped: signal.Signals | None = None, **facts: Any) -> EndCause:
    return classify_exit(replace(ExitInfo(role, end(code, stderr, stopped), lived=1.0), **facts)).cause


EVERY = list(Role)
STOPPED = {"stopped": signal.SIGTERM}
TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n'
UNAVAILABLE = "tensorflow.python.framework.errors_impl.UnavailableError"
LOST_SERVER = f"{TRACE}{UNAVAILABLE}: Graph execution error: Socket closed"
OWN_CLIENT = (
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "ConnectionAbortedError: [Errno 103] Software caused connection abort",
    "botocore.exceptions.ClientError: Connection reset by peer",
    "grpc._channel._InactiveRpcError: failed to connect to all addresses",
    "redis.exceptions.ConnectionError: Error 32 while writing to socket. Broken pipe.",
)


@pytest.mark.parametrize(
    ("role", "code", "stderr", "facts", "expected"),
    [
        (Role.WORKER, 0, "", {}, EndCause.SUCCESS),
        # A server never exits by itself.
        (Role.PS, 0, "", {}, EndCause.FAILURE),
        (Role.PS, 0, "", {"asked_to_end": True}, EndCause.SUCCESS),
        *((role, 0, "", {"asked_to_end": True, **STOPPED}, EndCause.RESHAPED) for role in EVERY),
        (Role.WORKER, -15, "", {"asked_to_end": True, **STOPPED}, EndCause.RESHAPED),
        (Role.WORKER, 75, "", {}, EndCause.RESHAPED),
        *((Role.CHIEF, code, "", {}, EndCause.FAILURE) for code in (-9, -11, 1, 41)),
        (Role.PS, -9, "", {"hung": "lives, and does not answer any more"}, EndCause.SILENT),
        # The server is the failure.
        (Role.CHIEF, 1, LOST_SERVER, {}, EndCause.RESHAPED),
        (Role.WORKER, 1, f"{TRACE}{UNAVAILABLE}: recvmsg:Connection reset by peer", {}, EndCause.RESHAPED),
        (Role.WORKER, 1, f"{TRACE}{UNAVAILABLE}: sendmsg:Broken pipe", {}, EndCause.RESHAPED),
        (Role.EVALUATOR, 1, LOST_SERVER, {}, EndCause.FAILURE),
        # The script's own client of an object store, a database or a queue.
        *((role, 1, TRACE + text, {}, EndCause.FAILURE) for role in (Role.CHIEF, Role.WORKER) for text in OWN_CLIENT),
        (Role.CHIEF, 1, LOST_SERVER, {"before": LOST_SERVER.rpartition("\n")[2]}, EndCause.RESHAPED),
    ],
)
def test_the_cause_of_an_exit(role: Role, code: int, stderr: str, facts: dict[str, Any], expected: EndCause) -> None:
    assert cause(role, code, stderr, **facts) is expected


SOON, LATE, TOO_LATE = 1.0, REPEATED_WITHIN + 1, REPEATED_BEFORE_STEP + 1


@pytest.mark.parametrize(
    ("before", "lived", "stepped", "repeated"),
    [
        ("ValueError: x", SOON, True, True),
        ("ValueError: y", SOON, True, False),
        (None, SOON, True, False),
        ("ValueError: x", LATE, True, False),
        # A task without any step has longer.
        ("ValueError: x", LATE, False, True),
        ("ValueError: x", TOO_LATE, False, False),
    ],
)
def test_the_same_exception_soon_after_the_start_is_repeated(
    before: str | None, lived: float, stepped: bool, repeated: bool
) -> None:
    found = cause(Role.WORKER, 1, f"{TRACE}ValueError: x\n", before=before, lived=lived, stepped=stepped)
    assert found is (EndCause.REPEATED if repeated else EndCause.FAILURE)


@pytest.mark.parametrize(
    ("words", "other", "same"),
    [
        ("NotFoundError: /m/model.ckpt-12345", "NotFoundError: /m/model.ckpt-13000", False),
        ("ValueError: 123456 rows", "ValueError: 123457 rows", False),
        ("TypeError: <function f at 0x7f12ab>", "TypeError: <function f at 0x7f99cd>", True),
        ("OSError: pid 4711 holds it", "OSError: pid 12345 holds it", True),
        ("OSError: 10.0.0.1:40001 is in use", "OSError: 10.0.0.1:40002 is in use", True),
        ("OSError: /tmp/tmpab12cd_e/x", "OSError: /tmp/tmpzz99yy8x/x", True),
        ("OSError: /m/ckpt-1_temp_0f3a/part", "OSError: /m/ckpt-1_temp_9bc2/part", True),
        ("OSError: part-0.data.tempstate1234567890; Read-only", "OSError: part-0.data.tempstate98765; Read-only", True),
        ("OSError: /m/ckpt-1_temp/part-0", "OSError: /m/ckpt-2_temp/part-0", False),
    ],
)
def test_two_exceptions_are_equal_except_for_the_details_of_one_process(words: str, other: str, same: bool) -> None:
    assert (cause(Role.CHIEF, 1, f"{TRACE}{words}\n", before=other) is EndCause.REPEATED) is same


def test_a_failure_has_the_traceback_and_a_kill_has_no_exception() -> None:
    raised = end(1, f"{TRACE}ValueError: x\n")
    found = classify_exit(ExitInfo(Role.WORKER, raised, 9.0))
    assert found.exit_text == "raised ValueError: x"
    assert found.trace.endswith("ValueError: x")
    assert exception_text(raised) == "ValueError: x"
    assert exception_text(end(-9, f"{TRACE}ValueError: x\n")) is None
    silent = classify_exit(ExitInfo(Role.PS, end(-9), 9.0, hung="lives, and does not answer any more"))
    assert silent.exit_text == "lives, and does not answer any more"


def test_the_reported_and_the_observed_exit_both_have_the_cause_of_an_out_of_memory_kill() -> None:
    class Started:
        memory = SimpleNamespace(explain_memory_kill=lambda code: "it used more than its memory limit of 4Gi")
        outputs = RankStreams(0, Inherited(), Inherited(), None)

        async def stderr_tail(self, relay: object) -> str:
            return ""

        def forget_output(self, relay: object) -> None: ...

    task = SimpleNamespace(
        assigned=SimpleNamespace(rank=0, role=Role.WORKER, key=TaskKey(Role.WORKER, 0)),
        key=TaskKey(Role.WORKER, 0),
        start=Started(),
        hung=None,
        started_at=0.0,
        leaving=False,
        past_beginning=True,
        step=5,
    )
    process = SimpleNamespace(code=-9, stopped_with=None, pid=7, ended_at=1.0)
    classifier = ExitClassifier(None, SimpleNamespace(task_ended=lambda *_: None))  # type: ignore[arg-type]
    reported, _ = asyncio.run(classifier.classify(task, process))  # type: ignore[arg-type]
    ((_, observed),) = classifier.ends
    assert reported.cause is EndCause.MEMORY
    assert observed.oom_kill == "it used more than its memory limit of 4Gi"
    assert reported.exit_text == describe_exit(observed)


def hosted(role: Role) -> TaskProcess:
    task = PlannedTask(key=TaskKey(role, 0), rank=0, version=1, node_id="node", incarnation="it", host="box")
    return TaskProcess(task, 1, lambda: None)


@in_loop
async def test_a_task_has_started_with_its_first_step_or_after_a_time_if_it_reports_none() -> None:
    assert hosted(Role.EVALUATOR).past_beginning
    for role in (Role.CHIEF, Role.WORKER):
        silent = hosted(role)
        assert not silent.past_beginning
        # It has reported nothing for as long as a script without TensorFlow's usual sessions is waited for.
        silent.mark_ready()
        assert silent.past_beginning
        task = hosted(role)
        for event in (Ready(), Restored(step=7, how="checkpoint")):
            task.on_event(event)
            assert not task.past_beginning
        task.on_event(Step(step=8))
        assert task.past_beginning


@in_loop
async def test_the_steps_of_a_task_are_its_progress() -> None:
    task = hosted(Role.CHIEF)
    task.on_event(Ready())
    task.on_event(Restored(step=7, how="checkpoint"))
    assert task.progress is None
    task.on_event(Step(step=10))
    first = task.progress
    assert first is not None
    assert (first.steps, first.source) == (3, StepSource.TASK)
    # The same step again is no progress.
    task.on_event(Step(step=10))
    assert task.progress == first


LONG = f"raised ValueError: {'no such column ' * 10}"


@pytest.mark.parametrize(
    ("named", "known"),
    [(LONG, True), (LONG[:SHORT_END], True), (LONG[: SHORT_END - 1], False), ("exited with code 3", False)],
)
def test_the_task_that_the_coordinator_names_is_found_also_by_a_shortened_text(named: str, known: bool) -> None:
    exit = WorkerExit(0, 0, 7, 3, 1.0, name="chief-0")
    failure = Failure(0, "box", named)
    wanted = Assignment(key=RoundKey(), phase=PlanPhase.FAILED, reasons=sentence("it failed"), failure=failure)
    ends = ((TaskEnd(EndCause.FAILURE, LONG), exit),)
    result = resolve_result(JobEnd(wanted, task_results(wanted, ends, "box")), "precise")
    assert result.root == (exit if known else None)
    assert result.exit_code == 3 or not known


@pytest.mark.parametrize("named", ["ps-0", "chief-0", "worker-0"])
def test_of_tasks_that_ended_alike_the_one_that_the_coordinator_names_is_reported(named: str) -> None:
    """`kill -9` of several at once: all of them have rank 0, this host and the same text."""
    text = "was killed by SIGKILL"
    names = ("chief-0", "ps-0", "worker-0")
    ends = tuple((TaskEnd(EndCause.FAILURE, text), WorkerExit(0, 0, 7, -9, 1.0, name=name)) for name in names)
    wanted = Assignment(
        key=RoundKey(), phase=PlanPhase.FAILED, reasons=sentence("x"), failure=Failure(0, "box", text, task=named)
    )
    root = task_results(wanted, ends, "box").root
    assert root is not None
    assert root.name == named


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (Restored(0, "fresh"), "begins with a fresh model at step 0"),
        (Restored(-1, "fresh"), "begins with a fresh model"),
        (Restored(2001, "fresh"), "begins at step 2001, with a model that the script has restored by itself"),
        (Restored(77, "live"), "goes on with the live model at step 77; no step lost"),
        (Restored(-1, "live"), "goes on with the live model; the script decides from where"),
        (Restored(7, "checkpoint", "/m/ckpt-7"), "has restored /m/ckpt-7, and goes on after step 7"),
    ],
)
def test_the_state_of_a_chiefs_model_is_reported_to_the_user(event: Restored, line: str) -> None:
    lines: list[str] = []
    EventPrinter(lines.append).task_message(TaskKey(Role.CHIEF, 0), event)
    assert lines == [f"chief-0: {line}"]
