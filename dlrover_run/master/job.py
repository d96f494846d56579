"""One job: its coordinator, its journal, the connected nodes, and the last assignment sent to each.

Knows neither a clock nor a socket: times are passed in, and a node is reached through a `NodeConnection`. Reports
count at once; `step` then decides for all of them, stores the plan, and sends assignments only after that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from dlrover_run.coordination.assignment import EMPTY_VIEW, build_assignment, node_views
from dlrover_run.coordination.bounds import MAX_WHAT
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.history import JobHistory
from dlrover_run.coordination.model import (
    OVER,
    Assignment,
    NodeKey,
    NodePhase,
    NodeReport,
    NodeView,
    PlanPhase,
    Waiting,
)
from dlrover_run.coordination.programs import (
    describe_mixed_programs,
    describe_other_program,
    differs,
    is_full,
    job_program,
)
from dlrover_run.coordination.ranks import display_names
from dlrover_run.coordination.requests import OperatorRequest, RequestFailed, StackQuery
from dlrover_run.coordination.rules import MAX_NODES, RESULT_RETENTION, JobRules
from dlrover_run.coordination.status import JobStatus
from dlrover_run.coordination.validation import config_mismatch, validate_report, wrong_job_kind
from dlrover_run.coordination.waiting import WaitingThrottle
from dlrover_run.master.journal import Journal, JournalReplaced
from dlrover_run.rendezvous.failure_detector import FailureDetector
from dlrover_run.transport.messages import Refused, StacksFound, StacksWanted, Welcome, encode_rules
from dlrover_run.words.reasons import Reasons, sentence
from dlrover_run.words.text import counted

if TYPE_CHECKING:
    from dlrover_run.coordination.stacks import JobStacks, StackRequest
    from dlrover_run.master.stack_requests import StackRequests

STORE_RETRY = 1.0
"""Seconds between two attempts to write a journal after a failure. Until one succeeds, no new plan is sent."""


class RequestRefused(Exception):
    """The connection must end; `last_message` is the last message to the node."""

    def __init__(self, reason: str, retry: bool = False, over: bool = False, moved: str = "") -> None:
        super().__init__(reason)
        self.last_message = Refused(reason[:2000], retry, over, moved)


class NodeConnection(Protocol):
    """The connection to one node."""

    def send_assignment(self, assignment: Assignment) -> None:
        """Send an assignment; it replaces one that has not been sent yet."""

    def want_stacks(self, wanted: StacksWanted) -> None:
        """Ask for the stacks of the node's workers."""

    def send_notice(self, text: str) -> None:
        """Have the node print a line about the job, once."""

    def end(self, last_message: Refused | None) -> None:
        """End the connection after this message."""


@dataclass
class _ConnectedNode:
    connection: NodeConnection
    host: str
    sent: Assignment | None = None


