"""What the elected agent has to say to all nodes, parted so that each of them reads little. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from dlrover_run.backends.etcd_records import BUCKETS, Word, bucket_of
from dlrover_run.coordination.cluster.account import parted
from dlrover_run.coordination.cluster.records import Order
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.parts import NOBODY, Part
from dlrover_run.coordination.records import OVER, Waiting, assignment
from dlrover_run.wire.messages import rule_values


def words_for(coordinator: Coordinator, waiting: Waiting, strangers: Iterable[str] = ()) -> dict[int, Word]:
    """The words for each bucket that somebody reads; `waiting` is for nodes that wait. The coordinator does not know of
    the `strangers`, by their node ids.

    Where none does it is left out, so that a bucket is not written again whenever somebody joins elsewhere.
    """
    plan = coordinator.plan
    known = {*coordinator.present, *(member.key for member in plan.members)}
    # Who was lost long ago may be back just in time to learn that the job is over.
    buckets = (
        range(BUCKETS)
        if plan.phase in OVER
        else {bucket_of(node_id) for node_id in (*strangers, *(key.node_id for key in known))}
    )
    told: dict[int, list[tuple[str, str, Part]]] = {bucket: [] for bucket in buckets}
    somebody_waits: set[int] = set()
    alike: Order | None = None
    for key in known:
        part = coordinator.part(key)
        if part.waits and plan.phase not in OVER:
            somebody_waits.add(bucket_of(key.node_id))
        if part.cluster is not None:
            of_all, own = parted(part.cluster)
            # A visitor is told less than all others are.
            alike = of_all if of_all.account is not None else alike
            part = msgspec.structs.replace(part, cluster=own)
        if part != NOBODY:
            told[bucket_of(key.node_id)].append((*key, part))
    rules = rule_values(coordinator.rules)
    wanted = msgspec.structs.replace(assignment(plan, None), cluster=alike)
    return {
        bucket: Word(rules, wanted, waiting if bucket in somebody_waits else None, tuple(sorted(parts, key=_rank)))
        for bucket, parts in sorted(told.items())
    }


def _rank(told: tuple[str, str, Part]) -> tuple[float, str, str]:
    node_id, incarnation, part = told
    return math.inf if part.seat is None else part.seat.node_rank, node_id, incarnation
