"""One job: its coordinator, its journal, the connected nodes, and the last assignment sent to each.

Knows neither a clock nor a socket: times are passed in, and a node is reached through a `NodeConnection`. Reports
count at once; `settle` then decides for all of them, stores the plan, and sends assignments only after that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dlrover_run.coordination.assignment import NodeView, build_assignment, node_views, view_of
from dlrover_run.coordination.bounds import MAX_WHAT
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.model import (
    OVER,
    Assignment,
    NodeKey,
    NodePhase,
    NodeReport,
    PlanPhase,
    Waiting,
)
from dlrover_run.coordination.ranks import display_names
from dlrover_run.coordination.reasons import sentence
from dlrover_run.coordination.rules import MAX_NODES, RESULT_RETENTION, JobRules
from dlrover_run.coordination.text import counted
from dlrover_run.coordination.validation import config_mismatch, validate_report, wrong_job_kind
from dlrover_run.coordination.waiting_throttle import WaitingThrottle
from dlrover_run.master.handshake import RequestRefused
from dlrover_run.master.journal import Journal, JournalReplaced
from dlrover_run.rendezvous.failure_detector import FailureDetector
from dlrover_run.transport.messages import Refused, Welcome, encode_rules

STORE_RETRY = 1.0
"""Seconds between two attempts to write a journal after a failure. Until one succeeds, no new plan is sent."""


class NodeConnection(Protocol):
    """The connection to one node."""

    def tell(self, wanted: Assignment) -> None:
        """Send an assignment; it replaces one that has not been sent yet."""
        ...

    def end(self, last_word: Refused | None) -> None:
        """End the connection after this message."""
        ...


@dataclass
class _Node:
    line: NodeConnection
    host: str
    told: Assignment | None = None


class Job:
    """A job that a master coordinates. `say` prints one line for the person who runs the master, and `report` has those
    about the job that are for whoever started it too.

    `stepped_down` says why this master decides no more for the job, and `replaced` whether that is because another one
    does.
    """

    def __init__(
        self,
        name: str,
        coordinator: Coordinator,
        journal: Journal | None,
        now: float,
        say: Callable[[str], None],
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.name = name
        self.stepped_down: str | None = None
        self.replaced = False
        self._coordinator = coordinator
        self._journal = journal
        self._say_line = say
        self._report = report
        self._nodes: dict[NodeKey, _Node] = {}
        self._owed: set[NodeKey] = set()
        self._detector: FailureDetector[NodeKey] = FailureDetector(coordinator.rules.heartbeat_timeout)
        self._progress = WaitingThrottle(coordinator)
        self._stored = coordinator.plan
        self._retry_at: float | None = None
        self._held_back = ""
        self._stored_parts: dict[NodeKey, NodeView] = {}
        self._over_at: float | None = None
        self._unaware: set[NodeKey] = set()
        self._left: set[NodeKey] = set()
        if coordinator.plan.phase in OVER:
            self._conclude(now)

    @property
    def lines(self) -> int:
        """How many nodes are connected."""
        return len(self._nodes)

    @property
    def over(self) -> bool:
        """Whether the job has ended, well or not."""
        return self._over_at is not None

    def admit(self, line: NodeConnection, status: NodeReport, rules: JobRules, now: float) -> Welcome:
        """Take a node in. Raises RequestRefused."""
        self._check(status, now)
        key = status.key
        present = self._coordinator.members
        if self.over and key not in self._unaware and not status.epoch:
            raise RequestRefused(
                f"the job {self.name!r} has just ended; its name is free again in a moment", retry=True
            )
        refusal = self._coordinator.refusal(key)
        if refusal is not None:
            raise RequestRefused(refusal, retry=True)
        if len(present) >= MAX_NODES and key not in present:
            raise RequestRefused(f"the job has {MAX_NODES} nodes, and a master takes no more", retry=True)
        before = self._nodes.get(key)
        self._nodes[key] = _Node(line, status.host)
        if before is not None:
            before.line.end(Refused("this node has opened another stream", retry=True))
        self._take(status, now)
        visits = status.cluster is not None and status.cluster.is_client
        notice = "" if visits else config_mismatch(self._coordinator.rules, rules)
        return Welcome(encode_rules(self._coordinator.rules), notice)

    def hear(self, line: NodeConnection, status: NodeReport, now: float) -> bool:
        """Take a node's latest status; whether there is something to settle. Raises RequestRefused."""
        self._check(status, now)
        node = self._nodes.get(status.key)
        if node is None or node.line is not line:
            raise RequestRefused("a node may only report itself, and this status is another one's")
        if self._take(status, now):
            return True
        self._tell(status.key, node, now, answer=True)
        return False

    def part(self, line: NodeConnection, key: NodeKey, now: float) -> None:
        """A node's stream has ended; one that another stream has replaced changes nothing."""
        node = self._nodes.get(key)
        if node is not None and node.line is line:
            self._disconnect(key, now)

    def excuse(self, late: float, now: float) -> None:
        """The master was late by that many seconds, and lays them to nobody's charge."""
        self._detector.compensate_stall(late)
        self._coordinator.compensate_stall(late)
        if late >= self._coordinator.rules.lost_after:
            # Nodes may have given up this master.
            self._coordinator.extend_grace(now)

    def settle(self, now: float) -> None:
        """Decide for all reports and for the time that has passed, and send the assignments that have changed."""
        present = self._coordinator.members
        for key in self._detector.failed_peers(now):
            limit = self._coordinator.rules.heartbeat_timeout
            name = display_names(self._coordinator.plan, [present[key]])[0] if key in present else self._nodes[key].host
            self._say(f"no sign of life from {name} for {limit:g} s")
            self._nodes[key].line.end(Refused(f"nothing was heard of this node for {limit:g} s", retry=True))
            self._disconnect(key, now)
        try:
            news = self._decide(now)
        except JournalReplaced as reason:
            self.replaced = True
            self._step_down(f"{reason}; this one decides no more for the job")
            return
        if self._coordinator.superseded:
            # Decisions of a later coordinator are not in our journal, so its content is outdated.
            if self._journal is not None:
                self._journal.remove()
            self._step_down("a node obeys a later master; this one begins anew with what the nodes say")
            return
        news = self._progress.renew(now, len(self._nodes), at_once=news) or news
        for key in list(self._nodes) if news else self._owed & self._nodes.keys():
            self._tell(key, self._nodes[key], now, answer=key in self._owed)
        self._owed.clear()

    def wake_at(self) -> float | None:
        """When to `settle` without a new report; None for never."""
        times = [self._detector.next_deadline()]
        if self._retry_at is not None:
            times.append(self._retry_at)
        elif self._over_at is None:
            times += [self._coordinator.wake_at(), self._progress.due]
        elif not self._nodes:
            times.append(self._over_at + RESULT_RETENTION)
        return min((time for time in times if time is not None), default=None)

    def forgettable(self, now: float) -> bool:
        """Whether no node can need this job any more."""
        if self._nodes:
            return False
        if self._over_at is not None:
            return not self._unaware or now >= self._over_at + RESULT_RETENTION
        # Nothing was ever decided, and no node is left to wait for.
        return self._stored.key.number == 0 and not self._coordinator.members

    def forget(self) -> None:
        """Leave nothing of the job behind."""
        if self._journal is not None:
            self._journal.remove()

    def close(self, last_word: Refused) -> None:
        """End every stream and let go of the journal, which stays."""
        for node in list(self._nodes.values()):
            node.line.end(last_word)
        self._nodes.clear()
        if self._journal is not None:
            self._journal.close()

    def _take(self, status: NodeReport, now: float) -> bool:
        first = self._nodes[status.key].told is None
        self._detector.heartbeat(status.key, now)
        news = self._coordinator.receive(status, now)
        if news:
            self._progress.outdated = True
        if status.phase is NodePhase.LEFT:
            self._left.add(status.key)
            self._unaware.discard(status.key)
        if news or first:
            self._owed.add(status.key)
        return news or first

    def _disconnect(self, key: NodeKey, now: float) -> None:
        del self._nodes[key]
        self._detector.remove(key)
        self._coordinator.disconnect(key, now)
        self._progress.outdated = True

    def _decide(self, now: float) -> bool:
        """Decide and store; whether there is a new plan to send. Raises JournalReplaced."""
        news = False
        if self._retry_at is not None:
            if now < self._retry_at or not self._store(now):
                return False
            news = True
        while self._coordinator.advance(now):
            if not self._store(now):
                break
            news = True
        return news

    def _store(self, now: float) -> bool:
        """Make the coordinator's plan durable; whether that worked. Until it does, the last one holds."""
        plan = self._coordinator.plan
        if self._journal is not None:
            try:
                self._journal.append(plan)
            except OSError as error:
                if self._retry_at is None:
                    self._held_back = f"the master cannot write {self._journal.path}: {error.strerror}"[:MAX_WHAT]
                    self._say(f"{self._held_back}; nothing is decided until it can, it tries again every second")
                    self._stored_parts = node_views(self._coordinator.rules, self._stored)
                self._retry_at = now + STORE_RETRY
                return False
        if self._retry_at is not None:
            self._retry_at = None
            self._say("the journal is written again")
        before, self._stored = self._stored, plan
        for line in self._coordinator.take_log_lines():
            self._say(line)
            self._report(line)
        self._left &= {member.key for member in plan.members}
        # Else the plan only keeps account of what has passed, which is no news for a person.
        if (plan.key, plan.phase) != (before.key, before.phase) or (plan.cluster and plan.reasons != before.reasons):
            self._announce()
        if plan.phase in OVER:
            self._conclude(now)
        return True

    def _announce(self) -> None:
        plan = self._stored
        if plan.phase is PlanPhase.TRAINING and plan.cluster is not None:
            self._say(plan.reason)
        elif plan.phase is PlanPhase.TRAINING:
            self._say(f"round {plan.key.number} with {counted(len(plan.members), 'node')}: {plan.reason}")
        elif plan.phase is PlanPhase.GATHERING:
            self._say(f"waits for nodes: {plan.reason}")
        else:
            self._say(f"{plan.phase.value}: {plan.reason}")

    def _conclude(self, now: float) -> None:
        self._over_at = now
        members = {member.key for member in self._stored.members if not member.done}
        self._unaware = (members | self._coordinator.members.keys()) - self._left

    def _tell(self, key: NodeKey, node: _Node, now: float, answer: bool) -> None:
        wanted = self._assignment(key, now)
        if answer or wanted != node.told:
            node.told = wanted
            node.line.tell(wanted)

    def _assignment(self, key: NodeKey, now: float) -> Assignment:
        if self._retry_at is None:
            waits = self._coordinator.view(key).waits
            return self._coordinator.assignment(key, self._progress.message(now) if waits else None)
        return build_assignment(
            self._stored,
            view_of(self._coordinator.rules, self._stored, self._stored_parts, key),
            Waiting(sentence(self._held_back)),
        )

    def _check(self, status: NodeReport, now: float) -> None:
        """Raise RequestRefused for a status that no node of this job can have."""
        coordinator = self._coordinator
        problem = wrong_job_kind(coordinator.rules, status)
        problem = problem or validate_report(status, coordinator.plan, coordinator.ranks(status.key))
        if problem:
            raise RequestRefused(problem)
        if doubt := self._coordinator.dispute_epoch(status, now):
            # Once those others are gone it is believed.
            raise RequestRefused(doubt, retry=True)

    def _say(self, text: str) -> None:
        self._say_line(f"job {self.name!r}: {text}")

    def _step_down(self, reason: str) -> None:
        self.stepped_down = reason
        self._say(reason)
        self.close(Refused(reason, retry=True))
