"""Coordination of a job with parameter servers: statuses go in, the next plan comes out.

Pure, as `dlrover_run.coordination.decide` is, which hands such jobs over. Each step looks at what is, never at what has
just happened, and changes one thing; they are taken until nothing is left to change. So deciding twice on the same
statuses gives the same plan, and an end is charged once: with its task it leaves the plan.
"""

from __future__ import annotations

from collections.abc import Callable

from dlrover_run.coordination.decision import Deadline, DeadlineReason, Decision, due
from dlrover_run.coordination.presence import Present
from dlrover_run.coordination.records import OVER, Plan, PlanPhase
from dlrover_run.coordination.rules import Rules
from dlrover_run.policies.parameter_servers import gathering
from dlrover_run.policies.parameter_servers.ending import end
from dlrover_run.policies.parameter_servers.failures import lose_servers, move_from_leaving, replace_others
from dlrover_run.policies.parameter_servers.keeping import fill, run_short, with_members
from dlrover_run.policies.parameter_servers.model import Cluster
from dlrover_run.policies.parameter_servers.opening import fence_deadline, let_in, note_ports
from dlrover_run.policies.parameter_servers.reshape import change, conclude
from dlrover_run.policies.parameter_servers.scaling import grant
from dlrover_run.policies.parameter_servers.tables import bound_servers
from dlrover_run.policies.parameter_servers.text import news
from dlrover_run.policies.parameter_servers.view import ClusterView

MOST_STEPS = 10_000
"""Steps of one decision: each takes up something that has happened to one task, so this is more than there ever are.
What would be left is decided on at once after that."""

Step = Callable[[ClusterView, Plan, Cluster], Plan | None]
"""One rule: the plan that follows, the same plan to wait and to take no later step, None when it has nothing to say."""

STEPS: tuple[Step, ...] = (
    bound_servers,
    end,
    conclude,
    lose_servers,
    replace_others,
    grant,
    move_from_leaving,
    change,
    fill,
    run_short,
    note_ports,
    let_in,
)
"""The rules of a version that runs, in the order in which they are asked."""


def decide(rules: Rules, plan: Plan, present: Present, now: float) -> Decision:
    """The plan that follows from `plan` once the nodes are as in `present` at job time `now`; `plan` itself when
    nothing has to change."""
    scene = ClusterView(rules, present, now)
    before, passed = plan, []
    for _ in range(MOST_STEPS):
        following = _step(scene, plan)
        if following is plan:
            break
        if plan is not before and not following.reason.startswith(plan.reason):
            # Another reason takes its place before anybody could read it.
            passed.append(news(before.reason, plan.reason))
        plan = following
    else:
        return Decision(plan, (Deadline(now, DeadlineReason.TASK),), tuple(passed))
    return Decision(plan, _deadlines(scene, plan), tuple(passed))


def _step(scene: ClusterView, plan: Plan) -> Plan:
    if plan.phase in OVER:
        return plan
    cluster = plan.cluster or Cluster()
    following = None
    if plan.phase is PlanPhase.GATHERING or plan.cluster is None:
        following = grant(scene, plan, cluster) or gathering.gather(scene, plan, cluster)
    else:
        for step in STEPS:
            following = step(scene, plan, cluster)
            if following is not None:
                break
    if following is None or following is plan:
        # Only once all else is settled: whoever was lost is a member until that is dealt with.
        return with_members(scene, plan, cluster)
    return following


def _deadlines(scene: ClusterView, plan: Plan) -> tuple[Deadline, ...]:
    """The times at which something falls due."""
    if plan.phase in OVER:
        return ()
    cluster = plan.cluster or Cluster()
    if plan.phase is PlanPhase.GATHERING or plan.cluster is None:
        return gathering.deadlines(scene, plan, cluster)
    times = [scene.deadline(cluster, task) for task in (*cluster.tasks, *cluster.next_servers)]
    found = [one for time in (*times, fence_deadline(scene, cluster)) for one in due(time, DeadlineReason.TASK)]
    if cluster.insufficient_since is not None:
        found.append(Deadline(cluster.insufficient_since + scene.rules.pend_timeout, DeadlineReason.REPLACEMENT))
    found += due(cluster.until, DeadlineReason.END)
    found += due(scene.broken(plan), DeadlineReason.LOST)
    return tuple(deadline for deadline in found if deadline.at > scene.now)
