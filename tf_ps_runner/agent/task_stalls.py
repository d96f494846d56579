"""Decides which TensorFlow task of this node makes no progress, and why. Pure.

Training is asynchronous: a worker that hangs stops no other one. So each task that makes steps has a rhythm and a
detector of its own. Parameter servers and evaluators idle by nature, as do workers that serve their chief: of a task
without steps it counts only that it is stopped.

A task that trains waits for servers and for the chief, in a call of TensorFlow. While it does, one of these may be the
cause; where it waits in its script, it is the cause itself.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlrover_run.features.hangs.search.codes import GuiltCode
from dlrover_run.features.hangs.search.detector import (
    MIN_LIMIT,
    AskStacks,
    Decision,
    Detector,
    Resumed,
    StallCode,
    Stalled,
)
from dlrover_run.features.hangs.search.guilt import Finding
from dlrover_run.features.hangs.search.suspects import Place, Suspect
from dlrover_run.observe.records import Evidence
from dlrover_run.stacks.stack import Stack
from tf_ps_runner.cluster.model import Role
from tf_ps_runner.cluster.rules import ROLES

SCRIPT_MIN_QUIET = 15.0
"""Seconds without progress before a task is named that is not in a call of TensorFlow, or whose data is not
acknowledged: no other task confirms it. A server that does not answer is ended by its agent earlier than that."""

WAITING_MIN_QUIET = 60.0
"""The same for a task that waits in TensorFlow: others may save or begin."""


@dataclass
class _IdleTask:
    """A task without steps. `exchanged`: the last sample showed data on its connections."""

    traffic: tuple[int, int] = (0, 0)
    exchanged: bool = False
    stopped_since: float | None = None
    is_reported: bool = False


class TaskDetectors:
    """The detectors of the tasks of one node, each named by a number. `timeout` is that of `Detector`. A `Stalled` and
    a `Resumed` have one task each."""

    exchanged_at: float | None = None

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._training: dict[int, Detector] = {}
        self._idle: dict[int, _IdleTask] = {}
        self._stalled: dict[int, Stalled] = {}
        self._resumed: dict[int, Resumed] = {}
        self._decided = -1

    @property
    def knows_limit(self) -> bool:
        """Whether the rhythm of each task that makes steps is known."""
        return all(detector.knows_limit for detector in self._training.values())

    @property
    def needs_figures(self) -> bool:
        """As `Detector.needs_figures`, for any task. A server that exchanges data is not stopped."""
        quiet = any(not one.exchanged or one.stopped_since is not None for one in self._idle.values())
        return quiet or any(detector.needs_figures for detector in self._training.values())

    def has_progressed(self, task: int) -> bool:
        """Whether the last sample showed progress of the task."""
        return task not in self._training or self._training[task].has_progressed(task)

    def others_progress(self, task: int) -> bool:
        """Whether another task makes progress."""
        return any(one.quiet_seconds < MIN_LIMIT for number, one in self._training.items() if number != task)

    def observe(self, samples: Sequence[Evidence], steps: Mapping[int, int] | None = None) -> Decision:
        """Take the evidence of all tasks at one time, and the steps of those that train."""
        asked: list[int] = []
        for one in samples:
            made = (steps or {}).get(one.rank)
            if made is None:
                decision = self._observe_idle(one)
            else:
                self._note_idle_ends(one.rank)
                training = Detector(self.timeout, elsewhere=True, trains=True)
                decision = self._training.setdefault(one.rank, training).observe([one], {one.rank: made})
            if isinstance(decision, Stalled):
                self._stalled[one.rank] = decision
            elif isinstance(decision, Resumed) and self._stalled.pop(one.rank, None) is None:
                self._resumed[one.rank] = decision
            elif isinstance(decision, AskStacks):
                asked.append(one.rank)
        if self._stalled:
            self._decided = next(iter(self._stalled))
            return self._stalled.pop(self._decided)
        if self._resumed:
            return self._resumed.pop(next(iter(self._resumed)))
        return AskStacks(tuple(asked)) if asked else None

    def note_stacks(self, stacks: Mapping[int, Sequence[tuple[str, ...]]]) -> None:
        """Take the stacks of busy tasks, as `Detector.note_stacks`."""
        for task, found in stacks.items():
            if task in self._training:
                self._training[task].note_stacks({task: found})

    def withdraw(self) -> None:
        """Forget the stall that was decided last, as it is none."""
        if self._decided in self._training:
            self._training[self._decided].withdraw()
        self._idle.pop(self._decided, None)

    def postpone(self, seconds: float) -> None:
        """Take back the stall that was decided last until it has lasted for so long."""
        if self._decided in self._training:
            self._training[self._decided].postpone(seconds)

    def forget(self, task: int) -> None:
        """The task has ended."""
        for each in (self._training, self._idle, self._stalled, self._resumed):
            each.pop(task, None)

    def _observe_idle(self, one: Evidence) -> Decision:
        task = self._idle.setdefault(one.rank, _IdleTask())
        task.exchanged = task.traffic != one.traffic[:2]
        task.traffic = one.traffic[:2]
        if one.figures is None:
            return None
        if not one.figures.own.stopped or one.figures.traced:
            since, task.stopped_since = task.stopped_since, None
            was_reported, task.is_reported = task.is_reported, False
            return Resumed(one.at - since, (one.rank,)) if was_reported and since is not None else None
        if task.stopped_since is None:
            task.stopped_since = one.at
        limit = self.timeout or MIN_LIMIT
        if task.is_reported or one.at - task.stopped_since < limit:
            return None
        task.is_reported = True
        return Stalled(StallCode.TRAINING, (one.rank,), task.stopped_since, limit)

    def _note_idle_ends(self, task: int) -> None:
        """The task makes steps from now on."""
        idle = self._idle.pop(task, None)
        if idle is not None and idle.is_reported and self._stalled.pop(task, None) is None:
            self._resumed[task] = Resumed(0.0, (task,))


class Where(enum.Enum):
    """Where the main thread of a task is, by its stack."""

    SCRIPT = "script"
    TENSORFLOW = "tensorflow"
    HELD = "held"
    """It saves, serves others, or waits for what the launcher gives it: data, or to be let in."""
    UNKNOWN = "unknown"


_STANDARD = re.compile(r"/lib/python3\.\d+t?/(?!(?:site|dist)-packages/)|^<frozen |^<string>$")
_TENSORFLOW = re.compile(r"/tensorflow(?:_core|_estimator)?/python/|/(?:tf_)?keras/")
_LAUNCHER = re.compile(r"/tf_ps_runner/(?:data|worker|worker_path)/|/tf_ps_runner/hooks\.py:")
_HELD = re.compile(
    r"/tensorflow/python/(?:training/(?:saver|saving|server_lib)|checkpoint/|saved_model/)|/tf_ps_runner/worker/shards\.py:"
)
_DATA = re.compile(r"/tf_ps_runner/worker/shards\.py:")


def locate(stack: Stack | None) -> Where:
    """Where the main thread is: what its innermost call belongs to that is not of Python's library."""
    if stack is None or not stack.main:
        return Where.UNKNOWN
    in_data = any(_DATA.search(str(frame)) for thread in stack.threads for frame in thread.frames)
    if stack.is_below(_HELD) or in_data:
        return Where.HELD
    innermost = next((str(frame) for frame in stack.main if not _STANDARD.search(frame.file)), "")
    if _LAUNCHER.search(innermost):
        return Where.HELD
    return Where.TENSORFLOW if _TENSORFLOW.search(innermost) else Where.SCRIPT


