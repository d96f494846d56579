"""Whole jobs with parameter servers in virtual time: many seeds, that a seed replays exactly, and that broken rules are
found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from cluster_simulation.scenario import simulate
from simulation.timeline import Broken

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.policies.parameter_servers import (
    failures,
    opening,
    orders,
    placement,
    policy,
    reshape,
    scaling,
    versions,
    view,
)
from dlrover_run.policies.parameter_servers.model import Cluster, NodeOrder, Role, TaskStage
from dlrover_run.policies.parameter_servers.view import ClusterView

SEEDS = 300
"""How many seeds are run in passing."""

LONG_CHUNK = 1000
ENOUGH = 1000
"""Seeds within which every broken variant has to be found."""


def run_seeds(first: int, count: int) -> None:
    broken = []
    for seed in range(first, first + count):
        try:
            simulate(seed)
        except Broken as reason:
            broken.append(str(reason))
    assert not broken, "\n".join(broken)


@pytest.mark.timeout(300)
def test_every_law_holds_whatever_happens() -> None:
    run_seeds(0, SEEDS)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(10))
def test_every_law_holds_for_ten_thousand_seeds(chunk: int) -> None:
    run_seeds(SEEDS + chunk * LONG_CHUNK, LONG_CHUNK)


def test_the_runs_are_worth_something() -> None:
    outcomes = [simulate(seed) for seed in range(60)]
    assert {"finished", "failed"} <= {outcome.phase for outcome in outcomes}
    assert sum(outcome.versions for outcome in outcomes) > 70
    assert sum(outcome.planned for outcome in outcomes) > 5
    assert sum(outcome.charged for outcome in outcomes) > 30


def test_a_seed_replays_exactly() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        simulate(7, trace.append)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 10


Variant = Callable[[], AbstractContextManager[None]]


def patched(*places: tuple[Any, str], by: Any) -> Variant:
    """A variant of the product in which something is another thing."""

    @contextmanager
    def variant() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name in places:
                stack.enter_context(patch.object(owner, name, by))
            yield

    return variant


@contextmanager
def wishes_without_bound() -> Iterator[None]:
    """Any number is granted, and had."""
    granted = patched((scaling, "_out_of_range"), by=lambda wish, limits: "")
    had = patched((placement, "clip"), by=lambda t, a, b: b if t is None else t)
    with granted(), had():
        yield


def steps_without(name: str) -> Variant:
    """A variant that has forgotten one of its rules."""
    return patched((policy, "STEPS"), by=tuple(step for step in policy.STEPS if step.__name__ != name))


def keep_servers(task: ClusterView, plan: Any, cluster: Cluster) -> Any:
    """A server that has died is started again within its version."""
    for one in view.tasks_of(cluster, Role.PS):
        if task.loss(cluster, one) is not None:
            rest = msgspec.structs.replace(cluster, tasks=tuple(t for t in cluster.tasks if t.key != one.key))
            place = placement.place_one(task, rest, Role.PS, one.rank)
            if place is not None:
                rest, new = placement.give(task, rest, Role.PS, one.rank, cluster.version, place)
                return failures.changed(plan, task.now, cluster=msgspec.structs.replace(rest, tasks=(*rest.tasks, new)))
    return None


def give_old_id(*given: Any) -> Any:
    """A replacement has the id of its predecessor."""
    cluster, task = real_give(*given)
    return cluster, msgspec.structs.replace(task, key=msgspec.structs.replace(task.key, id=task.rank))


def charge_nothing(limits: Any, cluster: Cluster, loss: Any) -> tuple[Cluster, str]:
    """All is free."""
    return cluster, ""


def charge_twice(limits: Any, cluster: Cluster, loss: Any) -> tuple[Cluster, str]:
    """Each end costs two restarts."""
    cluster, _ = real_charge(limits, cluster, loss)
    return real_charge(limits, cluster, loss)


def save_at_once(scene: Any, plan: Any, cluster: Cluster) -> bool:
    """Nobody looks whether workers have left."""
    return False


def say_ready(self: ClusterView, task: Any) -> bool:
    """What has been started counts as ready."""
    return self.stage(task) in (TaskStage.STARTED, TaskStage.READY) and not self.gone(orders.host_of(task))


def let_all_in(cluster: Cluster) -> NodeOrder:
    """The gate is always open."""
    return msgspec.structs.replace(real_told(cluster), open=True)


real_give = placement.give
real_told = orders._told
real_charge = failures.charge
real_begin = versions.begin_version

BROKEN: dict[str, Variant] = {
    "a server is replaced within its version": patched(
        (policy, "STEPS"), by=tuple(keep_servers if s is failures.lose_servers else s for s in policy.STEPS)
    ),
    "the loss of a server changes nothing": steps_without("lose_servers"),
    "the end of a worker or a chief changes nothing": steps_without("replace_others"),
    "nothing is ever missing": steps_without("fill"),
    "a change never ends": steps_without("conclude"),
    "the gate never opens": steps_without("let_in"),
    "the end of the chief is not noticed": steps_without("end"),
    "an id is given again": patched((placement, "give"), (versions, "give"), (failures, "give"), by=give_old_id),
    "nothing is charged": patched((failures, "charge"), by=charge_nothing),
    "all is charged twice": patched((failures, "charge"), by=charge_twice),
    "old processes may live on when the gate opens": patched((opening, "leftovers"), by=lambda *given: []),
    "the chief saves while workers train": patched((reshape, "_workers_left"), by=save_at_once),
    "workers are let in all the time": patched((orders, "_told"), by=let_all_in),
    "what was started counts as ready": patched((ClusterView, "ready"), by=say_ready),
    "rooms have no bound": patched(
        (placement, "rooms"),
        (versions, "rooms"),
        by=lambda scene, role: {p.status.key: 99 for p in scene.hosts},
    ),
    "wishes have no bound": wishes_without_bound,
    "nobody has a deadline": patched((ClusterView, "deadline"), by=lambda self, cluster, task: None),
    "nobody looks when something falls due": patched((Coordinator, "wake_at"), by=lambda self: None),
    "lost nodes are forgotten": patched((Coordinator, "disconnect"), by=lambda self, key, now: None),
    "a member that hosts nothing more is forgotten": patched(
        (policy, "with_members"), by=lambda scene, plan, cluster: plan
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
