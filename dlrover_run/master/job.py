"""One job of a master: its driver, its journal, the connected nodes with their heartbeats, and the last assignment sent
to each.

Knows neither a clock nor a socket: times are passed in, and a node is reached through a `NodeConnection`. Reports
count at once; `step` then does what the driver decides: it writes the journal and sends assignments, in this order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.driver import Answer, Disconnected, Driver, Paused, Requested
from dlrover_run.coordination.programs import (
    describe_mixed_programs,
    describe_other_program,
    differs,
    job_program,
)
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.bounds import MAX_WHAT
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.requests import OperatorRequest
from dlrover_run.coordination.records.round import NodeKey
from dlrover_run.coordination.records.rules import MAX_NODES, RESULT_RETENTION, JobRules
from dlrover_run.coordination.records.validation import config_mismatch
from dlrover_run.coordination.rounds.ranks import display_names
from dlrover_run.job_status.history import JobHistory
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.job_status.status import JobStatus
from dlrover_run.master.journal import Journal, JournalReplaced
from dlrover_run.rendezvous.failure_detector import FailureDetector
from dlrover_run.transport.messages import ReadStacks, Refused, StacksFound, Welcome, encode_rules
from dlrover_run.words.log_level import is_debug

if TYPE_CHECKING:
    from dlrover_run.job_status.stacks import JobStacks, StackRequest
    from dlrover_run.master.stack_requests import StackRequests


class RequestRefused(Exception):
    """The connection must end; `last_message` is the last message to the node."""

    def __init__(self, reason: str, retry: bool = False, over: bool = False, moved: str = "") -> None:
        super().__init__(reason)
        self.last_message = Refused(reason[:2000], retry, over, moved)


class NodeConnection(Protocol):
    """The connection to one node."""

    def send_assignment(self, assignment: Assignment) -> None:
        """Send an assignment; it replaces one that has not been sent yet."""

    def ask_for_stacks(self, message: ReadStacks) -> None:
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


class JobHost:
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
        self._journal = journal
        self._log_line = log
        self._log_to_launcher = log_to_launcher
        self._nodes: dict[NodeKey, _ConnectedNode] = {}
        # It logs at once, so what that takes comes first.
        self._driver = Driver(coordinator, self._log_to_all, log_error=self._notify_nodes, debug=is_debug(os.environ))
        self._unanswered: set[NodeKey] = set()
        self._detector: FailureDetector[NodeKey] = FailureDetector(coordinator.rules.heartbeat_timeout)
        self._over_at = now - plan_age if self._driver.is_over else None
        self._requests = 0
        # Of the last step.
        self._answers: Mapping[Hashable, Answer] = {}
        self._stack_requests: StackRequests | None = None

    @property
    def _coordinator(self) -> Coordinator:
        return self._driver.coordinator

    @property
    def connected(self) -> int:
        return len(self._nodes)

    @property
    def over(self) -> bool:
        return self._driver.is_over

    @property
    def epoch(self) -> int:
        return self._coordinator.plan.epoch

    def join(self, connection: NodeConnection, report: NodeReport, rules: JobRules, now: float) -> Welcome:
        """Add a node. Raises RequestRefused."""
        self._validate(report, now)
        key, coordinator = report.key, self._coordinator
        if self.over and key not in self._driver.unaware and not report.epoch:
            raise RequestRefused(
                f"the job {self.name!r} has just ended; its name is free again in a moment", retry=True
            )
        if (refusal := coordinator.refusal(key)) is not None:
            if report.epoch:
                self._driver.displace(key)
            raise RequestRefused(refusal, retry=True)
        program = job_program(coordinator.plan, coordinator.nodes)
        is_other = not report.epoch and key not in coordinator.nodes and differs(program, report.program)
        if is_other and coordinator.is_full(report.parts):
            raise RequestRefused(describe_other_program(self.name, program, report.program))
        if len(coordinator.nodes) >= MAX_NODES and key not in coordinator.nodes:
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
        known = report.key in self._coordinator.nodes
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
        # After a long one nodes may have given up this master.
        self._driver.arrive(Paused(seconds, cut_off=seconds >= self._coordinator.rules.lost_after), now)

    def step(self, now: float) -> None:
        """Decide for all reports and for the time that has passed, and send the assignments that have changed."""
        nodes, limit = self._coordinator.nodes, self._coordinator.rules.heartbeat_timeout
        for key in self._detector.failed_peers(now):
            node = self._nodes[key]
            name = display_names(self._coordinator.plan, [nodes[key]])[0] if key in nodes else node.host
            self._log(f"no heartbeat from {name} for {limit:g} s")
            node.connection.end(Refused(f"no heartbeat from this node for {limit:g} s", retry=True))
            self._remove(key, now)
        try:
            while (writes := self._driver.turn(now)).plan is not None:
                self._store(writes.plan, now)
        except JournalReplaced as reason:
            self.replaced = True
            self._step_down(f"{reason}; this master no longer decides for the job")
            return
        if self._driver.superseded:
            # Decisions of a later coordinator are not in our journal, so its content is outdated.
            self.delete()
            self._step_down("a node obeys a later master; this master starts again from the nodes' reports")
            return
        for key in list(self._nodes) if writes.send else self._unanswered & self._nodes.keys():
            self._send(key, self._nodes[key], now, is_answer=key in self._unanswered)
        self._unanswered.clear()
        self._answers = writes.answers
        for id in writes.answers:
            self._driver.answered(id)

    def wake_at(self) -> float | None:
        """When to `step` without a new report; None for never."""
        times = [self._detector.next_deadline(), self._driver.wake_at()]
        if self._over_at is not None and not self._nodes:
            times.append(self._over_at + RESULT_RETENTION)
        return min((time for time in times if time is not None), default=None)

    @property
    def activity_changes(self) -> int:
        """How often what nodes do has changed."""
        return self._coordinator.activities.changes

    @property
    def write_error(self) -> str:
        """Why the latest plan is not stored yet; empty if it is. `Jobs` asks when an operator's request waits for
        it."""
        return self._driver.write_error

    def request(self, request: OperatorRequest, now: float) -> int:
        """Take a request of an operator; return its number. `step` is needed, and then `answer` has the answer."""
        self._requests += 1
        if self._driver.arrive(Requested(self._requests, request), now):
            self._log(str(request))
        return self._requests

    def answer(self, number: int) -> Answer | None:
        """The answer to that request, if the last step has given it: what it changes is stored."""
        return self._answers.get(number)

    def status(self, now: float) -> JobStatus:
        """The status of the job for an operator."""
        return self._coordinator.status(self.name, now)

    def ask_for_stacks(self, query: StackQuery, on_done: Callable[[], None]) -> StackRequest:
        """Ask the nodes for stacks; `on_done` is called when all that are connected have answered. An `end_stacks`
        follows. Raises RequestFailed."""
        # Imported only here: a master that is not asked does not need them.
        from dlrover_run.job_status.stacks import nodes_to_ask
        from dlrover_run.master.stack_requests import StackRequests

        self._stack_requests = self._stack_requests or StackRequests()
        nodes = nodes_to_ask(self._coordinator.plan, self._coordinator.nodes, query)
        request = self._stack_requests.add(nodes, self._nodes.keys(), on_done)
        for key in request.waits_for:
            self._nodes[key].connection.ask_for_stacks(ReadStacks(request.number, query.rank, query.logs))
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
            return not self._driver.unaware or now >= self._over_at + RESULT_RETENTION
        # Nothing was ever decided, and no node is left to wait for.
        return self._driver.stored.key.number == 0 and not self._coordinator.nodes

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
        changed = self._driver.arrive(report, now)
        if changed or self._nodes[report.key].sent is None:
            self._unanswered.add(report.key)
            return True
        return False

    def _remove(self, key: NodeKey, now: float) -> None:
        if self._stack_requests is not None:
            self._stack_requests.lose(key)
        del self._nodes[key]
        self._detector.remove(key)
        self._driver.arrive(Disconnected(key), now)

    def _store(self, plan: Plan, now: float) -> None:
        """Make a plan durable. Until that works, the previous one holds. Raises JournalReplaced."""
        driver, before = self._driver, self._driver.stored
        if self._journal is not None:
            try:
                self._journal.append(plan)
                if self._journal.repaired:
                    self._log(f"another program had changed the journal {self._journal.path}: it was written anew")
            except OSError as error:
                problem = f"the master cannot write {self._journal.path}: {error.strerror}"[:MAX_WHAT]
                if driver.written(now, problem):
                    self._notify_nodes(f"{problem}; no decision is made until it can, it retries every second")
                return
        if driver.write_error:
            self._log("the journal is written again")
        driver.written(now)
        self.history.follow(before, plan)
        if news := driver.coordinator.job.engine.news(before, plan):
            self._log(news)
        if driver.is_over and self._over_at is None:
            self._over_at = now

    def _send(self, key: NodeKey, node: _ConnectedNode, now: float, is_answer: bool) -> None:
        assignment = self._driver.assignment(key, now)
        if assignment is not None and (is_answer or assignment != node.sent):
            node.sent = assignment
            node.connection.send_assignment(assignment)

    def _validate(self, report: NodeReport, now: float) -> None:
        """Raise RequestRefused for a report that no node of this job can send."""
        if problem := self._driver.problem_of(report):
            raise RequestRefused(problem)
        if dispute := self._coordinator.dispute_epoch(report, now):
            # Once the nodes that contradict it are gone, the report counts.
            raise RequestRefused(dispute, retry=True)

    def _log_to_all(self, line: str) -> None:
        self._log(line)
        self._log_to_launcher(line)

    def _log(self, text: str) -> None:
        self._log_line(f"job {self.name!r}: {text}")

    def _notify_nodes(self, text: str) -> None:
        """Log why nothing is decided, also on the consoles of the nodes: no person may read the log of a master that
        runs elsewhere."""
        self._log(text)
        for node in self._nodes.values():
            node.connection.send_notice(text)

    def _step_down(self, reason: str) -> None:
        self.stepped_down = reason
        self._log(reason)
        self.close(Refused(reason, retry=True))
