"""Whole jobs with parameter servers, with the real clients of a master and of etcd, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.words.reasons import Reasons
from simulation.nights import first_seed, night_parts
from simulation.parameter_servers.invariants import ClusterInvariants
from simulation.parameter_servers.program import ServersProgram
from simulation.scenario import simulate
from simulation.seeds import PLACES, Defect, Variant, cases, demand_found, patched, run_seeds
from simulation.timeline import Broken
from tf_ps_runner.cluster import engine, failures, placement, reshape, scaling, versions, view
from tf_ps_runner.cluster.model import Cluster, PlannedTask, Role, TaskKey
from tf_ps_runner.cluster.orders import NodeOrder
from tf_ps_runner.cluster.rules import ClusterRules
from tf_ps_runner.cluster.view import ClusterView

SEEDS = {"master": 24, "etcd": 9}
"""The seeds of `make test`; `make test-long` runs 2,000 others of each place. Of the planted defects below, 19 with a
master and 12 with etcd name one of these seeds."""


@pytest.mark.parametrize(("place", "seeds"), SEEDS.items())
def test_every_invariant_of_parameter_servers_holds(place: str, seeds: int) -> None:
    outcomes = run_seeds(partial(simulate, kind=PLACES[place], program=ServersProgram), 0, seeds)
    # The invariants only show something for jobs in which something has happened.
    assert {"finished", "failed"} <= {outcome.phase for outcome in outcomes}
    assert sum(outcome.versions for outcome in outcomes) > seeds
    assert place == "etcd" or sum(outcome.planned for outcome in outcomes) > seeds / 20
    assert sum(outcome.restarts for outcome in outcomes) > seeds / 2


@pytest.mark.parametrize("part", night_parts(2000, 100))
@pytest.mark.parametrize("place", SEEDS)
def test_every_invariant_of_parameter_servers_holds_for_the_seeds_of_the_night(place: str, part: int) -> None:
    run_seeds(partial(simulate, kind=PLACES[place], program=ServersProgram), first_seed() + part, 100)


@pytest.mark.parametrize(("place", "seed"), [("master", 8884), ("etcd", 1445)])
def test_a_process_that_lost_its_node_id_does_not_begin_the_job_again(place: str, seed: int) -> None:
    """Seeds in which one comes back after the end of the job that it had tasks of."""
    run_seeds(partial(simulate, kind=PLACES[place], program=ServersProgram), seed, 1)


@contextmanager
def requests_without_bound() -> Iterator[None]:
    """Grant and start any number of tasks."""
    granted = patched((scaling, "out_of_range"), by=lambda request, limits: ())
    started = patched((placement, "clamp"), by=lambda desired, least, most: most if desired is None else desired)
    with granted(), started():
        yield


def steps_without(name: str) -> Variant:
    """Return a variant of the engine without one of its steps."""
    assert name in {step.__name__ for step in engine.STEPS}
    return patched((engine, "STEPS"), by=tuple(step for step in engine.STEPS if step.__name__ != name))


def with_step(step: engine.Step, by: engine.Step) -> Variant:
    """Return a variant of the engine with one step replaced."""
    assert step in engine.STEPS
    return patched((engine, "STEPS"), by=tuple(by if one is step else one for one in engine.STEPS))


def open_gate_early(seen: ClusterView, plan: Any, cluster: Cluster) -> Any:
    with patch.object(ClusterView, "leftover_tasks", lambda *given: []):
        return versions.open_gate(seen, plan, cluster)


def keep_servers(seen: ClusterView, plan: Any, cluster: Cluster) -> Any:
    for one in view.tasks_of(cluster, Role.PS):
        if seen.loss_of(cluster, one) is not None:
            rest = view.without(cluster, one)
            place = placement.choose_node(seen, rest, Role.PS)
            if place is not None:
                rest, new = placement.new_task(seen, rest, Role.PS, one.rank, cluster.version, place)
                return seen.update(plan, view.with_task(rest, new))
    return None


def give_old_id(*given: Any) -> Any:
    cluster, task = real_new_task(*given)
    return cluster, msgspec.structs.replace(task, key=msgspec.structs.replace(task.key, id=task.rank))


def charge_nothing(limits: Any, cluster: Cluster, losses: Any) -> tuple[Cluster, Reasons]:
    """Charge no exit, except of servers."""
    is_server = losses[0].task.role is Role.PS
    return real_consume_restarts(limits, cluster, losses) if is_server else (cluster, ())


def charge_twice(limits: Any, cluster: Cluster, losses: Any) -> tuple[Cluster, Reasons]:
    if losses[0].task.role is not Role.PS:
        cluster, _ = real_consume_restarts(limits, cluster, losses)
    return real_consume_restarts(limits, cluster, losses)


def report_ready_early(self: ClusterView, task: Any) -> bool:
    return self.runs(task) and not self.is_lost(view.host_of(task))


def let_all_in(cluster: Cluster) -> NodeOrder:
    return msgspec.structs.replace(real_order(cluster), open=True)


real_new_task = placement.new_task
real_order = engine._common_order
real_consume_restarts = failures.consume_restarts

DEFECTS = {
    "a server is replaced within its version": Defect(
        with_step(failures.lose_servers, by=keep_servers), master=0, etcd=2
    ),
    "the loss of a server changes nothing": Defect(steps_without("lose_servers"), master=0, etcd=8),
    "the exit of a worker or a chief changes nothing": Defect(steps_without("replace_others"), master=6, etcd=1),
    "no task is ever missing": Defect(steps_without("fill"), master=8, etcd=15),
    "a change never ends": Defect(steps_without("conclude"), master=10, etcd=231),
    "the gate never opens": Defect(steps_without("open_gate"), master=0, etcd=0),
    "the exit of the chief is not noticed": Defect(steps_without("end_job"), master=0, etcd=0),
    "an id is used twice": Defect(
        patched((placement, "new_task"), (failures, "new_task"), by=give_old_id), master=0, etcd=0
    ),
    "no exit is charged": Defect(patched((failures, "consume_restarts"), by=charge_nothing), master=6, etcd=7),
    "every exit is charged twice": Defect(patched((failures, "consume_restarts"), by=charge_twice), master=6, etcd=7),
    "the gate opens while processes of an earlier version run": Defect(
        with_step(versions.open_gate, by=open_gate_early), master=11
    ),
    "the chief saves while workers train": Defect(
        patched((reshape, "workers_left"), by=lambda *given: False), master=11, etcd=28
    ),
    "workers always pass the gate": Defect(patched((engine, "_common_order"), by=let_all_in), master=4, etcd=0),
    "a task that was started counts as ready": Defect(
        patched((ClusterView, "is_ready"), by=report_ready_early), master=0, etcd=0
    ),
    "capacity has no bound": Defect(
        patched(
            (placement, "slots"),
            (versions, "slots"),
            by=lambda seen, role: {p.report.key: 99 for p in seen.hosts},
        ),
        master=0,
        etcd=0,
    ),
    "scale requests have no bound": Defect(requests_without_bound, master=4, etcd=20),
    "no task has a deadline": Defect(
        patched((ClusterView, "ready_deadline"), by=lambda self, cluster, task: None), master=376
    ),
    "the coordinator never wakes up": Defect(patched((Coordinator, "wake_at"), by=lambda self: None), master=0),
    "lost nodes are forgotten": Defect(patched((Coordinator, "disconnect"), by=lambda self, key, now: None), master=5),
    "a member that hosts no task any more is forgotten": Defect(
        patched((engine, "_with_members"), by=lambda seen, plan, cluster: plan), master=6, etcd=46
    ),
}


@pytest.mark.parametrize(("defect", "place", "seed"), cases(DEFECTS))
def test_a_planted_defect_of_the_cluster_is_found(defect: Defect, place: str, seed: int) -> None:
    demand_found(defect.variant, partial(simulate, kind=PLACES[place], program=ServersProgram), seed)


def test_a_version_is_ended_by_what_was_lost_when_that_was_decided_on() -> None:
    """A node that was cut off may have reconnected before a slow network has stored the plan."""

    def version(number: int, first_id: int) -> Plan:
        places = [(Role.PS, "ps-node"), (Role.CHIEF, "chief-node")]
        tasks = tuple(
            PlannedTask(key=TaskKey(role, first_id), rank=0, version=number, node_id=node, incarnation="1", host=node)
            for role, node in places
        )
        cluster = Cluster(version=number, tasks=tasks)
        return Plan(phase=PlanPhase.TRAINING, key=RoundKey(1, number), parts=(cluster,))

    before, after = version(1, 0), version(2, 1)
    (server, chief) = Cluster.get(before.parts).tasks
    nodes = [
        SimpleNamespace(
            key=view.host_of(task),
            alive=True,
            cut=False,
            stale=False,
            processes=lambda task=task: [SimpleNamespace(task=task)],
        )
        for task in (server, chief)
    ]
    world: Any = SimpleNamespace(nodes=nodes, limits=ClusterRules(), timeline=SimpleNamespace(now=0.0))
    with pytest.raises(Broken, match="its servers and its chief run"):
        ClusterInvariants(world).decided(before, after, {}, frozenset())
    ClusterInvariants(world).decided(before, after, {}, frozenset({server.key}))
    nodes[0].cut = True
    assert ClusterInvariants(world).lost_tasks(before) == {server.key}
