"""What the end of a task means: its cause, and the words that the coordinator is told."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dlrover_run.failures import describe_exit
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.policies.parameter_servers.model import EndCause, PlannedTask, Role, TaskKey
from dlrover_run.progress.page import StepSource
from tf_ps_runner.agent.exits import (
    REPEATED_BEFORE_STEP,
    REPEATED_WITHIN,
    ExitClassifier,
    ExitInfo,
    classify_exit,
    exception_text,
)
from tf_ps_runner.agent.protocol import Ready, Restored, Step
from tf_ps_runner.agent.task_process import TaskProcess


def end(code: int, stderr: str = "", stopped: signal.Signals | None = None) -> WorkerExit:
    return WorkerExit(0, 0, 7, code, 1.0, stopped_with=stopped, stderr_tail=stderr, name="worker-0")


def trace(words: str) -> str:
    return f'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n{words}\n'


def cause(role: Role, code: int, stderr: str = "", **more: object) -> EndCause:
    found = ExitInfo(role, end(code, stderr), lived=1.0)
    return classify_exit(replace(found, **more)).cause  # type: ignore[arg-type]


def test_code_0_is_success_but_for_a_server_which_never_ends() -> None:
    assert cause(Role.WORKER, 0) is EndCause.SUCCESS
    assert cause(Role.PS, 0) is EndCause.FAILURE
    assert cause(Role.PS, 0, asked_to_end=True) is EndCause.SUCCESS


@pytest.mark.parametrize("role", list(Role))
def test_code_0_of_a_task_that_the_launcher_stopped_is_no_success(role: Role) -> None:
    found = ExitInfo(role, end(0, stopped=signal.SIGTERM), 9.0, asked_to_end=True)
    assert classify_exit(found).cause is EndCause.RESHAPED


def test_code_75_is_a_change_of_membership() -> None:
    assert cause(Role.WORKER, 75) is EndCause.RESHAPED


def test_what_was_given_up_is_silent_whatever_its_code() -> None:
    told = classify_exit(ExitInfo(Role.PS, end(-9), 9.0, hung="lives, and does not answer any more"))
    assert (told.cause, told.exit_text) == (EndCause.SILENT, "lives, and does not answer any more")


def test_the_reported_and_the_observed_exit_both_have_the_cause_of_an_out_of_memory_kill() -> None:
    class Output:
        stdout_path = stderr_path = None

        async def stderr_tail_of(self, relay: object) -> str:
            return ""

        def forget(self, relay: object) -> None: ...

    task = SimpleNamespace(
        assigned=SimpleNamespace(rank=0, role=Role.WORKER, key=TaskKey(Role.WORKER, 0)),
        key=TaskKey(Role.WORKER, 0),
        output=Output(),
        enforcer=SimpleNamespace(explain_oom_kill=lambda code: "it used more than its memory limit of 4Gi"),
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


def test_a_task_that_the_launcher_stopped_costs_nothing() -> None:
    found = ExitInfo(Role.WORKER, end(-15, stopped=signal.SIGTERM), 9.0, asked_to_end=True)
    assert classify_exit(found).cause is EndCause.RESHAPED


@pytest.mark.parametrize("code", [-9, -11, 1, 41])
def test_all_else_is_a_failure(code: int) -> None:
    assert cause(Role.CHIEF, code) is EndCause.FAILURE


def test_a_failure_has_the_traceback() -> None:
    told = classify_exit(ExitInfo(Role.WORKER, end(1, trace("ValueError: x")), 9.0))
    assert told.exit_text == "raised ValueError: x"
    assert told.trace.endswith("ValueError: x")


def test_the_same_exception_soon_after_the_start_is_repeated() -> None:
    words = trace("ValueError: x")
    assert cause(Role.WORKER, 1, words, before="ValueError: x") is EndCause.REPEATED
    assert cause(Role.WORKER, 1, words, before="ValueError: y") is EndCause.FAILURE
    assert cause(Role.WORKER, 1, words, before=None) is EndCause.FAILURE
    assert cause(Role.WORKER, 1, words, before="ValueError: x", lived=REPEATED_WITHIN + 1) is EndCause.FAILURE


def test_a_task_that_has_made_no_step_has_longer_for_the_same_exception() -> None:
    words, late = trace("ValueError: x"), {"before": "ValueError: x", "lived": REPEATED_WITHIN + 1}
    assert cause(Role.WORKER, 1, words, stepped=False, **late) is EndCause.REPEATED
    assert cause(Role.WORKER, 1, words, stepped=True, **late) is EndCause.FAILURE
    far = {"before": "ValueError: x", "lived": REPEATED_BEFORE_STEP + 1}
    assert cause(Role.WORKER, 1, words, stepped=False, **far) is EndCause.FAILURE


def test_an_exception_is_the_same_whatever_its_temporary_file_is_called() -> None:
    words = "PermissionDeniedError: /m/ckpt-{}_temp/part-0.data.tempstate{}; Read-only file system"
    assert cause(Role.CHIEF, 1, trace(words.format(1, 1234567890)), before=words.format(1, 98765)) is EndCause.REPEATED
    assert cause(Role.CHIEF, 1, trace(words.format(1, 12345)), before=words.format(2, 12345)) is EndCause.FAILURE


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
    ],
)
def test_two_exceptions_are_the_same_but_for_what_is_of_one_process_alone(words: str, other: str, same: bool) -> None:
    assert (cause(Role.CHIEF, 1, trace(words), before=other) is EndCause.REPEATED) is same


def test_a_task_that_reports_no_step_is_given_no_longer_for_the_same_exception() -> None:
    def hosted(role: Role) -> TaskProcess:
        task = PlannedTask(key=TaskKey(role, 0), rank=0, version=1, node_id="node", incarnation="it", host="box")
        return TaskProcess(task, 1, lambda: None)

    async def look() -> None:
        assert hosted(Role.EVALUATOR).past_beginning
        for role in (Role.CHIEF, Role.WORKER):
            silent = hosted(role)
            assert not silent.past_beginning
            # Nothing was heard of it for as long as a script without TensorFlow's usual sessions is waited for.
            silent.mark_ready()
            assert silent.past_beginning
            talks = hosted(role)
            talks.on_event(Ready())
            assert not talks.past_beginning
            talks.on_event(Restored(step=7, how="checkpoint"))
            assert not talks.past_beginning
            talks.on_event(Step(step=8))
            assert talks.past_beginning

    asyncio.run(look())


def test_the_steps_of_a_task_are_its_progress() -> None:
    async def look() -> None:
        key = TaskKey(Role.CHIEF, 0)
        task = TaskProcess(
            PlannedTask(key=key, rank=0, version=1, node_id="node", incarnation="it", host="box"), 1, lambda: None
        )
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

    asyncio.run(look())


def test_a_task_that_lost_a_server_is_not_the_failure() -> None:
    words = "tensorflow.python.framework.errors_impl.UnavailableError: Graph execution error: Socket closed"
    assert cause(Role.CHIEF, 1, trace(words)) is EndCause.RESHAPED
    assert cause(Role.CHIEF, 1, trace(words), before=words) is EndCause.RESHAPED


def test_a_kill_has_raised_nothing() -> None:
    assert exception_text(end(-9, trace("ValueError: x"))) is None
    assert exception_text(end(1, trace("ValueError: x"))) == "ValueError: x"
