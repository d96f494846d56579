"""Drives the coordinator of one job: what the master, the leader over a store and a node alone have in common.

Clock-free, as the coordinator is, and it writes nothing: its owner passes in what arrives, does what `turn` returns,
and says whether that could be stored. What the owner adds is a transport and a place for the plan: gRPC and a journal,
a key-value store, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Set
from dataclasses import dataclass, field

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.node_views import EMPTY_VIEW, build_assignment, node_views
from dlrover_run.coordination.records.assignment import Assignment, NodeView, Waiting
from dlrover_run.coordination.records.plan import OVER, Plan
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.requests import JUST_BEGUN, OperatorRequest, RequestFailed
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.rules import MAX_NODES
from dlrover_run.coordination.records.validation import validate_report, wrong_job_kind
from dlrover_run.coordination.waiting_throttle import WaitingThrottle
from dlrover_run.words.log_level import MAX_ERROR_TEXT, traceback_lines
from dlrover_run.words.reasons import Reasons, sentence

ERROR_RETRY = 5.0
"""Seconds from a decision that failed with an internal error to the next attempt; a new report leads to one at once."""

ERROR_MEMORY = 60.0
"""Seconds without an internal error after which the same one is logged again. What nodes wait for, or a report, is not
looked at in each turn."""

STORE_RETRY = 1.0
"""Seconds between two attempts to store a plan after a failure. Until one succeeds, no new plan is sent."""


@dataclass(frozen=True)
class Disconnected:
    """The node's connection has ended, or its heartbeats or its lease have."""

    key: NodeKey


@dataclass(frozen=True)
class Paused:
    """This process was stopped or starved for that many seconds, or could not reach the store: they count against no
    node. `cut_off`: the nodes may have given up this coordinator meanwhile, so for a while none is declared lost."""

    seconds: float
    cut_off: bool = False


@dataclass(frozen=True)
class Requested:
    """A request of an operator. `id` is the same for the same request, however often it is read."""

    id: Hashable
    request: OperatorRequest


Event = NodeReport | Disconnected | Paused | Requested


@dataclass(frozen=True)
class Answer:
    """What the job does after a request, or why it does not."""

    answer: Reasons = ()
    refusal: str = ""


@dataclass(frozen=True)
class Writes:
    """What to do now, in this order: store `plan` and call `Driver.written`; with `send`, send each node its assignment
    if that has changed; give the `answers`, and call `Driver.answered` for each. Nothing if it is empty."""

    plan: Plan | None = None
    send: bool = False
    answers: Mapping[Hashable, Answer] = field(default_factory=dict)


