"""One job's coordinator: records which nodes are connected and since when, and calls `decide`.

Deterministic and without a clock, a socket or a thread. Its owner passes each report with the time at which it was
received, calls `advance` for the next plan, stores the plan, and only then sends it to nodes. The times passed in are
of one monotonic clock; the coordinator converts them to job time, which a successor on another machine can continue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dlrover_run.coordination.activities import Activities
from dlrover_run.coordination.decide import Job, decide
from dlrover_run.coordination.decision import Deadline, Wait, changed_by, update_plan
from dlrover_run.coordination.engine import Accepted
from dlrover_run.coordination.membership import KnownNodes, Nodes
from dlrover_run.coordination.node_views import (
    EMPTY_VIEW,
    affects_nodes,
    build_assignment,
    choose_successors,
    continued_assignment,
    node_views,
    with_peers,
)
from dlrover_run.coordination.records.assignment import Assignment, NodeView, Waiting
from dlrover_run.coordination.records.plan import OVER, Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport, ReportPart
from dlrover_run.coordination.records.requests import (
    JUST_BEGUN,
    Action,
    OperatorRequest,
    RequestFailed,
)
from dlrover_run.coordination.records.round import (
    NodeKey,
    RankAssignment,
    RoundKey,
)
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.quorum import LostMaster, with_quorum
from dlrover_run.coordination.rounds.recovery import latest_round
from dlrover_run.coordination.rounds.requested_changes import stop
from dlrover_run.features.registry import job_of
from dlrover_run.words.reasons import Reasons, sentence

if TYPE_CHECKING:
    from dlrover_run.job_status.status import JobStatus

RETURN_GRACE = 6.0
"""Seconds that nodes have to reconnect to a coordinator that takes over, or that was stalled for longer than
`lost_after`, before any of them is declared lost.

An agent tries to reach its coordinator at least every 3 s; this is twice that.
"""

RETURNS_PER_SECOND = 200
"""Nodes that reconnect to a master in a second: half of what was measured with TLS. In a large job the last ones need
more than RETURN_GRACE, and get it."""


def grace_for(nodes: int) -> float:
    """Seconds that this number of nodes has to reconnect."""
    return RETURN_GRACE + nodes / RETURNS_PER_SECOND


WAKE_MARGIN = 0.001
"""Seconds after a deadline at which `wake_at` falls, so that rounding between two clocks never makes it too early."""

OWN_EPOCHS = 1 << 16
"""How many epochs a coordinator may skip when it has to be later than one that a node reports.

