"""Which TensorFlow task makes no progress, and which task is the cause: generated evidence, and tables of decisions."""

from __future__ import annotations

import pytest

from dlrover_run.features.hangs.search.codes import GuiltCode
from dlrover_run.features.hangs.search.detector import MIN_LIMIT, AskStacks, Decision, Resumed, Stalled
from dlrover_run.features.hangs.search.spin import PROBES
from dlrover_run.features.hangs.search.suspects import Place, Suspect
from dlrover_run.observe.processes import ProcessFigures, WorkerFigures
from dlrover_run.observe.records import Evidence, Traffic
from dlrover_run.stacks.stack import Frame, Stack, Thread
from tf_ps_runner.agent.task_stalls import (
    SCRIPT_MIN_QUIET,
    WAITING_MIN_QUIET,
    TaskDetectors,
    Where,
    find_task_stall,
    locate,
)
from tf_ps_runner.cluster.model import Role

INTERVAL = 0.5
PS, CHIEF, WORKER, OTHER, EVALUATOR = range(5)
ROLES = {PS: Role.PS, CHIEF: Role.CHIEF, WORKER: Role.WORKER, OTHER: Role.WORKER, EVALUATOR: Role.EVALUATOR}
TRAIN = (CHIEF, WORKER, OTHER)


class Trace:
    """Tasks of one node, in time of its own. The chief and the workers make steps; the evaluator idles."""

    def __init__(self, timeout: float | None = None) -> None:
        self.detectors = TaskDetectors(timeout)
        self.now = 0.0
        self.bytes = dict.fromkeys(ROLES, 0)
        self.cpu = dict.fromkeys(ROLES, 0.0)
        self.steps = dict.fromkeys(TRAIN, 0)
        self.states = dict.fromkeys(ROLES, "S")
        self.tasks = set(ROLES)

    def run(
        self, seconds: float, moving: tuple[int, ...] = (*TRAIN, PS), busy: tuple[int, ...] = ()
    ) -> list[tuple[float, Decision]]:
        """Run for a time; the decisions, each with the seconds since the beginning of that time."""
        found: list[tuple[float, Decision]] = []
        begun = self.now
        while self.now < begun + seconds:
            self.now += INTERVAL
            for task in self.tasks:
                self.bytes[task] += 100 if task in moving else 0
                self.cpu[task] += INTERVAL if task in busy else 0.0
                if task in self.steps and task in moving:
                    self.steps[task] += 1
            full = self.detectors.needs_figures
            samples = [self._evidence(task, full) for task in sorted(self.tasks)]
            steps = {task: made for task, made in self.steps.items() if made and task in self.tasks}
            decision = self.detectors.observe(samples, steps)
            if decision is not None:
                found.append((self.now - begun, decision))
        return found

    def _evidence(self, task: int, full: bool) -> Evidence:
        own = ProcessFigures(task + 100, "python", self.states[task], 1, self.cpu[task], 0, 0, 0)
        return Evidence(
            task, self.now, Traffic(self.bytes[task], self.bytes[task]), WorkerFigures(own) if full else None
        )


def test_tasks_that_train_and_tasks_that_idle_are_not_stalled() -> None:
    assert Trace().run(120) == []


def test_one_task_is_stalled_while_the_others_make_progress() -> None:
    trace = Trace()
    trace.run(20)
    ((_, stalled),) = trace.run(30, moving=(CHIEF, OTHER, PS))
    assert isinstance(stalled, Stalled)
    assert stalled.ranks == (WORKER,)
    assert trace.detectors.others_progress(WORKER)
    ((_, resumed),) = trace.run(5)
    assert isinstance(resumed, Resumed)
    assert resumed.ranks == (WORKER,)


def test_each_of_several_tasks_is_reported_once() -> None:
    trace = Trace()
    trace.run(20)
    found = [one for _, one in trace.run(30, moving=())]
    assert [one.ranks for one in found if isinstance(one, Stalled)] == [(CHIEF,), (WORKER,), (OTHER,)]
    assert not trace.detectors.others_progress(WORKER)


def test_a_task_without_steps_counts_only_when_it_is_stopped() -> None:
    trace = Trace()
    trace.run(20)
    trace.states |= {PS: "T", EVALUATOR: "S"}
    ((after, stalled),) = trace.run(10, moving=TRAIN)
    assert isinstance(stalled, Stalled)
    assert stalled.ranks == (PS,)
    assert after >= MIN_LIMIT
    trace.states[PS] = "S"
    ((_, resumed),) = trace.run(5)
    assert isinstance(resumed, Resumed)


