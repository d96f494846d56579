"""Before the first version, and when there is no room for the next one: who is here, and whether they are enough."""

from __future__ import annotations

from dlrover_run.coordination.decision import Deadline, DeadlineReason, changed, due
from dlrover_run.coordination.records import Plan, PlanPhase
from dlrover_run.coordination.words import counted, names
from dlrover_run.policies.parameter_servers.model import Cluster, Role
from dlrover_run.policies.parameter_servers.placement import rooms, wanted_servers, wanted_workers
from dlrover_run.policies.parameter_servers.versions import begin_version, shortage
from dlrover_run.policies.parameter_servers.view import ClusterView


def gather(scene: ClusterView, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan that follows while no version runs; None when nothing has to change now."""
    if all_have_left(scene):
        reason = "every node has left" if not cluster.version else f"{plan.reason}, and no node is here any more"
        return changed(plan, scene.now, phase=PlanPhase.FAILED, since=scene.now, reason=reason)
    if waits_for_nobody(scene, plan):
        return None
    short = shortage(scene, cluster)
    if short:
        if scene.now < deadline(scene, plan):
            return None
        reason = _short_of_nodes(scene, plan, short)
        return changed(plan, scene.now, phase=PlanPhase.FAILED, since=scene.now, reason=reason)
    complete = complete_at(scene, plan, cluster)
    if complete is not None and scene.now < complete.at:
        return None
    hosts = [p.status.host for p in scene.hosts]
    why = plan.reason if plan.key.number else f"{counted(len(hosts), 'node')} {'is' if len(hosts) == 1 else 'are'} here"
    if not plan.key.number and not _full(scene, cluster):
        why += f", and nobody else came for {scene.rules.last_call_timeout:g} s"
    return begin_version(scene, plan, cluster, why, rolled_back=bool(plan.key.number))


def deadlines(scene: ClusterView, plan: Plan, cluster: Cluster) -> tuple[Deadline, ...]:
    """When to look again."""
    if waits_for_nobody(scene, plan):
        return ()
    if shortage(scene, cluster):
        waits_for = DeadlineReason.REPLACEMENT if plan.key.number else DeadlineReason.JOIN
        return (Deadline(deadline(scene, plan), waits_for), *due(scene.broken(plan), DeadlineReason.LOST))
    complete = complete_at(scene, plan, cluster)
    return () if complete is None else (complete,)


def all_have_left(scene: ClusterView) -> bool:
    """Whether the last ones who were here have gone of their own will, so that nobody is expected back."""
    nodes = [p for p in scene.present.values() if p.status.cluster is None or not p.status.cluster.is_client]
    return any(p.left for p in nodes) and all(p.left or p.lost(scene.now) for p in nodes)


def waits_for_nobody(scene: ClusterView, plan: Plan) -> bool:
    """Whether no node has come yet, so that no time passes for anybody."""
    return not plan.key.number and not scene.hosts


def deadline(scene: ClusterView, plan: Plan) -> float:
    """Until when others are waited for."""
    return plan.since + (scene.rules.pend_timeout if plan.key.number else scene.rules.join_timeout)


def complete_at(scene: ClusterView, plan: Plan, cluster: Cluster) -> Deadline | None:
    """When it is known who takes part, should nobody come or go before that."""
    found = [*due(scene.broken(plan), DeadlineReason.LOST)]
    if not plan.key.number and not _full(scene, cluster):
        last_call = max(p.arrived for p in scene.hosts) + scene.rules.last_call_timeout
        found.append(Deadline(last_call, DeadlineReason.LAST_CALL))
    return max(found, key=lambda deadline: deadline.at, default=None)


def _full(scene: ClusterView, cluster: Cluster) -> bool:
    """Whether there is room for all that is wanted, or as many nodes as may come."""
    limits = scene.limits
    wanted = {
        Role.PS: wanted_servers(limits, cluster),
        Role.WORKER: len(wanted_workers(limits, cluster)),
        Role.CHIEF: 1,
        Role.EVALUATOR: limits.evaluator,
    }
    room_for_all = all(sum(rooms(scene, role).values()) >= number for role, number in wanted.items())
    return room_for_all or len(scene.hosts) >= scene.rules.full_size


def _short_of_nodes(scene: ClusterView, plan: Plan, short: str) -> str:
    waited = scene.rules.pend_timeout if plan.key.number else scene.rules.join_timeout
    hosts = names([p.status.host for p in scene.hosts])
    here = f"{hosts} {'is' if len(scene.hosts) == 1 else 'are'} here" if hosts else "no node is here"
    before = f"{plan.reason}; " if plan.key.number else ""
    return f"{before}after {waited:g} s {here}: {short}"