def find_task_stall(
    task: int,
    suspects: Mapping[int, Suspect],
    roles: Mapping[int, Role],
    where: Where,
    *,
    others_progress: bool,
    is_learned: bool = True,
) -> Finding | None:
    """Which task of this node is the cause that `task` makes no progress; None if that is no stall.

    `suspects` and `roles` are of all tasks of this node, `where` is where the main thread of `task` is. Without
    `is_learned` a finding needs no longer time, because the user has set the limit.
    """
    found = _find_cause(task, suspects, roles, where, others_progress)
    if found is None:
        return None
    code, guilty = found
    min_quiet = _MIN_QUIET.get(code, 0.0) if is_learned else 0.0
    return Finding(code, guilty, suspects[task].user_line if guilty == (task,) else None, min_quiet=min_quiet)


def _find_cause(
    task: int, suspects: Mapping[int, Suspect], roles: Mapping[int, Role], where: Where, others_progress: bool
) -> tuple[GuiltCode, tuple[int, ...]] | None:
    own = suspects[task]
    if own.state == "T":
        return GuiltCode.STOPPED, (task,)
    if own.state == "D":
        return GuiltCode.BLOCKED_IN_KERNEL, (task,)
    if where is Where.SCRIPT:
        return _code_in_script(own), (task,)
    stopped = tuple(
        number for number, one in suspects.items() if one.state == "T" and _may_wait(roles[task], roles[number])
    )
    if stopped:
        return GuiltCode.STOPPED, stopped
    if where is Where.HELD or own.busy:
        return None
    if own.unsent:
        return GuiltCode.NETWORK, (task,)
    if others_progress and where is Where.TENSORFLOW:
        return GuiltCode.BEHIND, (task,)
    return GuiltCode.UNNAMED, ()


def _may_wait(role: Role, other: Role) -> bool:
    """Whether a task of a role may wait for one of another role: workers do not wait for each other."""
    if ROLES[other].outlives_versions:
        return False
    return Role.CHIEF in (role, other) or not ROLES[other].ends_with_training


def _code_in_script(own: Suspect) -> GuiltCode:
    if own.lost_child:
        return GuiltCode.CHILD_LOST
    if own.busy:
        return GuiltCode.SPINNING
    return GuiltCode.LOCKED if own.place is Place.LOCK else GuiltCode.OUTSIDE


_MIN_QUIET = {
    **dict.fromkeys((GuiltCode.SPINNING, GuiltCode.LOCKED, GuiltCode.OUTSIDE, GuiltCode.NETWORK), SCRIPT_MIN_QUIET),
    **dict.fromkeys((GuiltCode.BEHIND, GuiltCode.UNNAMED), WAITING_MIN_QUIET),
}
