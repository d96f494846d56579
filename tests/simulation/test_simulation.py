"""Whole jobs in virtual time: many seeds, that a seed replays exactly, and that broken rules are found."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from policy_parts import check_report

from dlrover_run.agent.node_state import NodeState
from dlrover_run.coordination import gathering, running
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.decision import Decision
from dlrover_run.coordination.model import Assignment, NodeReport, Plan, common_assignment
from dlrover_run.coordination.ranks import assign_ranks
from dlrover_run.coordination.rules import JobRules
from dlrover_run.etcd import fenced_writer
from dlrover_run.etcd.fenced_writer import FencedWriter
from dlrover_run.etcd.operations import Absent, Delete, Range, Txn
from dlrover_run.policies.health import steps as health_steps
from dlrover_run.policies.health.diagnosis import Diagnosis, Finding
from dlrover_run.policies.health.model import HealthCheck, HealthStatus
from dlrover_run.rendezvous import etcd_client, etcd_leader
from dlrover_run.rendezvous.client import AssignmentTracker
from dlrover_run.rendezvous.cut_off import CutOffDetector
from dlrover_run.rendezvous.etcd_client import EtcdClient
from dlrover_run.rendezvous.etcd_election import Election
from dlrover_run.rendezvous.etcd_leader import EtcdLeader
from simulation.disk import DiskJournal
from simulation.etcd_scenario import EtcdScenario
from simulation.etcd_watch import Watch
from simulation.scenario import MasterScenario, Scenario, simulate
from simulation.seeds import Variant, patched, run_seeds
from simulation.timeline import Broken
from simulation.torch import program as torch_program

SEEDS: dict[type[Scenario], int] = {MasterScenario: 120, EtcdScenario: 40}
"""Seeds of the ordinary run; `make test-long` runs 10,000 of each. A seed with etcd takes about four times as long."""

NAMES = ["master", "etcd"]
LONG_CHUNK = 1000
ENOUGH = 2000
"""Seeds within which every broken variant has to be found."""


@pytest.mark.parametrize(("kind", "seeds"), SEEDS.items(), ids=NAMES)
def test_every_law_holds_whatever_happens(kind: type[Scenario], seeds: int) -> None:
    outcomes = run_seeds(partial(simulate, kind=kind), 0, seeds)
    # The laws say something only of jobs in which something has happened.
    assert {"finished", "failed"} <= {outcome.phase for outcome in outcomes}
    assert sum(outcome.rounds for outcome in outcomes) > seeds
    assert sum(outcome.completed for outcome in outcomes) > seeds / 2
    assert sum(outcome.restarts for outcome in outcomes) > seeds / 10
    assert sum(outcome.checks for outcome in outcomes) > seeds / 10
    assert sum(outcome.dismissed for outcome in outcomes) > seeds / 20
    assert sum(outcome.coordinators > 1 for outcome in outcomes) > seeds / 10


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", range(10))
@pytest.mark.parametrize("kind", SEEDS, ids=NAMES)
def test_every_law_holds_for_ten_thousand_seeds(kind: type[Scenario], chunk: int) -> None:
    run_seeds(partial(simulate, kind=kind), SEEDS[kind] + chunk * LONG_CHUNK, LONG_CHUNK)


@pytest.mark.parametrize("flags", [[], ["--etcd"]], ids=NAMES)
def test_a_seed_replays_exactly_in_another_process(flags: list[str]) -> None:
    def trace(hash_seed: str) -> str:
        here = Path(__file__).parents[1]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(here.parent)}
        command = [sys.executable, "-m", "simulation", "4", *flags]
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.rpartition("1 seeds in")[0]

    first = trace("1")
    assert len(first.splitlines()) > 20
    assert trace("2") == first


def charge_without_ending(rules: JobRules, policy: Any, plan: Plan, present: Any, cause: Any, now: float) -> Decision:
    """Charges a failure, and forgets that its round is over."""
    return Decision(running.consume_restart(rules, plan, cause.report.failure, True, now))


def take_without_another_port(self: Any, wanted: Assignment) -> None:
    """Offers the same port until a round is known to use it."""
    is_known = wanted.ranks is not None and wanted.ranks.store_port == self._next_port.number
    if not is_known:
        self._heard, self._epoch = wanted.key, wanted.epoch
    real_take(self, wanted)


real_take = NodeState.accept


def take_whatever_is_new(self: AssignmentTracker, wanted: Assignment) -> bool:
    """Takes a word of any coordinator."""
    self.epoch = 0
    return real_take_word(self, wanted)


real_take_word = AssignmentTracker.take


def diagnose_nobody(check: HealthCheck, threshold: float) -> Diagnosis:
    """Finds all of them well."""
    return Diagnosis(tuple(Finding(HealthStatus.PASSED) for _ in check.nodes))


def diagnose_both_ends(check: HealthCheck, threshold: float) -> Diagnosis:
    """Takes both ends of a link that fails for broken."""
    found = real_diagnose(check, threshold)
    ends = {end for link in check.link_facts if link.problem for end in link.ends}
    findings = (Finding(HealthStatus.FAULT) if place in ends else one for place, one in enumerate(found.findings))
    return dataclasses.replace(found, findings=tuple(findings))


def diagnose_alone(check: HealthCheck, threshold: float) -> Diagnosis:
    """Names only those whose computing fails: the others show by nothing but a comparison."""
    found = real_diagnose(check, threshold)
    alone = (
        one if "comput" in one.reason and one.status is HealthStatus.FAULT else Finding(HealthStatus.PASSED)
        for one in found.findings
    )
    return dataclasses.replace(found, findings=tuple(alone))


def diagnose_links_alone(check: HealthCheck, threshold: float) -> Diagnosis:
    """Finds no straggler."""
    found = real_diagnose(check, threshold)
    quick = (Finding(HealthStatus.PASSED) if one.status is HealthStatus.STRAGGLER else one for one in found.findings)
    return dataclasses.replace(found, findings=tuple(quick))


real_diagnose = health_steps.diagnose


@contextmanager
def obey_whoever_spoke_last() -> Iterator[None]:
    """Neither side looks at epochs: each of them alone would be enough."""
    with (
        patch.object(AssignmentTracker, "take", take_whatever_is_new),
        patch.object(Coordinator, "_compare_epochs", lambda self, status: None),
    ):
        yield


@contextmanager
def end_whenever_the_coordinator_is_gone() -> Iterator[None]:
    """Takes no answer of another node into account, in runs that all have little time."""
    with (
        patch.object(CutOffDetector, "note_answer", lambda self, now: None),
        patch.object(torch_program, "SHARE_OF_SHORT_CUT_OFFS", 1.0),
    ):
        yield


BROKEN = {
    "a node whose coordinator is gone ends though others answer": end_whenever_the_coordinator_is_gone,
    "a failure is charged twice": patched((running, "_restart"), by=charge_without_ending),
    "a failure is charged to nobody": patched(
        (running, "consume_restart"), by=lambda rules, plan, failure, worked, now: plan
    ),
    "a round may use a port that another one used": patched(
        (gathering, "offers_a_fresh_port"), (running, "offers_a_fresh_port"), by=lambda rules, plan, leader: True
    ),
    "a node offers a port again": patched((NodeState, "accept"), by=take_without_another_port),
    "nodes are told before the journal is": patched((DiskJournal, "append"), by=lambda self, plan: None),
    "a node obeys whoever spoke last": obey_whoever_spoke_last,
    "an old master does not notice its successor": patched((DiskJournal, "_look"), by=lambda self: None),
    "a round is formed while it is unknown who lives": patched(
        (gathering, "disconnects_resolved_at"),
        (running, "disconnects_resolved_at"),
        by=lambda plan, present, now: None,
    ),
    "survivors get other ranks": patched(
        (gathering, "assign_ranks"),
        (running, "assign_ranks"),
        by=lambda before, living, size: assign_ranks((), living, size),
    ),
    "the unit of nodes is forgotten": patched(
        (JobRules, "size"), by=lambda self, nodes: min(nodes, self.max_nodes) if nodes >= self.min_nodes else 0
    ),
    "no more nodes train than have to": patched(
        (JobRules, "size"), by=lambda self, nodes: self.min_size if nodes >= self.min_size else 0
    ),
    "one success is enough": patched((running, "all"), by=any),
    "nobody looks when something falls due": patched((Coordinator, "wake_at"), by=lambda self: None),
    "the loss of a node changes nothing": patched(
        (running, "_regroup_without"), by=lambda rules, policy, plan, present, gone, now: Decision(plan)
    ),
    "a broken connection goes unnoticed": patched((Coordinator, "disconnect"), by=lambda self, key, now: None),
    "a round that is adopted is ended first": patched(
        (Coordinator, "assignment"),
        by=lambda self, key, waiting=None: common_assignment(self.plan, self.ranks(key), waiting),
    ),
    "nobody waits for what others failed of": patched((JobRules, "blame_delay"), by=0.0),
    "two processes may have one id": patched((Coordinator, "refusal"), by=lambda self, key: None),
    "newcomers take part unchecked": patched(
        (health_steps, "admitted_nodes"),
        by=lambda plan, living: [p for p in living if check_report(p.report).compute_result is not None],
    ),
    "nobody is ever at fault": patched((health_steps, "diagnose"), by=diagnose_nobody),
    "a partner is blamed for a link": patched((health_steps, "diagnose"), by=diagnose_both_ends),
    "who reaches nobody trains": patched((health_steps, "diagnose"), by=diagnose_alone),
    "who is slow is not named": patched((health_steps, "diagnose"), by=diagnose_links_alone),
    "a node that takes no part in checks is blamed": patched((health_steps, "without_check"), by=lambda p: False),
    "a check has no deadline": patched((health_steps, "CHECK_MARGIN"), by=1e9),
}


def always(*given: Any) -> Absent:
    """A condition that holds whatever is asked."""
    return Absent(Range("/nobody/has/this"))


def enter_without_asking(self: EtcdClient, own: str, status: NodeReport) -> Txn:
    """Takes the place of whoever has this node's id."""
    entry = real_entry(self, own, status)
    return Txn((), entry.then, entry.otherwise)