class Driver:
    """Drives `coordinator`. Nothing of a plan is handed out before the plan was `written`: assignments, answers and the
    lines for the log, which `log` gets; `log_error` gets those about internal errors, by default the same. With `debug`
    the lines also say who has changed what in each decision, and where an internal error was raised.

    `kept_together`: the assignments are kept where the plan is. Both are then handed out at once, for one transaction;
    and while the plan is recovered from the nodes' reports, the assignments that are kept hold.

    `begin` makes a coordinator without a plan, for the case that a node obeys a later one whose plan is not stored
    here. What is stored is then outdated, and the new coordinator recovers a plan from the nodes' reports. Without
    `begin` the driver stops deciding, and its owner checks `superseded`.

    An exception in a decision is a defect of ours, and ends neither a node nor a job: the last plan stays, a line says
    so once, and another decision is tried after ERROR_RETRY, or as soon as something arrives.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        log: Callable[[str], None],
        kept_together: bool = False,
        begin: Callable[[float], Coordinator] | None = None,
        log_error: Callable[[str], None] | None = None,
        debug: bool = False,
    ) -> None:
        self.stored = coordinator.plan
        self.write_error = ""
        self._log = log
        self._kept_together = kept_together
        self._begin = begin
        self._log_error = log_error or log
        self._debug = debug
        # Whether the plan is to be stored, and whether the assignments are to be sent.
        self._plan_due = self._send_due = False
        self._retry_at: float | None = None
        self._stored_views: Mapping[NodeKey, NodeView] = {}
        # The lines that were logged, until nothing has failed for ERROR_MEMORY.
        self._failed_at = -math.inf
        self._reported_errors: set[str] = set()
        self._error_retry_at: float | None = None
        self._untaken: dict[NodeKey, NodeReport] = {}
        self._answers: dict[Hashable, Answer] = {}
        # The requests of which nothing is decided yet.
        self._undecided: set[Hashable] = set()
        self._left: set[NodeKey] = set()
        self._displaced: set[NodeKey] = set()
        self._unaware: set[NodeKey] | None = None
        self._set_coordinator(coordinator)
        if self.is_over:
            self._note_over()

    @property
    def is_over(self) -> bool:
        """Whether the job is over, and that is stored."""
        return self.stored.phase in OVER

    @property
    def superseded(self) -> bool:
        """Whether a node obeys a later coordinator, so that nothing is decided here any more."""
        return self.coordinator.superseded

    @property
    def unaware(self) -> Set[NodeKey]:
        """The nodes that do not know the end of the job yet; none before the end."""
        return self._unaware or frozenset()

    @property
    def has_absent(self) -> bool:
        """Whether one of those is not connected, and may come back to learn the end."""
        nodes = self.coordinator.nodes
        return any(key not in nodes or not nodes[key].connected for key in self.unaware)

    def problem_of(self, report: NodeReport) -> str | None:
        """Why this report must not `arrive`: no node of this job can send it. None if one can."""
        coordinator = self.coordinator
        problem = wrong_job_kind(coordinator.rules, report) or validate_report(report, coordinator.plan)
        return problem or coordinator.job.engine.problem(report, coordinator.ranks(report.key))

    def displace(self, key: NodeKey) -> None:
        """A process that was a node of this job has lost its node id to another one, and may still come to learn how
        the job ends."""
        if len(self._displaced) < MAX_NODES:
            self._displaced.add(key)
            if self._unaware is not None:
                self._unaware.add(key)

    def arrive(self, event: Event, now: float) -> bool:
        """Take an event; return whether it is something new to decide on. Events arrive in their order, a pause before
        what was received after it. Of a request: whether it is accepted."""
        match event:
            case Paused(seconds, cut_off):
                self.coordinator.compensate_stall(seconds)
                if cut_off:
                    self.coordinator.extend_grace(now)
                return False
            case Disconnected(key):
                self._untaken.pop(key, None)
                self.coordinator.disconnect(key, now)
                self._throttle.outdated = True
                return True
            case Requested(id, request):
                return id not in self._answers and self._take_request(id, request, now)
            case _:
                return self._take_report(event, now)

    def turn(self, now: float) -> Writes:
        """Decide. Call it after events and at `wake_at`, and again after each plan, until it returns none."""
        if now > self._failed_at + ERROR_MEMORY:
            self._reported_errors.clear()
        self._error_retry_at = None
        is_due = self._plan_due and self._retry_at is not None and now >= self._retry_at
        if self._retry_at is None:
            self._decide(now)
            is_due = self._plan_due
        if is_due and not self._kept_together:
            return Writes(self.coordinator.plan)
        renewed = self._throttle.renew(now, len(self.coordinator.nodes), at_once=self._send_due)
        self._send_due = self._send_due or renewed
        if self._kept_together and self.coordinator.recovering:
            return Writes(answers=self._ready_answers())
        send, self._send_due = self._send_due, False
        if is_due and self.coordinator.plan.phase in OVER:
            self._note_over()
        return Writes(self.coordinator.plan if is_due else None, send, self._ready_answers())

    def written(self, now: float, problem: str = "") -> bool:
        """The plan of the last `turn` is stored; or it is not because of this problem, a clause, and until a later turn
        hands it out again the plan that was stored before holds. Return whether this outcome differs from the one
        before."""
        had_problem = bool(self.write_error)
        if problem:
            self._retry_at = now + STORE_RETRY
            if not had_problem:
                self.write_error = problem
                self._stored_views = node_views(self.coordinator.job, self.stored)
            return not had_problem
        self.write_error, self._retry_at = "", None
        self._plan_due = False
        self._send_due = self._send_due or not self._kept_together
        self.stored = self.coordinator.plan
        for line in self.coordinator.take_log_lines():
            self._log(line)
        self._left &= {member.key for member in self.stored.members}
        if self.is_over and not self._kept_together:
            self._note_over()
        return had_problem

    def rewrite(self) -> None:
        """What was written may not be there: hand out all of it at the next `turn`."""
        self._plan_due = self._send_due = self._throttle.outdated = True

    def answered(self, id: Hashable) -> None:
        """The request of this id has its answer, and does not arrive again."""
        self._answers.pop(id, None)

    def wake_at(self) -> float | None:
        """When to take a `turn` though nothing arrives; None for never."""
        if self._retry_at is not None:
            return self._retry_at
        if self.is_over:
            return None
        due = self.coordinator.wake_at() if self._error_retry_at is None else self._error_retry_at
        return min((time for time in (due, self._throttle.due) if time is not None), default=None)

    def waiting(self, now: float) -> Waiting:
        """What the nodes without ranks wait for, as of the last `turn`."""
        return self._throttle.message(now)

    def assignment(self, key: NodeKey, now: float) -> Assignment | None:
        """What the stored plan asks of a node; None if it keeps its last one because of an internal error."""
        try:
            if self.write_error:
                view = self._stored_views.get(key, EMPTY_VIEW)
                return build_assignment(self.stored, view, Waiting(sentence(self.write_error)))
            waits = self.coordinator.view(key).waits
            return self.coordinator.assignment(key, self.waiting(now) if waits else None)
        except Exception as error:
            self._note_error(error, now)
            self._send_due = True
            return None

    def _set_coordinator(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        coordinator.shows_changes = self._debug
        if self._debug:
            self._log(f"debug: {coordinator.job.order}")
        self._throttle = WaitingThrottle(self._compute_waiting)

    def _take_report(self, report: NodeReport, now: float) -> bool:
        self._displaced.discard(report.key)
        if report.phase is NodePhase.LEFT:
            self._left.add(report.key)
            if self._unaware is not None:
                self._unaware.discard(report.key)
        try:
            changed = self.coordinator.receive(report, now)
        except Exception as error:
            self._untaken[report.key] = report
            self._note_error(error, now)
            return True
        self._untaken.pop(report.key, None)
        self._throttle.outdated = self._throttle.outdated or changed
        return changed

    def _take_request(self, id: Hashable, request: OperatorRequest, now: float) -> bool:
        try:
            if self.write_error:
                raise RequestFailed(f"{self.write_error}; nothing is changed until it can")
            answer = Answer(self.coordinator.request(request, now))
        except RequestFailed as failed:
            answer = Answer(refusal=str(failed))
        except Exception as error:
            answer = Answer(refusal=self._note_error(error, now))
        else:
            self._undecided.add(id)
        self._answers[id] = answer
        return not answer.refusal

    def _ready_answers(self) -> dict[Hashable, Answer]:
        """The answers that may be given: what was agreed to is stored."""
        if not self._plan_due:
            return dict(self._answers)
        return {id: answer for id, answer in self._answers.items() if answer.refusal}

    def _decide(self, now: float) -> None:
        for report in tuple(self._untaken.values()):
            self._take_report(report, now)
        try:
            if self.superseded and self._begin is not None:
                self._begin_again(self._begin(now), now)
            changed = self.coordinator.advance(now)
        except Exception as error:
            line = self._note_error(error, now)
            # The coordinator drops them, so that they do not stand in the way of all later decisions.
            self._answers |= {id: Answer(refusal=line) for id in self._undecided}
        else:
            self.coordinator.problem = ""
            self._plan_due = self._plan_due or changed
            self._send_due = self._send_due or (changed and self._kept_together)
        self._undecided.clear()

    def _begin_again(self, coordinator: Coordinator, now: float) -> None:
        before = self.coordinator
        self._set_coordinator(coordinator)
        for state in before.nodes.values():
            if state.connected:
                coordinator.receive(state.report, now)
        self._answers = dict.fromkeys(self._answers, Answer(refusal=JUST_BEGUN))

    def _compute_waiting(self, now: float) -> Waiting:
        try:
            return self.coordinator.waiting(now)
        except Exception as error:
            return Waiting(sentence(self._note_error(error, now)))

    def _note_error(self, error: Exception, now: float) -> str:
        line = (
            f"internal error in a decision: {repr(error)[:MAX_ERROR_TEXT]}; the plan stays as it is, and another "
            "decision is tried soon; please report it"
        )
        self._failed_at, self._error_retry_at = now, now + ERROR_RETRY
        self.coordinator.problem = line
        if line not in self._reported_errors:
            self._reported_errors.add(line)
            self._log_error(f"warning: {line}")
            if self._debug:
                for traceback_line in traceback_lines(error):
                    self._log(traceback_line)
        return line

    def _note_over(self) -> None:
        members = {member.key for member in self.coordinator.plan.members if not member.done}
        self._unaware = (members | self.coordinator.nodes.keys() | self._displaced) - self._left
