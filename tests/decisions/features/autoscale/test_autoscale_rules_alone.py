"""Rules of the autoscaler, each shown alone: of these no other test of decisions found a mutant."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace
from support.scripted_agent import rank_assignment

from dlrover_run.coordination.membership import KnownNode
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.round import Member, RankAssignment, RoundKey
from dlrover_run.features.autoscale.decide import decide
from dlrover_run.features.autoscale.model import (
    MAX_CRASHES,
    AutoscaleState,
    Condition,
    Measurement,
    SizeRecord,
    Sizes,
    SizeView,
)
from dlrover_run.features.autoscale.observer import job_view
from dlrover_run.features.autoscale.rules import STRONG, AutoscaleRules
from dlrover_run.features.autoscale.text import AutoscaleCode

KEY = RoundKey(1, 3)
MEMBERS = tuple(Member(name, "1", name, 1) for name in "abcd")
MEASURED = SizeRecord(2, blocks=3)

EXCUSES = {
    "a size that was never measured": ((MEASURED,), 4, True),
    "a size that has failed before": ((MEASURED, SizeRecord(4, crashes=MAX_CRASHES - 1)), 4, True),
    "a size that has failed too often": ((MEASURED, SizeRecord(4, crashes=MAX_CRASHES)), 4, False),
    "a size that was measured": ((MEASURED, SizeRecord(4, blocks=1)), 4, False),
    "another size than the one wanted": ((MEASURED,), 3, False),
    "the first size of a job": ((), 4, False),
}


@pytest.mark.parametrize(("table", "target", "excused"), EXCUSES.values(), ids=EXCUSES)
def test_which_failures_of_a_size_cost_no_restart(table: tuple[SizeRecord, ...], target: int, excused: bool) -> None:
    state = AutoscaleState(target=target, table=table)
    plan = Plan(phase=PlanPhase.TRAINING, members=MEMBERS, parts=(state,))
    assert state.excuse_failure(plan) == ((AutoscaleCode.TRIED_SIZE(size=4),) if excused else ())


RATIO = 1.4
"""How much more the size does than was measured: more than the 20 % of `AutoscaleRules.drift`."""


@pytest.mark.parametrize(("error", "begins"), [(0.001, True), (0.04, True), (0.06, False), (0.5, False)])
def test_another_search_begins_only_if_the_change_is_certain(error: float, begins: bool) -> None:
    state = AutoscaleState(
        target=2,
        condition=Condition.BEST,
        quiet_until=1.0,
        table=(SizeRecord(2, 0.0, error, 10),),
        measurement=Measurement(round=3, size=2, first_at=0.0, blocks=(math.log(RATIO),) * 10),
    )
    rules = AutoscaleRules(scaling=STRONG)
    # log(1.4) is 0.336 and log(1.2) is 0.182, so three standard errors may be 0.154.
    after = decide(rules, Sizes(1, 2), state, SizeView(round=3, size=2, present=2), now=100.0)
    assert (after.table[0].rate > 0.3) == begins
    assert (after.condition is Condition.BEST) != begins


RANKS = rank_assignment(KEY.number, nodes=4, world_size=4, role_world_size=4, store_address="a", store_port=1)


def node(name: str, phase: NodePhase = NodePhase.RUNNING, ranks: RankAssignment | None = RANKS) -> NodeReport:
    plain = NodeReport(node_id=name, incarnation="1", host=name, address="", port=0, workers=1, phase=phase)
    return replace(plain, ranks=ranks)


BUSY = {
    "all train": (KnownNode(node("d"), 0.0, 0.0), False),
    "one has succeeded": (KnownNode(node("d"), 0.0, 0.0, succeeded=KEY), True),
    "one had succeeded in another round": (KnownNode(node("d"), 0.0, 0.0, succeeded=RoundKey(1, 2)), False),
    "one has failed": (KnownNode(node("d", NodePhase.FAILED), 0.0, 0.0), True),
    "one has failed in another round": (KnownNode(node("d", NodePhase.FAILED, None), 0.0, 0.0), False),
    "one may be lost": (KnownNode(node("d"), 0.0, 0.0, 5.0, 6.0), True),
    "one is unknown": (None, True),
}


@pytest.mark.parametrize(("last", "busy"), BUSY.values(), ids=BUSY)
def test_when_a_job_is_busy(last: KnownNode | None, busy: bool) -> None:
    plan = Plan(phase=PlanPhase.TRAINING, key=KEY, members=MEMBERS)
    nodes = {known.report.key: known for known in (KnownNode(node(name), 0.0, 0.0) for name in "abc")}
    if last is not None:
        nodes[last.report.key] = last
    view = job_view(AutoscaleState(), plan, nodes)
    assert (view.busy, view.size) == (busy, 4)
    assert view.present == 3 + (last is not None and last.connected)


def test_nodes_that_leave_are_not_present() -> None:
    nodes = {known.report.key: known for known in (KnownNode(node(name), 0.0, 0.0) for name in "abcd")}
    plan = Plan(phase=PlanPhase.TRAINING, key=KEY, members=MEMBERS)
    plan = replace(plan, draining=(MEMBERS[0].key,), to_drain=(MEMBERS[1].key,))
    assert job_view(AutoscaleState(), plan, nodes).present == 2
