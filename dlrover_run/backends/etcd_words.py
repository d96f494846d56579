"""What the elected agent has to say to all nodes, parted so that each of them reads little. Pure."""

from __future__ import annotations

from dlrover_run.backends.etcd_records import BUCKETS, Word, bucket_of
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.records import OVER, Seat, Waiting, assignment
from dlrover_run.wire.messages import rule_values


def words_for(coordinator: Coordinator, waiting: Waiting) -> dict[int, Word]:
    """The words for each bucket that somebody reads; `waiting` is for nodes without a seat.

    Where all nodes have one it is left out, so that a bucket is not written again whenever somebody joins elsewhere.
    """
    plan = coordinator.plan
    known = {*coordinator.present, *(member.key for member in plan.members)}
    # Who was lost long ago may be back just in time to learn that the job is over.
    buckets = range(BUCKETS) if plan.phase in OVER else {bucket_of(key.node_id) for key in known}
    seated: dict[int, list[tuple[str, str, Seat]]] = {bucket: [] for bucket in buckets}
    somebody_waits: set[int] = set()
    for key in known:
        seat = coordinator.seat(key)
        if seat is not None:
            seated[bucket_of(key.node_id)].append((*key, seat))
        elif plan.phase not in OVER:
            somebody_waits.add(bucket_of(key.node_id))
    rules, wanted = rule_values(coordinator.rules), assignment(plan, None)
    return {
        bucket: Word(rules, wanted, waiting if bucket in somebody_waits else None, tuple(sorted(seats, key=_rank)))
        for bucket, seats in sorted(seated.items())
    }


def _rank(seated: tuple[str, str, Seat]) -> int:
    return seated[2].node_rank
