"""The engine of a job with parameter servers: which node runs which task, in which version of the cluster.

Each step of a decision looks at the present state, never at what has just happened, and changes one thing; steps are
taken until nothing is left to change. So deciding twice on the same reports gives the same plan, and an end is charged
once: with its task it leaves the plan.

To add a role, see "To add a role" in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from dlrover_run.coordination.decision import Deadline, DeadlineReason, Decision, deadline_if, update_plan
from dlrover_run.coordination.engine import Accepted, Engine, phase_news
from dlrover_run.coordination.membership import Nodes
from dlrover_run.coordination.records.assignment import Waiting
from dlrover_run.coordination.records.plan import OVER, Plan, PlanPhase
from dlrover_run.coordination.records.report import NodeReport, ReportPart
from dlrover_run.coordination.records.requests import Action, OperatorRequest, RequestFailed
from dlrover_run.coordination.records.round import NodeKey, RankAssignment
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.recovery import connected_reports
from dlrover_run.coordination.rounds.requested_changes import drain, other_program
from dlrover_run.features.autoscale.rules import AutoscaleRules
from dlrover_run.words.reasons import new_reasons, render
from tf_ps_runner.cluster import recovery, text
from tf_ps_runner.cluster.autoscaling import choose, excuse, report_interval
from tf_ps_runner.cluster.choice import ReplicaChoice
from tf_ps_runner.cluster.failures import (
    end_job,
    fill,
    lose_servers,
    move_from_leaving,
    replace_others,
    run_short,
)
from tf_ps_runner.cluster.model import Cluster, PlannedTask, Role, ScaleRequest, Stage
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.cluster.placement import most_ranks
from tf_ps_runner.cluster.reports import NodeTasks
from tf_ps_runner.cluster.reshape import LEAVING_STAGES, conclude, reshape
from tf_ps_runner.cluster.rules import ROLES, ClusterRules
from tf_ps_runner.cluster.scaling import bound_servers, scale
from tf_ps_runner.cluster.text import ClusterCode
from tf_ps_runner.cluster.versions import (
    gather,
    gather_deadlines,
    gather_text,
    leftover_deadline,
    note_ports,
    open_gate,
)
from tf_ps_runner.cluster.view import ClusterView, host_of, tasks_of

MAX_STEPS = 500
"""Steps of one decision: each handles something that happened to one task, and looks at all tasks. What is left after
that is decided at once in the next decision, so that heartbeats are read in between when thousands of tasks end."""

Step = Callable[[ClusterView, Plan, Cluster], Plan | None]
"""One rule: the plan that follows, the same plan to wait and to take no later step, None when it does not apply."""

STEPS: tuple[Step, ...] = (
    bound_servers,
    end_job,
    choose,
    conclude,
    lose_servers,
    excuse,
    replace_others,
    move_from_leaving,
    reshape,
    fill,
    run_short,
    note_ports,
    open_gate,
)
"""The rules of a version that runs, in the order in which they are tried."""

GATHERING: tuple[Step, ...] = (gather,)
"""The rules while no version runs."""

OPEN_STAGES = frozenset({Stage.TRAINING, Stage.CHANGING, Stage.ENDING})
"""The stages in which workers are let in, or may stay."""


class ClusterEngine(Engine):
    """Decides for a job with parameter servers, which has no rounds."""

    has_successors = False

    def __init__(self, rules: JobRules) -> None:
        self.rules = rules

    def decide(self, plan: Plan, nodes: Nodes, now: float) -> Decision:
        """The plan that follows from `plan` once the nodes are as in `nodes` at job time `now`; `plan` itself when
        nothing changes."""
        view = ClusterView(self.rules, nodes, now)
        # The nodes as they are now, for what is shown of the decision later.
        shown = ClusterView(self.rules, dict(nodes), now)
        before = plan
        passed: list[str] = []
        for _ in range(MAX_STEPS):
            following = _step(view, plan)
            if following is plan:
                return Decision(plan, _deadlines(view, plan), tuple(passed), partial(self._wait, plan, shown))
            if plan is not before and following.reasons[: len(plan.reasons)] != plan.reasons:
                # Another reason replaces it before anyone could read it.
                passed.append(render(new_reasons(before.reasons, plan.reasons)))
            plan = following
        again_at = (Deadline(now, DeadlineReason.FEATURE),)
        return Decision(plan, again_at, tuple(passed), partial(self._wait, plan, shown))

    def is_full(self, base: JobRules, plan: Plan, offers: Sequence[ReportPart]) -> bool:
        """Whether each role has as many tasks as the job may have. A node with these `offers` may have room for a role
        that only a node asks for, such as an evaluator."""
        if plan.phase is not PlanPhase.TRAINING:
            return False
        limits, cluster = ClusterRules.get(self.rules.parts), Cluster.get(plan.parts)
        offered = {slot.role for slot in NodeTasks.get(offers).capacity if slot.slots}
        return all(
            len(tasks_of(cluster, role)) >= len(most_ranks(limits, cluster, role))
            and (role not in offered or limits.replicas(role)[1] > 0)
            for role in ROLES
        )

    def _wait(self, plan: Plan, view: ClusterView, deadlines: Sequence[Deadline], now: float) -> Waiting:
        """What a node without tasks waits for: which nodes are here, for what there are too few slots, and for how
        long."""
        cluster = _cluster(view, plan)
        if plan.phase is PlanPhase.TRAINING:
            return Waiting((ClusterCode.ENDING(),) if cluster.stage is Stage.ENDING else text.training(cluster))
        reasons, until = gather_text(view, plan, cluster)
        return Waiting(reasons, None if until is None else max(0.0, until - now))

    def ranks(self, plan: Plan) -> Mapping[NodeKey, RankAssignment]:
        return {}

    def orders(self, plan: Plan, ranks: Mapping[NodeKey, RankAssignment]) -> Mapping[NodeKey, NodeOrder]:
        """The order of each node that hosts a task, or that has an earlier one to end; a node without an order hosts
        nothing, and ends whatever it hosts besides its order. There are no orders once the job is over."""
        cluster = Cluster.find(plan.parts)
        if cluster is None or plan.phase in OVER:
            return {}
        interval = report_interval(AutoscaleRules.get(self.rules.parts), cluster)
        common = msgspec.structs.replace(_common_order(cluster), report_interval=interval)
        by_node: dict[NodeKey, list[PlannedTask]] = {member.key: [] for member in plan.members}
        for task in (*cluster.tasks, *cluster.next_servers):
            by_node.setdefault(host_of(task), []).append(task)
        return {
            key: msgspec.structs.replace(common, tasks=tuple(sorted(tasks, key=lambda task: task.key)))
            for key, tasks in by_node.items()
        }

    def request(self, base: JobRules, plan: Plan, nodes: Nodes, request: OperatorRequest, now: float) -> Accepted:
        if request.action is not Action.SCALE:
            # The steps move their tasks.
            return Accepted(drain(plan, nodes, request, (), now))
        if not isinstance(request.part, ScaleRequest):
            raise RequestFailed(other_program(base))
        return scale(ClusterView(self.rules, nodes, now), plan, request.part, request.by or "an operator")

    def problem(self, report: NodeReport, assigned: RankAssignment | None) -> str | None:
        # It has neither workers with ranks nor their failures.
        return None

    def news(self, before: Plan, plan: Plan) -> str:
        if (plan.key, plan.phase, plan.reasons) == (before.key, before.phase, before.reasons):
            return ""
        return plan.reason if plan.phase is PlanPhase.TRAINING else phase_news(plan)

    def take_over(self, plan: Plan) -> Plan:
        return plan

    def continued(self, report: NodeReport) -> NodeOrder | None:
        """The order of a node with tasks until the cluster is known: to continue."""
        hint = NodeTasks.get(report.parts).hint
        return NodeOrder(version=hint.version, keep=True) if hint is not None and hint.assigned else None

    def recover(self, plan: Plan, nodes: Nodes, grace_over: bool, now: float) -> Plan | None:
        return recovery.recover_cluster(plan, connected_reports(nodes), grace_over, now)


ENGINE = ClusterEngine


def _step(view: ClusterView, plan: Plan) -> Plan:
    if plan.phase in OVER:
        return plan
    cluster = _cluster(view, plan)
    for step in GATHERING if _gathers(plan) else STEPS:
        following = step(view, plan, cluster)
        if following is plan:
            break
        if following is not None:
            return following
    # Only once all else is settled: a lost node is a member until its loss is dealt with.
    return _with_members(view, plan, cluster)


def _cluster(view: ClusterView, plan: Plan) -> Cluster:
    """The cluster of the plan, or the one with which the job begins."""
    cluster = Cluster.get(plan.parts)
    if cluster.choice is None and view.autoscale.applies:
        return msgspec.structs.replace(cluster, choice=ReplicaChoice())
    return cluster


def _gathers(plan: Plan) -> bool:
    return plan.phase is PlanPhase.GATHERING or Cluster.find(plan.parts) is None


def _deadlines(view: ClusterView, plan: Plan) -> tuple[Deadline, ...]:
    """When to decide again though no node has reported anything new."""
    if plan.phase in OVER:
        return ()
    cluster = _cluster(view, plan)
    if _gathers(plan):
        return gather_deadlines(view, plan, cluster)
    times = [view.ready_deadline(cluster, task) for task in (*cluster.tasks, *cluster.next_servers)]
    found = [
        one for time in (*times, leftover_deadline(view, cluster)) for one in deadline_if(time, DeadlineReason.FEATURE)
    ]
    if cluster.insufficient_since is not None:
        found.append(Deadline(cluster.insufficient_since + view.rules.pend_timeout, DeadlineReason.REPLACEMENT))
    found += deadline_if(cluster.until, DeadlineReason.FEATURE)
    found += deadline_if(view.pending_reconnect(plan), DeadlineReason.LOST)
    return tuple(deadline for deadline in found if deadline.at > view.now)


def _with_members(view: ClusterView, plan: Plan, cluster: Cluster) -> Plan:
    """The plan that names the nodes which host its tasks, and those with earlier tasks to end: a coordinator that takes
    over waits for these."""
    hosts = dict.fromkeys(host_of(task) for task in (*cluster.tasks, *cluster.next_servers))
    hosts.update((key, None) for key, _ in view.leftover_tasks(plan, cluster))
    known = {member.key for member in plan.members}
    kept = [member for member in plan.members if member.key in hosts]
    new = [view.nodes[key].report.member for key in hosts if key not in known and key in view.nodes]
    members = (*kept, *sorted(new, key=lambda member: member.key))
    return plan if members == plan.members else update_plan(plan, view.now, members=members)


def _common_order(cluster: Cluster) -> NodeOrder:
    """The part of an order that all nodes receive alike."""
    known = cluster.ports_held_at is not None
    chief = next((task for task in cluster.tasks if known and task.role is Role.CHIEF), None)
    return NodeOrder(
        version=cluster.version,
        servers=_addresses(cluster.tasks, Role.PS) if known else (),
        next_servers=_addresses(cluster.next_servers, Role.PS) if cluster.next_ports_held_at is not None else (),
        chief=chief.endpoint if chief is not None and chief.port else "",
        workers=_addresses(cluster.tasks, Role.WORKER) if known else (),
        open=cluster.stage in OPEN_STAGES and cluster.opened_at is not None,
        pause=cluster.stage in LEAVING_STAGES,
        save=cluster.stage is Stage.SAVING,
        ending=cluster.stage is Stage.ENDING,
        hint=recovery.recovery_hint(cluster),
        queue_endpoint=chief.queue_endpoint if chief is not None else "",
        queue_key=chief.queue_key if chief is not None else "",
    )


def _addresses(tasks: Iterable[PlannedTask], role: Role) -> tuple[str, ...]:
    """HOST:PORT of each rank of the role, empty for a rank that has no task now, or whose port is not known yet."""
    found = {task.rank: task.endpoint if task.port else "" for task in tasks if task.role is role}
    return tuple(found.get(rank, "") for rank in range(max(found, default=-1) + 1))