def test_a_worker_that_has_made_no_step_has_no_rhythm() -> None:
    trace = Trace()
    trace.steps = {}
    trace.run(20)
    assert trace.run(300, moving=()) == []


def test_a_busy_task_is_asked_for_its_stack_before_it_counts() -> None:
    trace = Trace()
    trace.run(20)
    asked = [one for _, one in trace.run(5, moving=(CHIEF, OTHER, PS), busy=(WORKER,))]
    assert asked
    assert set(asked) == {AskStacks((WORKER,))}
    trace.detectors.note_stacks({WORKER: [("train.py:1:crunch",)] * PROBES})
    *asked_again, (_, stalled) = trace.run(5, moving=(CHIEF, OTHER, PS), busy=(WORKER,))
    assert {one for _, one in asked_again} == {AskStacks((WORKER,))}
    assert isinstance(stalled, Stalled)


def test_a_finding_that_needs_patience_comes_again_when_it_has_lasted() -> None:
    trace = Trace()
    trace.run(20)
    ((first, _),) = trace.run(10, moving=(CHIEF, OTHER, PS))
    trace.detectors.postpone(WAITING_MIN_QUIET)
    ((second, stalled),) = trace.run(80, moving=(CHIEF, OTHER, PS))
    assert isinstance(stalled, Stalled)
    assert first < SCRIPT_MIN_QUIET
    assert WAITING_MIN_QUIET <= second + 10 <= WAITING_MIN_QUIET + 2 * INTERVAL


def test_a_task_that_has_ended_is_forgotten() -> None:
    trace = Trace()
    trace.run(20)
    trace.tasks.remove(WORKER)
    trace.detectors.forget(WORKER)
    assert trace.run(60, moving=(CHIEF, OTHER, PS)) == []


SCRIPT = Frame("/home/u/train.py", 10, "main")
SESSION = Frame("/x/lib/python3.11/site-packages/tensorflow/python/client/session.py", 1400, "_call_tf_sessionrun")
LOCK = Frame("/usr/lib/python3.11/threading.py", 320, "wait")
SAVER = Frame("/x/lib/python3.11/site-packages/tensorflow/python/training/saver.py", 900, "save")
SERVER = Frame("/x/lib/python3.11/site-packages/tensorflow/python/training/server_lib.py", 150, "join")
QUEUE = Frame("/opt/dlrover/tf_ps_runner/worker/agent_connection.py", 120, "request")
SHARDS = Frame("/opt/dlrover/tf_ps_runner/worker/shards.py", 170, "take")
PATCH = Frame("/opt/dlrover/tf_ps_runner/worker/stopping.py", 60, "run")
COORDINATOR = Frame("/x/site-packages/tensorflow/python/distribute/coordinator/cluster_coordinator.py", 9, "wait")


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        ((SCRIPT,), Where.SCRIPT),
        ((LOCK, SCRIPT), Where.SCRIPT),
        ((SESSION, SCRIPT), Where.TENSORFLOW),
        ((SESSION, PATCH, SCRIPT), Where.TENSORFLOW),
        ((LOCK, COORDINATOR, SCRIPT), Where.TENSORFLOW),
        # A function of the script that TensorFlow calls.
        ((SCRIPT, SESSION, SCRIPT), Where.SCRIPT),
        ((SESSION, SAVER, SCRIPT), Where.HELD),
        ((SERVER, SCRIPT), Where.HELD),
        ((LOCK, QUEUE, SCRIPT), Where.HELD),
        ((LOCK, QUEUE, SHARDS, SCRIPT), Where.HELD),
        ((), Where.UNKNOWN),
    ],
)
def test_where_a_task_is(frames: tuple[Frame, ...], where: Where) -> None:
    assert locate(Stack((Thread("0x1", frames),))) is where


def test_a_task_whose_input_waits_for_the_data_of_the_job_is_held() -> None:
    stack = Stack((Thread("0x2", (LOCK, QUEUE, SHARDS)), Thread("0x1", (SESSION, SCRIPT))))
    assert locate(stack) is Where.HELD
    assert locate(None) is Where.UNKNOWN


