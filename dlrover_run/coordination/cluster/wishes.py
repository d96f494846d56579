"""What people wish for a running job: how many servers and workers it shall have."""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.cluster.placing import clip, rooms
from dlrover_run.coordination.cluster.records import Cluster, Hosting, Role, Targets
from dlrover_run.coordination.cluster.scene import Scene, tasks_of
from dlrover_run.coordination.cluster.words import fixed
from dlrover_run.coordination.decision import changed
from dlrover_run.coordination.records import NodeStatus, Plan
from dlrover_run.coordination.words import counted

MOST_WISHES = 1000
"""The nodes whose last wish is remembered, so that it is granted once. Older ones are forgotten first."""


def grant(scene: Scene, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan after a wish that was not heard before; None when there is none."""
    heard = dict(cluster.wishes)
    for key in sorted(scene.present):
        status = scene.present[key].status
        hosting = status.cluster
        if hosting is None or hosting.wish is None or hosting.wish_number <= heard.get(status.node_id, 0):
            continue
        heard.pop(status.node_id, None)
        wishes = (*heard.items(), (status.node_id, hosting.wish_number))[-MOST_WISHES:]
        targets, words = _clipped(scene, cluster, hosting, hosting.wish, status)
        granted = msgspec.structs.replace(cluster, targets=targets, wishes=wishes)
        return changed(plan, scene.now, cluster=granted, reason=words)
    return None


def fix_servers(scene: Scene, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan in which the number of servers stays, once the chief has told that its tables need that."""
    chiefs = [scene.told(task) for task in tasks_of(cluster, Role.CHIEF)]
    if cluster.fixed_ps or not any(told is not None and told.fixed_servers for told in chiefs):
        return None
    kept = msgspec.structs.replace(cluster, fixed_ps=len(tasks_of(cluster, Role.PS)))
    if scene.limits.least_ps == scene.limits.most_ps == kept.fixed_ps:
        return changed(plan, scene.now, cluster=kept)
    return changed(plan, scene.now, cluster=kept, reason=fixed(kept))


def _clipped(
    scene: Scene, cluster: Cluster, hosting: Hosting, wish: Targets, status: NodeStatus
) -> tuple[Targets, str]:
    """What the job may have of a wish, and the answer to whoever asked."""
    limits = scene.limits
    targets, said = cluster.targets, []
    if wish.ps is not None:
        number = clip(wish.ps, limits.least_ps, limits.most_ps)
        if cluster.fixed_ps and number != cluster.fixed_ps:
            said.append(f"{counted(wish.ps, 'parameter server')}, but {fixed(cluster)}")
        else:
            targets = msgspec.structs.replace(targets, ps=number)
            said.append(_answer(scene, Role.PS, "parameter server", wish.ps, number, limits.least_ps, limits.most_ps))
    if wish.workers is not None:
        number = clip(wish.workers, limits.least_workers, limits.most_workers)
        targets = msgspec.structs.replace(targets, workers=number)
        said.append(
            _answer(scene, Role.WORKER, "worker", wish.workers, number, limits.least_workers, limits.most_workers)
        )
    return targets, f"{status.host} asked for {'; and for '.join(said) or 'nothing'}"


def _answer(scene: Scene, role: Role, noun: str, asked: int, number: int, least: int, most: int) -> str:
    answer = counted(asked, noun)
    if asked != number:
        answer += f", and the job may have {least} to {most}, so it shall have {number}"
    room = sum(rooms(scene, role).values())
    return answer if room >= number else f"{answer}; there is room for {room} now"
