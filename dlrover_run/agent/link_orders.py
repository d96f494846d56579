"""What the local ranks of a node are told to do for a link of a node check, and when its turn is. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dlrover_run.agent.check_workers import Order
from dlrover_run.policies.health.model import CheckKey, CheckTask, LinkEnd


def place_in_order(task: CheckTask, link: Sequence[LinkEnd]) -> int:
    """Which of its group's links that is, from 0. In a triple each link may have to wait for an end that is still in
    the one before, where nobody comes: so the time of each is counted from the begin of the first."""
    nodes = sorted({end.node for each in task.links for end in each})
    order = list(itertools.combinations(nodes, 2)) if len(nodes) > 1 else [(task.node, task.node)]
    return order.index((link[0].node, link[-1].node))


def link_orders(key: CheckKey, link: Sequence[LinkEnd], node: int, timeout: float) -> list[Order]:
    """What the local ranks of `node` are told to do for a link: its ranks are those of the first end, then those of the
    other, and rank 0 hosts the store."""
    first, last = link[0], link[-1]
    at = next(place for place, end in enumerate(link) if end.node == node)
    first_rank = sum(end.workers for end in link[:at])
    return [
        {
            "do": "link",
            "name": f"{key.epoch}/{key.number}/{key.round}/{first.node}-{last.node}",
            "address": first.address,
            "port": first.port,
            "host": rank == 0,
            "rank": rank,
            "world": sum(end.workers for end in link),
            "timeout": timeout,
        }
        for rank in range(first_rank, first_rank + link[at].workers)
    ]
