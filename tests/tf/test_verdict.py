"""Which end of a task is taken for the one that the coordinator names."""

from __future__ import annotations

import pytest

from dlrover_run.agent.result import JobEnd, resolve_result
from dlrover_run.coordination.model import Assignment, Failure, PlanPhase, RoundKey
from dlrover_run.coordination.reasons import sentence
from dlrover_run.failures.worker_exit import WorkerExit
from dlrover_run.policies.parameter_servers.model import EndCause, TaskEnd
from dlrover_run.policies.parameter_servers.orders import SHORT_END
from tf_ps_runner.agent.report import task_results

LONG = f"raised ValueError: {'no such column ' * 10}"


@pytest.mark.parametrize(
    ("named", "known"),
    [(LONG, True), (LONG[:SHORT_END], True), (LONG[: SHORT_END - 1], False), ("exited with code 3", False)],
)
def test_the_task_that_the_coordinator_names_is_known_also_by_few_words(named: str, known: bool) -> None:
    end = WorkerExit(0, 0, 7, 3, 1.0, name="chief-0")
    wanted = Assignment(
        key=RoundKey(), phase=PlanPhase.FAILED, reasons=sentence("it failed"), failure=Failure(0, "box", named)
    )
    ends = ((TaskEnd(EndCause.FAILURE, LONG), end),)
    verdict = resolve_result(JobEnd(wanted, task_results(wanted, ends, "box")), "precise")
    assert verdict.root == (end if known else None)
    assert verdict.exit_code == 3 or not known
