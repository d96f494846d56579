"""What people wish for a running job: how many servers and workers it shall have."""

from __future__ import annotations

import msgspec

from dlrover_run.coordination.cluster.placing import clip, rooms
from dlrover_run.coordination.cluster.records import Cluster, HeardWish, Role, Targets
from dlrover_run.coordination.cluster.scene import Scene
from dlrover_run.coordination.cluster.words import bounded
from dlrover_run.coordination.decision import changed
from dlrover_run.coordination.records import NodeStatus, Plan
from dlrover_run.coordination.words import counted

MOST_WISHES = 1000
"""The nodes whose last wish is remembered, so that it is granted once. Older ones are forgotten first."""


def grant(scene: Scene, plan: Plan, cluster: Cluster) -> Plan | None:
    """The plan after a wish that was not heard before; None when there is none. A wish is granted as a whole or refused
    as a whole."""
    heard = {wish.node_id: wish for wish in cluster.wishes}
    for key in sorted(scene.present):
        status = scene.present[key].status
        hosting = status.cluster
        if hosting is None or hosting.wish is None:
            continue
        before = heard.get(status.node_id)
        if before is not None and hosting.wish_number <= before.number:
            continue
        heard.pop(status.node_id, None)
        refused = _refused(scene, cluster, hosting.wish)
        wishes = (*heard.values(), HeardWish(status.node_id, hosting.wish_number, refused))[-MOST_WISHES:]
        targets, words = _clipped(scene, cluster, hosting.wish, status)
        if refused:
            targets, words = cluster.targets, f"{words}, which is refused: {bounded(cluster)}"
        answered = msgspec.structs.replace(cluster, targets=targets, wishes=wishes)
        return changed(plan, scene.now, cluster=answered, reason=words)
    return None


def _refused(scene: Scene, cluster: Cluster, wish: Targets) -> bool:
    """Whether the tables of the model do not allow what somebody wishes."""
    if wish.ps is None or cluster.server_bounds is None:
        return False
    return not cluster.server_bounds.allow(clip(wish.ps, scene.limits.least_ps, scene.limits.most_ps))


def _clipped(scene: Scene, cluster: Cluster, wish: Targets, status: NodeStatus) -> tuple[Targets, str]:
    """What the job may have of a wish, and the answer to whoever asked."""
    limits = scene.limits
    targets, said = cluster.targets, []
    if wish.ps is not None:
        number = clip(wish.ps, limits.least_ps, limits.most_ps)
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
