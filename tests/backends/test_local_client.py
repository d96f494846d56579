"""The client of a node whose rank a flag gives. What the local backend has in common with the others is in
`test_conformance.py`."""

from __future__ import annotations

import asyncio

from virtual_job import rules

from dlrover_run.coordination.model import NodeReport, PlanPhase
from dlrover_run.policies.health.model import HealthReport
from dlrover_run.policies.health.rules import CHECK_ONCE
from dlrover_run.rendezvous.local import LocalClient

REPORT = NodeReport(
    node_id="a", incarnation="1", host="a", address="a.net", port=1, workers=2, policy=HealthReport(check_port=2)
)


def test_a_node_with_a_given_rank_is_not_checked() -> None:
    async def take_part() -> None:
        client = LocalClient(rules(2, 2, check=CHECK_ONCE), 1, lambda: None)
        client.report(REPORT)
        assert client.assignment.phase is PlanPhase.TRAINING
        assert client.assignment.ranks is not None
        assert client.assignment.ranks.node_rank == 1
        await client.close()

    asyncio.run(take_part())
