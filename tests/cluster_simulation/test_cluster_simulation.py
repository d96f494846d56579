"""Whole jobs with parameter servers in virtual time: many seeds, that a seed replays exactly, and that broken rules are
found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from simulation.seeds import Variant, patched, run_seeds
from simulation.timeline import Broken

from cluster_simulation.scenario import simulate
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.reasons import Reasons
from dlrover_run.policies.parameter_servers import failures, placement, policy, reshape, scaling, versions, view
from dlrover_run.policies.parameter_servers.model import Cluster, Role
from dlrover_run.policies.parameter_servers.orders import NodeOrder
from dlrover_run.policies.parameter_servers.view import ClusterView

SEEDS = 80
"""Seeds of the ordinary run; `make test-long` runs 10,000 more."""

LONG_CHUNK = 1000
ENOUGH = 1000
"""Seeds within which every broken variant has to be found."""


@pytest.mark.timeout(300)
def test_every_law_holds_whatever_happens() -> None:
    outcomes = run_seeds(simulate, 0, SEEDS)
    # The laws say something only of jobs in which something has happened.
    assert {"finished", "failed"} <= {outcome.phase for outcome in outcomes}
    assert sum(outcome.versions for outcome in outcomes) > SEEDS
    assert sum(outcome.planned for outcome in outcomes) > SEEDS / 20
    assert sum(outcome.charged for outcome in outcomes) > SEEDS / 2


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(10))
def test_every_law_holds_for_ten_thousand_seeds(chunk: int) -> None:
    run_seeds(simulate, SEEDS + chunk * LONG_CHUNK, LONG_CHUNK)


def test_a_seed_replays_exactly() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        simulate(7, trace.append)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 10


@contextmanager
def requests_without_bound() -> Iterator[None]:
    """Any number is granted, and started."""
    granted = patched((scaling, "out_of_range"), by=lambda request, limits: ())
    started = patched((placement, "clamp"), by=lambda desired, least, most: most if desired is None else desired)
    with granted(), started():
        yield


def steps_without(name: str) -> Variant:
    """A variant that lacks one of its rules."""
    assert name in {step.__name__ for step in policy.STEPS}
    return patched((policy, "STEPS"), by=tuple(step for step in policy.STEPS if step.__name__ != name))


def with_step(step: policy.Step, by: policy.Step) -> Variant:
    """A variant with another rule in the place of one."""
    assert step in policy.STEPS
    return patched((policy, "STEPS"), by=tuple(by if one is step else one for one in policy.STEPS))


def open_gate_early(seen: ClusterView, plan: Any, cluster: Cluster) -> Any:
    """The gate opens while earlier processes live."""
    with patch.object(ClusterView, "leftover_tasks", lambda *given: []):
        return versions.open_gate(seen, plan, cluster)


def keep_servers(seen: ClusterView, plan: Any, cluster: Cluster) -> Any:
    """A server that has died is started again within its version."""
    for one in view.tasks_of(cluster, Role.PS):
        if seen.loss_of(cluster, one) is not None:
            rest = view.without(cluster, one)
            place = placement.find_node(seen, rest, Role.PS)
            if place is not None:
                rest, new = placement.new_task(seen, rest, Role.PS, one.rank, cluster.version, place)
                return seen.update(plan, view.with_task(rest, new))
    return None


def give_old_id(*given: Any) -> Any:
    """A replacement has the id of its predecessor."""
    cluster, task = real_new_task(*given)
    return cluster, msgspec.structs.replace(task, key=msgspec.structs.replace(task.key, id=task.rank))


def charge_nothing(limits: Any, cluster: Cluster, losses: Any) -> tuple[Cluster, Reasons]:
    """Every end is free, except for servers."""
    is_server = losses[0].task.role is Role.PS
    return consume_restarts(limits, cluster, losses) if is_server else (cluster, ())


def charge_twice(limits: Any, cluster: Cluster, losses: Any) -> tuple[Cluster, Reasons]:
    """Each end costs two restarts, except for servers."""
    if losses[0].task.role is not Role.PS:
        cluster, _ = consume_restarts(limits, cluster, losses)
    return consume_restarts(limits, cluster, losses)


def say_ready(self: ClusterView, task: Any) -> bool:
    """What has been started counts as ready."""
    return self.runs(task) and not self.is_lost(view.host_of(task))


def let_all_in(cluster: Cluster) -> NodeOrder:
    """The gate is always open."""
    return msgspec.structs.replace(real_order(cluster), open=True)


real_new_task = placement.new_task
real_order = policy._common_order
consume_restarts = failures.consume_restarts

BROKEN: dict[str, Variant] = {
    "a server is replaced within its version": with_step(failures.lose_servers, by=keep_servers),
    "the loss of a server changes nothing": steps_without("lose_servers"),
    "the end of a worker or a chief changes nothing": steps_without("replace_others"),
    "nothing is ever missing": steps_without("fill"),
    "a change never ends": steps_without("conclude"),
    "the gate never opens": steps_without("open_gate"),
    "the end of the chief is not noticed": steps_without("end_job"),
    "an id is given again": patched((placement, "new_task"), (failures, "new_task"), by=give_old_id),
    "nothing is charged": patched((failures, "consume_restarts"), by=charge_nothing),
    "all is charged twice": patched((failures, "consume_restarts"), by=charge_twice),
    "old processes may live on when the gate opens": with_step(versions.open_gate, by=open_gate_early),
    "the chief saves while workers train": patched((reshape, "workers_left"), by=lambda *given: False),
    "workers are let in all the time": patched((policy, "_common_order"), by=let_all_in),
    "what was started counts as ready": patched((ClusterView, "is_ready"), by=say_ready),
    "capacity has no bound": patched(
        (placement, "slots"),
        (versions, "slots"),
        by=lambda seen, role: {p.report.key: 99 for p in seen.hosts},
    ),
    "scale requests have no bound": requests_without_bound,
    "no task has a deadline": patched((ClusterView, "ready_deadline"), by=lambda self, cluster, task: None),
    "the coordinator never wakes up": patched((Coordinator, "wake_at"), by=lambda self: None),
    "lost nodes are forgotten": patched((Coordinator, "disconnect"), by=lambda self, key, now: None),
    "a member that hosts nothing more is forgotten": patched(
        (policy, "_with_members"), by=lambda seen, plan, cluster: plan
    ),
}


def find(variant: Variant) -> int:
    """The first seed that breaks a law, or that many as are enough."""
    with variant():
        for seed in range(ENOUGH):
            try:
                simulate(seed)
            except Broken:
                return seed
    return ENOUGH


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(name: str) -> None:
    assert find(BROKEN[name]) < ENOUGH