class Job:
    """A job that a master coordinates. `log` writes one line to the master's log; `log_to_launcher` gets the lines
    about the job that the process that launched the master shows too.

    `plan_age` is how many seconds ago a plan that this master takes over was decided.

    `stepped_down` is the reason why this master no longer decides for the job, and `replaced` whether another master
    does.
    """

    def __init__(
        self,
        name: str,
        coordinator: Coordinator,
        journal: Journal | None,
        now: float,
        log: Callable[[str], None],
        log_to_launcher: Callable[[str], None] = lambda line: None,
        plan_age: float = 0.0,
    ) -> None:
        self.name = name
        self.history = JobHistory()
        self.stepped_down: str | None = None
        self.replaced = False
        self._coordinator = coordinator
        self._journal = journal
        self._log_line = log
        self._log_to_launcher = log_to_launcher
        self._nodes: dict[NodeKey, _ConnectedNode] = {}
        self._unanswered: set[NodeKey] = set()
        self._detector: FailureDetector[NodeKey] = FailureDetector(coordinator.rules.heartbeat_timeout)
        self._progress = WaitingThrottle(coordinator)
        self._stored = coordinator.plan
        self._retry_at: float | None = None
        self._write_error = ""
        self._stored_views: dict[NodeKey, NodeView] = {}
        self._over_at: float | None = None
        self._unaware: set[NodeKey] = set()
        self._left: set[NodeKey] = set()
        self._displaced: set[NodeKey] = set()
        self._stack_requests: StackRequests | None = None
        if coordinator.plan.phase in OVER:
            self._note_over(now - plan_age)

    @property
    def connected(self) -> int:
        return len(self._nodes)

    @property
    def over(self) -> bool:
        return self._over_at is not None

    @property
    def epoch(self) -> int:
        return self._coordinator.plan.epoch

    def join(self, connection: NodeConnection, report: NodeReport, rules: JobRules, now: float) -> Welcome:
        """Add a node. Raises RequestRefused."""
        self._validate(report, now)
        key, coordinator = report.key, self._coordinator
        if self.over and key not in self._unaware and not report.epoch:
            raise RequestRefused(
                f"the job {self.name!r} has just ended; its name is free again in a moment", retry=True
            )
        if (refusal := coordinator.refusal(key)) is not None:
            if report.epoch and len(self._displaced) < MAX_NODES:
                # It was a node of this job before another process took its node id, and is to learn how the job ends.
                self._displaced.add(key)
                if self.over:
                    self._unaware.add(key)
            raise RequestRefused(refusal, retry=True)
        program = job_program(coordinator.plan, coordinator.members)
        is_other = not report.epoch and key not in coordinator.members and differs(program, report.program)
        if is_other and is_full(coordinator.rules, coordinator.plan):
            raise RequestRefused(describe_other_program(self.name, program, report.program))
        self._displaced.discard(key)
        if len(coordinator.members) >= MAX_NODES and key not in coordinator.members:
            raise RequestRefused(f"the job has {MAX_NODES} nodes, and a master takes no more", retry=True)
        before = self._nodes.get(key)
        self._nodes[key] = _ConnectedNode(connection, report.host)
        if before is not None:
            before.connection.end(Refused("this node has opened another stream", retry=True))
        self._take(report, now)
        notices = [config_mismatch(coordinator.rules, rules)]
        if is_other:
            notices.insert(0, describe_mixed_programs(program, report.program))
        return Welcome(encode_rules(coordinator.rules), "; ".join(filter(None, notices))[:2000])

    def receive(self, connection: NodeConnection, report: NodeReport, now: float) -> bool:
        """Take a node's latest report; return whether `step` is needed. Raises RequestRefused."""
        self._validate(report, now)
        node = self._nodes.get(report.key)
        if node is None or node.connection is not connection:
            raise RequestRefused("a node may only report itself, and this is the report of another node")
        known = report.key in self._coordinator.members
        if not known and (refusal := self._coordinator.refusal(report.key)) is not None:
            # It has left or was lost, and another process has taken its node id since.
            raise RequestRefused(refusal, retry=True)
        is_due = self._take(report, now)
        if not is_due:
            self._send(report.key, node, now, is_answer=True)
        return is_due

    def disconnect(self, connection: NodeConnection, key: NodeKey, now: float) -> None:
        """Record that a node's stream has ended, unless another stream has replaced it."""
        node = self._nodes.get(key)
        if node is not None and node.connection is connection:
            self._remove(key, now)

    def compensate_stall(self, seconds: float, now: float) -> None:
        """Do not count that time against any node: this master was stalled."""
        self._detector.compensate_stall(seconds)
        self._coordinator.compensate_stall(seconds)
        if seconds >= self._coordinator.rules.lost_after:
            # Nodes may have given up this master.
            self._coordinator.extend_grace(now)

    def step(self, now: float) -> None:
        """Decide for all reports and for the time that has passed, and send the assignments that have changed."""
        members, limit = self._coordinator.members, self._coordinator.rules.heartbeat_timeout
        for key in self._detector.failed_peers(now):
            node = self._nodes[key]
            name = display_names(self._coordinator.plan, [members[key]])[0] if key in members else node.host
            self._log(f"no heartbeat from {name} for {limit:g} s")
            node.connection.end(Refused(f"no heartbeat from this node for {limit:g} s", retry=True))
            self._remove(key, now)
        try:
            changed = self._decide(now)
        except JournalReplaced as reason:
            self.replaced = True
            self._step_down(f"{reason}; this master no longer decides for the job")
            return
        while (line := self._coordinator.take_error()) is not None:
            self._notify_nodes(line)
        if self._coordinator.superseded:
            # Decisions of a later coordinator are not in our journal, so its content is outdated.
            self.delete()
            self._step_down("a node obeys a later master; this master starts again from the nodes' reports")
            return
        changed = self._progress.renew(now, len(self._nodes), at_once=changed) or changed
        for key in list(self._nodes) if changed else self._unanswered & self._nodes.keys():
            self._send(key, self._nodes[key], now, is_answer=key in self._unanswered)
        self._unanswered.clear()

    def wake_at(self) -> float | None:
        """When to `step` without a new report; None for never."""
        times = [self._detector.next_deadline()]
        if self._retry_at is not None:
            times.append(self._retry_at)
        elif self._over_at is None:
            times += [self._coordinator.wake_at(), self._progress.due]
        elif not self._nodes:
            times.append(self._over_at + RESULT_RETENTION)
        return min((time for time in times if time is not None), default=None)

    @property
    def activity_changes(self) -> int:
        """As `Coordinator.activity_changes`."""
        return self._coordinator.activity_changes

    @property
    def write_error(self) -> str:
        """Why the latest plan is not stored yet; empty if it is."""
        return "" if self._retry_at is None else self._write_error

    def request(self, request: OperatorRequest, now: float) -> Reasons:
        """Take a request of an operator, as `Coordinator.request`; `step` is needed. Raises RequestFailed."""
        if self.write_error:
            raise RequestFailed(f"{self.write_error}; nothing is changed until it can")
        answer = self._coordinator.request(request, now)
        self._log(str(request))
        return answer

    def status(self, now: float) -> JobStatus:
        """The status of the job for an operator."""
        return self._coordinator.status(self.name, now)

    def ask_for_stacks(self, query: StackQuery, on_done: Callable[[], None]) -> StackRequest:
        """Ask the nodes for stacks; `on_done` is called when all that are connected have answered. An `end_stacks`
        follows. Raises RequestFailed."""
        # Imported only here: a master that is not asked does not need them.
        from dlrover_run.coordination.stacks import nodes_to_ask
        from dlrover_run.master.stack_requests import StackRequests

        self._stack_requests = self._stack_requests or StackRequests()
        nodes = nodes_to_ask(self._coordinator.plan, self._coordinator.members, query)
        request = self._stack_requests.add(nodes, self._nodes.keys(), on_done)
        for key in request.waits_for:
            self._nodes[key].connection.want_stacks(StacksWanted(request.number, query.rank, query.logs))
        if not request.waits_for:
            on_done()
        return request

    def take_stacks(self, connection: NodeConnection, key: NodeKey, found: StacksFound) -> None:
        """Take a node's answer, which may come too late. One that has no stacks is ignored: no decision depends on it,
        and a node that trains must not end because of it."""
        node = self._nodes.get(key)
        if self._stack_requests is None or node is None or node.connection is not connection:
            return
        try:
            self._stack_requests.take(key, found)
        except (msgspec.MsgspecError, UnicodeError) as error:
            self._log(f"the answer of {node.host} is ignored: these are no stacks: {str(error)[:MAX_WHAT]}")

    def end_stacks(self, request: StackRequest) -> JobStacks:
        """What is known of the stacks now; later answers are ignored."""
        if self._stack_requests is not None:
            self._stack_requests.end(request)
        return request.result(self.name, self._coordinator.plan)

    def is_unneeded(self, now: float) -> bool:
        """Whether no node can need this job any more."""
        if self._nodes:
            return False
        if self._over_at is not None:
            return not self._unaware or now >= self._over_at + RESULT_RETENTION
        # Nothing was ever decided, and no node is left to wait for.
        return self._stored.key.number == 0 and not self._coordinator.members

    def delete(self) -> None:
        if self._journal is not None:
            self._journal.remove()

    def close(self, last_message: Refused) -> None:
        """End every stream and close the journal, which stays."""
        for node in list(self._nodes.values()):
            node.connection.end(last_message)
        self._nodes.clear()
        if self._journal is not None:
            self._journal.close()

    def _take(self, report: NodeReport, now: float) -> bool:
        self._detector.heartbeat(report.key, now)
        changed = self._coordinator.receive(report, now)
        if changed:
            self._progress.outdated = True
        if report.phase is NodePhase.LEFT:
            self._left.add(report.key)
            self._unaware.discard(report.key)
        if changed or self._nodes[report.key].sent is None:
            self._unanswered.add(report.key)
            return True
        return False

    def _remove(self, key: NodeKey, now: float) -> None:
        if self._stack_requests is not None:
            self._stack_requests.lose(key)
        del self._nodes[key]
        self._detector.remove(key)
        self._coordinator.disconnect(key, now)
        self._progress.outdated = True

    def _decide(self, now: float) -> bool:
        """Decide and store; return whether there is a new plan to send. Raises JournalReplaced."""
        changed = False
        if self._retry_at is not None:
            if now < self._retry_at or not self._store(now):
                return False
            changed = True
        while self._coordinator.advance(now):
            if not self._store(now):
                break
            changed = True
        return changed

    def _store(self, now: float) -> bool:
        """Make the coordinator's plan durable; return whether that worked. Until it does, the previous one holds."""
        plan = self._coordinator.plan
        if self._journal is not None:
            try:
                self._journal.append(plan)
                if self._journal.repaired:
                    self._log(f"another program had changed the journal {self._journal.path}: it was written anew")
            except OSError as error:
                if self._retry_at is None:
                    self._write_error = f"the master cannot write {self._journal.path}: {error.strerror}"[:MAX_WHAT]
                    self._notify_nodes(
                        f"{self._write_error}; no decision is made until it can, it retries every second"
                    )
                    self._stored_views = node_views(self._coordinator.policy, self._stored)
                self._retry_at = now + STORE_RETRY
                return False
        if self._retry_at is not None:
            self._retry_at = None
            self._log("the journal is written again")
        before, self._stored = self._stored, plan
        self.history.follow(before, plan)
        for line in self._coordinator.take_log_lines():
            self._log(line)
            self._log_to_launcher(line)
        self._left &= {member.key for member in plan.members}
        # Other changes of a plan are bookkeeping that no user needs to read.
        without_rounds = plan.policy is not None and not plan.policy.has_rounds
        is_new = (plan.key, plan.phase) != (before.key, before.phase)
        if is_new or (without_rounds and plan.reasons != before.reasons):
            if plan.phase is not PlanPhase.TRAINING:
                phase = "waiting for nodes" if plan.phase is PlanPhase.GATHERING else plan.phase.value
                self._log(f"{phase}: {plan.reason}")
            elif without_rounds:
                self._log(plan.reason)
            else:
                self._log(f"round {plan.key.number} with {counted(len(plan.members), 'node')}: {plan.reason}")
        if plan.phase in OVER:
            self._note_over(now)
        return True

    def _note_over(self, now: float) -> None:
        if self._over_at is None:
            self._over_at = now
        members = {member.key for member in self._stored.members if not member.done}
        self._unaware = (members | self._coordinator.members.keys() | self._displaced) - self._left

    def _send(self, key: NodeKey, node: _ConnectedNode, now: float, is_answer: bool) -> None:
        if self._retry_at is None:
            waits = self._coordinator.view(key).waits
            assignment = self._coordinator.assignment(key, self._progress.message(now) if waits else None)
        else:
            view = self._stored_views.get(key, EMPTY_VIEW)
            assignment = build_assignment(self._stored, view, Waiting(sentence(self._write_error)))
        if is_answer or assignment != node.sent:
            node.sent = assignment
            node.connection.send_assignment(assignment)

    def _validate(self, report: NodeReport, now: float) -> None:
        """Raise RequestRefused for a report that no node of this job can send."""
        coordinator = self._coordinator
        problem = wrong_job_kind(coordinator.rules, report)
        problem = problem or validate_report(report, coordinator.plan, coordinator.ranks(report.key))
        if problem:
            raise RequestRefused(problem)
        if dispute := coordinator.dispute_epoch(report, now):
            # Once the nodes that contradict it are gone, the report counts.
            raise RequestRefused(dispute, retry=True)

    def _log(self, text: str) -> None:
        self._log_line(f"job {self.name!r}: {text}")

    def _notify_nodes(self, text: str) -> None:
        """Log why nothing is decided, also on the consoles of the nodes: nobody may read the log of a master that runs
        elsewhere."""
        self._log(text)
        for node in self._nodes.values():
            node.connection.send_notice(text)

    def _step_down(self, reason: str) -> None:
        self.stepped_down = reason
        self._log(reason)
        self.close(Refused(reason, retry=True))