real_entry = EtcdClient._join_txn


async def tell_and_then_store(self: FencedWriter, values: Mapping[str, bytes], lease: int) -> None:
    """Writes the words first, and the plan in another transaction."""
    plan = {key: value for key, value in values.items() if key.endswith("/plan")}
    await real_write(self, {key: value for key, value in values.items() if key not in plan}, lease)
    await real_write(self, plan, lease)


real_write = FencedWriter.write


async def do_nothing(*given: Any) -> None:
    """In place of something that matters."""


async def renew_and_hope(self: EtcdClient) -> None:
    """Renews a lease, and asks nobody whether it is there."""
    while True:
        await asyncio.sleep(self._ttl / 3)
        await self._store.renew(self._lease)


async def sweep(self: EtcdClient) -> None:
    """The last one to leave deletes whatever stands below the name of the job."""
    await self._store.revoke(self._lease)
    everything = Delete(Range(self._keys.job, prefix=True))
    await self._store.commit(Txn((Absent(Range(self._keys.nodes, prefix=True)),), (everything,)))


@contextmanager
def leave_everything_behind() -> Iterator[None]:
    """Neither the last node nor a lease takes the keys of a job along."""
    with patch.object(EtcdClient, "_leave", do_nothing), patch.object(etcd_leader, "RESULT_RETENTION", 3600.0):
        yield


