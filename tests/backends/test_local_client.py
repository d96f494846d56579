"""The client of a node that needs no other one, where nodes are checked: it decides by itself, and watches the time."""

from __future__ import annotations

import asyncio

import pytest
from node_truth import Truth
from policy_parts import check_part, with_part
from virtual_job import rules

from dlrover_run.coordination.model import NodeReport, PlanPhase
from dlrover_run.policies.health import round as health_round
from dlrover_run.policies.health import steps as health_steps
from dlrover_run.policies.health.model import HealthReport
from dlrover_run.policies.health.rules import CHECK_ONCE
from dlrover_run.rendezvous.local import LocalClient

ALONE = NodeReport(
    node_id="a", incarnation="1", host="a", address="a.net", port=1, workers=2, policy=HealthReport(check_port=2)
)


def test_one_node_is_checked_and_told_what_came_of_it() -> None:
    said: list[str] = []
    news: list[int] = []

    async def take_part() -> None:
        truth = Truth()
        client = LocalClient(rules(1, 1, check=CHECK_ONCE), None, lambda: news.append(1), said.append)
        client.report(ALONE)
        waiting = client.assignment.waiting
        assert waiting is not None
        assert waiting.text == "checking this node before training"
        heard = len(news)
        client.report(ALONE)
        assert len(news) == heard, "who says the same again is told the same"
        status = with_part(ALONE, HealthReport, compute_result=truth.compute("a.net"))
        client.report(status)
        task = check_part(client.assignment).check_task
        assert task is not None
        assert [[end.node for end in link] for link in task.links] == [[0]]
        client.report(
            with_part(
                status,
                HealthReport,
                link_result=truth.link("a.net", task),
            )
        )
        assert client.assignment.ranks is not None
        assert check_part(client.assignment).health is not None
        assert check_part(client.assignment).health.gigabytes == 10.0
        await client.close()

    asyncio.run(take_part())
    assert said == [], "it says itself that it has passed"


def test_a_node_that_never_computes_is_found_without_another_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (health_round, health_steps):
        monkeypatch.setattr(module, "CHECK_MARGIN", 0.01)

    said: list[str] = []

    async def take_part() -> None:
        told = asyncio.Event()
        client = LocalClient(rules(1, 1, check=CHECK_ONCE, check_timeout=0.05), None, told.set, said.append)
        client.report(ALONE)
        while check_part(client.assignment).health is None:
            told.clear()
            await told.wait()
        assert check_part(client.assignment).health.dismissed
        await client.close()

    asyncio.run(take_part())
    assert "Fault nodes are: [0] and stragglers are: []." in said


def test_with_ranks_by_hand_nobody_is_checked() -> None:
    async def take_part() -> None:
        client = LocalClient(
            rules(2, 2, check=CHECK_ONCE),
            1,
            lambda: None,
        )
        client.report(ALONE)
        assert client.assignment.phase is PlanPhase.TRAINING
        assert client.assignment.ranks is not None
        assert client.assignment.ranks.node_rank == 1
        await client.close()

    asyncio.run(take_part())