LINE = {"file": SCRIPT.file, "line": SCRIPT.line, "function": SCRIPT.function}


@pytest.mark.parametrize(
    ("task", "own", "others", "where", "go_on", "code", "guilty"),
    [
        # Its own state is proof enough, whatever the others do.
        (WORKER, {"state": "T"}, {PS: "T"}, Where.UNKNOWN, True, GuiltCode.STOPPED, (WORKER,)),
        (WORKER, {"state": "D"}, {}, Where.TENSORFLOW, True, GuiltCode.BLOCKED_IN_KERNEL, (WORKER,)),
        # In its script it waits for no server, also if one is stopped.
        (WORKER, {"place": Place.LOCK}, {PS: "T"}, Where.SCRIPT, True, GuiltCode.LOCKED, (WORKER,)),
        (WORKER, {"busy": True}, {}, Where.SCRIPT, True, GuiltCode.SPINNING, (WORKER,)),
        (WORKER, {"lost_child": True, "place": Place.LOCK}, {}, Where.SCRIPT, True, GuiltCode.CHILD_LOST, (WORKER,)),
        (WORKER, {}, {}, Where.SCRIPT, True, GuiltCode.OUTSIDE, (WORKER,)),
        # In TensorFlow it waits for a server, or for the chief.
        (WORKER, {}, {PS: "T"}, Where.TENSORFLOW, False, GuiltCode.STOPPED, (PS,)),
        (WORKER, {}, {PS: "T", CHIEF: "T"}, Where.TENSORFLOW, False, GuiltCode.STOPPED, (PS, CHIEF)),
        (CHIEF, {}, {PS: "T"}, Where.HELD, False, GuiltCode.STOPPED, (PS,)),
        # A chief may wait for its workers, and no worker for another one; nothing waits for an evaluator.
        (CHIEF, {}, {WORKER: "T"}, Where.TENSORFLOW, False, GuiltCode.STOPPED, (WORKER,)),
        (WORKER, {}, {OTHER: "T", EVALUATOR: "T"}, Where.TENSORFLOW, False, GuiltCode.UNNAMED, ()),
        (WORKER, {"unsent": 1}, {}, Where.TENSORFLOW, False, GuiltCode.NETWORK, (WORKER,)),
        (WORKER, {}, {}, Where.TENSORFLOW, True, GuiltCode.BEHIND, (WORKER,)),
        (WORKER, {}, {}, Where.TENSORFLOW, False, GuiltCode.UNNAMED, ()),
        (WORKER, {}, {}, Where.UNKNOWN, True, GuiltCode.UNNAMED, ()),
    ],
)
def test_which_task_is_the_cause(
    task: int,
    own: dict[str, object],
    others: dict[int, str],
    where: Where,
    go_on: bool,
    code: GuiltCode,
    guilty: tuple[int, ...],
) -> None:
    suspects = {number: Suspect(number, state=others.get(number, "S")) for number in ROLES}
    suspects[task] = Suspect(task, **{"state": "S", **LINE, **own})  # type: ignore[arg-type]
    found = find_task_stall(task, suspects, ROLES, where, others_progress=go_on)
    assert found is not None
    assert (found.code, found.ranks) == (code, guilty)
    assert (found.line == SCRIPT) == (guilty == (task,))
    assert (found.min_quiet > 0) == (code not in (GuiltCode.STOPPED, GuiltCode.BLOCKED_IN_KERNEL, GuiltCode.CHILD_LOST))
    impatient = find_task_stall(task, suspects, ROLES, where, others_progress=go_on, is_learned=False)
    assert impatient is not None
    assert impatient.min_quiet == 0


@pytest.mark.parametrize(
    ("own", "where"),
    [
        # It saves, waits for data of the job, or serves its chief.
        ({}, Where.HELD),
        ({"busy": True}, Where.HELD),
        # It computes in an operation.
        ({"busy": True}, Where.TENSORFLOW),
    ],
)
def test_a_task_that_need_not_make_progress_is_not_stalled(own: dict[str, bool], where: Where) -> None:
    suspects = {WORKER: Suspect(WORKER, state="S", **own), PS: Suspect(PS, state="S")}  # type: ignore[arg-type]
    assert find_task_stall(WORKER, suspects, ROLES, where, others_progress=True) is None