real_after = Watch.after
real_take_over = EtcdLeader._take_over

BROKEN_IN_ETCD = {
    "a node that lost etcd ends though others answer": end_whenever_the_coordinator_is_gone,
    "an agent writes though another one is elected": patched(
        (fenced_writer, "CreateRevisionIs"), (fenced_writer, "LeaseIs"), by=always
    ),
    "an older write comes after a newer one": patched((fenced_writer, "ModRevisionIs"), by=always),
    "an older status comes after a newer one": patched((etcd_client, "ModRevisionIs"), by=always),
    "nodes are told before the plan is stored": patched((FencedWriter, "write"), by=tell_and_then_store),
    "a watch begins one revision too late": patched(
        (Watch, "after"), by=lambda self, revision: real_after(self, revision + 1)
    ),
    "a node does not notice that its lease is gone": patched((EtcdClient, "_renew"), by=renew_and_hope),
    "nobody stands for election": patched((Election, "_campaign"), by=do_nothing),
    "two processes may have one id": patched((EtcdClient, "_join_txn"), by=enter_without_asking),
    "the last one leaves everything behind": leave_everything_behind,
    "the last one takes another job along": patched((EtcdClient, "_leave"), by=sweep),
    "a coordinator counts epochs by revisions alone": patched(
        (EtcdLeader, "_first_epoch"), by=property(lambda self: self.leader.created)
    ),
    "the elected agent forgets who was seated when it was elected": patched(
        (EtcdLeader, "_take_over"), by=lambda self, stored, now: real_take_over(self, None, now)
    ),
    "the end of a node's lease goes unnoticed": patched((Coordinator, "disconnect"), by=lambda self, key, now: None),
}


LATER = {
    "a node whose coordinator is gone ends though others answer": 40,
    "a coordinator counts epochs by revisions alone": 200,
    "a node obeys whoever spoke last": 115,
    "a node offers a port again": 755,
    "a round may use a port that another one used": 70,
    "an old master does not notice its successor": 140,
    "newcomers take part unchecked": 790,
    "two processes may have one id": 44,
    "who is slow is not named": 390,
    "who reaches nobody trains": 150,
}
"""Where to begin with variants that need much to come together, to save time."""


def find(variant: Variant, kind: type[Scenario], first: int = 0) -> None:
    """Raise Broken as soon as a seed breaks a law."""
    with variant():
        for seed in range(first, ENOUGH):
            simulate(seed, None, kind)


@pytest.mark.parametrize("variant", BROKEN)
def test_a_broken_rule_is_found(variant: str) -> None:
    with pytest.raises(Broken):
        find(BROKEN[variant], MasterScenario, LATER.get(variant, 0))


@pytest.mark.parametrize("variant", BROKEN_IN_ETCD)
def test_a_broken_rule_is_found_in_etcd(variant: str) -> None:
    with pytest.raises(Broken):
        find(BROKEN_IN_ETCD[variant], EtcdScenario, LATER.get(variant, 0))