Two coordinators that receive the same epoch must not choose the same one, so how far each skips depends on its own.
"""


class Coordinator:
    """Decides for one job. `plan` is its predecessor's last, for a coordinator that takes over; `return_grace` is how
    many seconds the members of that plan have to connect, by default `grace_for` them. `names_successors`: the nodes
    may start the next master. `lost` is for a successor on another machine what is known of the master before it.

    An exception in a decision leaves everything as it was, but for the requests, which are dropped; see `Driver`, which
    sets `problem` to its text while it lasts, for the nodes that wait.

    `superseded` becomes true when a node obeys a later coordinator: this one was stalled, and decides no more.
    With `shows_changes` the lines for the log say of each decision which feature, or the engine, has changed what.
    """

    def __init__(
        self,
        rules: JobRules,
        now: float,
        epoch: int = 0,
        plan: Plan | None = None,
        return_grace: float | None = None,
        names_successors: bool = False,
        lost: LostMaster | None = None,
    ) -> None:
        before = plan or Plan()
        if plan is not None and epoch <= plan.epoch:
            raise ValueError(f"epoch {epoch} is not later than the plan's, {plan.epoch}")
        self.rules = rules
        self.superseded = False
        self.problem = ""
        self.shows_changes = False
        self.activities = Activities()
        self.job = job_of(rules.resized(before.desired, before.wanted_nodes))
        self.plan = self.job.engine.take_over(msgspec.structs.replace(before, epoch=epoch))
        self._origin = now - before.clock
        self._nodes = KnownNodes()
        self._names_successors = names_successors and self.job.engine.has_successors
        self._lost = lost
        self.plan = with_quorum(self.plan, rules, lost)
        self._other_view = EMPTY_VIEW
        self._views = node_views(self.job, self.plan)
        self._lines: list[str] = []
        self._requests: list[OperatorRequest] = []
        # Store the plan on the first `advance` even if it does not change, before it is sent to any node.
        self._is_new = self.plan.parts != before.parts
        self._deadlines: tuple[Deadline, ...] = ()
        self._wait: Wait | None = None
        self._wake_at: float | None = None
        self._advanced_at = before.clock
        self._recovering_until: float | None = None
        self._returning_until = before.clock
        grace = grace_for(len(before.members)) if return_grace is None else return_grace
        for member in before.members:
            if before.phase not in OVER and not member.done:
                self._nodes.expect(member, self.plan.clock, grace)
        done = {member.key for member in before.members if member.done}
        for node in () if before.phase in OVER else [node for part in before.parts for node in part.expected()]:
            if node.key not in self._nodes.states and node.key not in done:
                self._nodes.expect(node, self.plan.clock, grace, NodePhase.WAITING)

    @property
    def nodes(self) -> Nodes:
        return MappingProxyType(self._nodes.states)

    @property
    def recovering(self) -> bool:
        """Whether the plan of a running job is being rebuilt, so that each node keeps its assignment."""
        return self._recovering_until is not None

    def refusal(self, key: NodeKey) -> str | None:
        """Why this process cannot be a node of the job now, or None when it can.

        Of two processes with one node id the first one stays while its connection holds.
        """
        return self._nodes.refusal(key)

    def dispute_epoch(self, report: NodeReport, now: float) -> str | None:
        """Why a later coordinator, which that node reports to obey, is not believed to exist; None when it is, or when
        the node reports none.

        A successor has the nodes. So while another node obeys this coordinator, or may come back to it, this one has
        not been replaced, and the report of one node must not make it give up the job of the others. While it waits for
        lost nodes and can form no round, there is nothing to give up, and the node may be one that it waits for.
        """
        if report.epoch <= self.plan.epoch or self._is_fresh:
            return None
        time = self._job_time(now)
        if self.plan.phase is PlanPhase.GATHERING and time >= self.plan.since + grace_for(len(self._nodes.states)):
            return None
        member_keys = {member.key for member in self.plan.members if not member.done}
        for key, state in self._nodes.states.items():
            is_ours = key in member_keys or (state.connected and state.report.epoch > 0)
            if is_ours and key != report.key and not state.has_left and not state.is_lost(time):
                other = state.report.host
                return f"{report.host} obeys a later coordinator than the other nodes of the job, such as {other}"
        return None

    def receive(self, report: NodeReport, now: float) -> bool:
        """Take a node's latest report, which also shows that it is connected. Returns whether it had anything new that
        may be decided on."""
        time = self._job_time(now)
        if report.activity is not None or report.key in self.activities.by_node:
            self.activities.take(report.key, report.activity, time)
            report = msgspec.structs.replace(report, activity=None)
        known = self._nodes.states.get(report.key)
        if known is not None and known.report == report and known.connected:
            return False
        self._compare_epochs(report)
        if self._is_fresh:
            if not self._nodes.states:
                # The first node: from now on a node waits.
                self.plan = msgspec.structs.replace(self.plan, since=time)
            if self._recovering_until is None and latest_round(report) != RoundKey():
                # Of a round unknown to this coordinator: its predecessor's, whose journal is not there.
                self._recovering_until = time + grace_for(report.ranks.nodes if report.ranks else 0)
        self._nodes.take(report, time)
        return True

    def disconnect(self, key: NodeKey, now: float) -> None:
        """The node's connection has ended, or its heartbeats have: it is declared lost unless it reconnects in time."""
        time = self._job_time(now)
        self._nodes.disconnect(key, time, max(time + self.rules.lost_after, self._returning_until))

    def compensate_stall(self, late: float) -> None:
        """This coordinator was stalled for that many seconds, which count for no timeout: what was sent meanwhile is
        still to be received. Call it before anything that happened later."""
        self._origin += late

    def extend_grace(self, now: float) -> None:
        """Nodes may have been cut off, and be between two attempts to reconnect: for a while no node is lost."""
        self._returning_until = self._job_time(now) + grace_for(len(self._nodes.states))

    def advance(self, now: float) -> bool:
        """Decide; return whether the plan has changed, which must then be stored before it is sent to any node. The
        driver calls it; a test may."""
        time = self._job_time(now)
        self._advanced_at = time
        self._deadlines = ()
        self._wake_at = None
        if self.superseded:
            return False
        kept = (self.plan, self.job, self._is_new, self._recovering_until, self._views)
        try:
            return self._decide(time)
        except Exception:
            self.plan, self.job, self._is_new, self._recovering_until, self._views = kept
            # A request that cannot be carried out must not stand in the way of all later decisions.
            self._requests = []
            raise

    def rehearse(self, now: float) -> None:
        """Make everything that is made from the plan, and raise what that raises; see `take_over.misfit`."""
        time = self._job_time(now)
        self._decide(time)
        self._views = with_peers(node_views(self.job, self.plan), self._nodes.states)
        for key in self._nodes.states:
            self.assignment(key)
        self.status("", now)

    def compute_wait(self, now: float) -> None:
        """Compute what the job waits for, and decide nothing: for a program that has only read the records."""
        decision = decide(self._resized_job(self.plan), self.plan, self._nodes.states, self._job_time(now))
        self._deadlines, self._wait = decision.deadlines, decision.wait

    def _resized_job(self, plan: Plan) -> Job:
        """The job with the size that the plan asks for."""
        rules = self.rules.resized(plan.desired, plan.wanted_nodes)
        return self.job if rules == self.job.rules else job_of(rules)

    def _decide(self, time: float) -> bool:
        before, is_new = self.plan, self._is_new
        self._is_new = False
        if self._recovering_until is None or self._recover(time):
            recovered, plan, self._requests = self.plan, self._requested(time), []
            self.job = self._resized_job(plan)
            decision = decide(self.job, plan, self._nodes.states, time)
            self.plan, self._deadlines, self._wait = decision.plan, decision.deadlines, decision.wait
            self._wake_at = decision.wake_at
            self._lines += decision.log_lines
            if self.shows_changes:
                begun = changed_by("recovery", before, recovered) + changed_by("a request", recovered, plan)
                self._lines += (f"debug: {change}" for change in begun + decision.changes)
            self._forget(time)
        if self.plan is before and not is_new:
            return False
        if affects_nodes(before, self.plan):
            self._views = with_peers(node_views(self.job, self.plan), self._nodes.states)
            if self._names_successors:
                successors = choose_successors(self.plan, self._nodes.states)
                self._views = {key: replace(view, successors=successors) for key, view in self._views.items()}
                self._other_view = replace(EMPTY_VIEW, successors=successors)
        # What was just decided may call for more, such as a deadline that is known only now.
        self._wake_at = time
        return True

    def wake_at(self) -> float | None:
        """The time, of the caller's clock, at which to `advance` though no report was received; None for never."""
        if self.superseded:
            return None
        times = [
            state.lost_at
            for state in self._nodes.states.values()
            if state.lost_at is not None and state.lost_at > self._advanced_at
        ]
        times += [time for time in (self._wake_at, self._recovering_until) if time is not None]
        return min(times) + self._origin + WAKE_MARGIN if times else None

    def take_log_lines(self) -> list[str]:
        """The lines for the log, each once; to be written when the plan is stored."""
        lines, self._lines = self._lines, []
        return lines

    def view(self, key: NodeKey) -> NodeView:
        """What of the plan concerns this node alone."""
        return self._views.get(key, self._other_view)

    def ranks(self, key: NodeKey) -> RankAssignment | None:
        return self.view(key).ranks

    def assignment(self, key: NodeKey, waiting: Waiting | None = None) -> Assignment:
        """What the plan asks of a node; `waiting` is for those that wait.

        While the plan of a running job is being rebuilt, each node keeps its assignment.
        """
        if self._recovering_until is not None and key in self._nodes.states:
            return continued_assignment(self.job, self.plan, self._nodes.states[key].report, waiting)
        return build_assignment(self.plan, self.view(key), waiting)

    def is_full(self, offers: Sequence[ReportPart] = ()) -> bool:
        """Whether a node that comes with these `offers` would wait as a spare."""
        return self.job.engine.is_full(self.rules, self.plan, offers)

    def waiting(self, now: float) -> Waiting:
        if self.problem:
            return Waiting(sentence(self.problem))
        waiting = None if self._wait is None else self._wait(self._deadlines, self._job_time(now))
        return waiting or Waiting(self.plan.reasons)

    def request(self, request: OperatorRequest, now: float) -> Reasons:
        """Take a request of an operator, which the next `advance` carries out; what the job does then. Raises
        RequestFailed."""
        if self._recovering_until is not None or self.superseded:
            raise RequestFailed(JUST_BEGUN)
        time = self._job_time(now)
        accepted = self._apply(request, self._requested(time), time)
        self._requests.append(request)
        return accepted.answer

    def status(self, name: str, now: float, *, aged: bool = True) -> JobStatus:
        """The status of the job of that name for an operator; see `JobView` for `aged`."""
        # Imported only here: a launch does not wait for it.
        from dlrover_run.job_status.status import JobView, job_status

        time = self._job_time(now)
        views = {key: self.view(key) for key in self._nodes.states}
        waiting = None if self.plan.phase in OVER else self.waiting(now)
        activities, past = self.activities.by_node, self.activities.past_times
        return job_status(
            JobView(name, self.rules, self.plan, self.nodes, views, waiting, time, aged, activities, past)
        )

    def _requested(self, time: float) -> Plan:
        """The plan after the requests that have been taken since the last decision."""
        plan = self.plan
        for request in self._requests:
            # What was possible when it was taken may not be any more, after a change of the nodes.
            with contextlib.suppress(RequestFailed):
                plan = self._apply(request, plan, time).plan
        return plan

    def _apply(self, request: OperatorRequest, plan: Plan, time: float) -> Accepted:
        if request.action is Action.STOP or plan.phase in OVER:
            return Accepted(stop(plan, request, time))
        return self.job.engine.request(self.rules, plan, self._nodes.states, request, time)

    @property
    def _is_fresh(self) -> bool:
        return self.plan.key == RoundKey()

    def _compare_epochs(self, report: NodeReport) -> None:
        if report.epoch <= self.plan.epoch:
            return
        if self._is_fresh:
            # This coordinator is the later one, whatever the clock that its epoch came from; or it was stalled, and
            # finds that a successor has the journal when it stores this.
            self._is_new = True
            self.plan = msgspec.structs.replace(self.plan, epoch=report.epoch + 1 + self.plan.epoch % OWN_EPOCHS)
        else:
            self.superseded = True

    def _job_time(self, now: float) -> float:
        return now - self._origin

    def _recover(self, time: float) -> bool:
        """Make the plan of a running job from what its nodes report; return whether it is settled."""
        assert self._recovering_until is not None
        grace_over = time >= self._recovering_until
        plan = self.job.engine.recover(self.plan, self._nodes.states, grace_over, time)
        if plan is None and not grace_over:
            return False
        self._recovering_until = None
        if plan is not None:
            plan = with_quorum(self._recovered_parts(plan), self.rules, self._lost)
            self.plan = msgspec.structs.replace(plan, since=time, clock=time)
        return True

    def _recovered_parts(self, plan: Plan) -> Plan:
        for observer in self.job.observers.values():
            plan = update_plan(plan, plan.clock, part=observer.recovered(plan, self._nodes.states))
        return plan

    def _forget(self, time: float) -> None:
        """Drop nodes that are gone, except a member whose round goes on: the time at which it was lost shows why the
        workers of other nodes failed."""
        lost_or_left = [key for key, state in self._nodes.states.items() if state.is_lost(time) or state.has_left]
        needed: set[NodeKey] = set()
        if lost_or_left and self.plan.phase is PlanPhase.TRAINING:
            needed = {member.key for member in self.plan.members if not member.done}
        for key in lost_or_left:
            if key not in needed:
                self._nodes.forget(key)
                self.activities.forget(key)
