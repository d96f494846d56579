"""Whole jobs in virtual time: the invariants hold for many seeds, a seed replays exactly, and planted defects are
found."""

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

import msgspec
import pytest
from support.harness import WAIT
from support.policy_parts import check_report

from dlrover_run.agent.node_state import NodeState
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.decision import Decision
from dlrover_run.coordination.node_views import common_assignment
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds import gathering, planned_changes, round_failures
from dlrover_run.coordination.rounds.ranks import assign_ranks
from dlrover_run.features.node_check.decision import steps as health_steps
from dlrover_run.features.node_check.decision.diagnosis import Diagnosis, NodeFinding
from dlrover_run.features.node_check.decision.model import HealthStatus, NodeCheck
from dlrover_run.features.node_check.gate import NodeCheckGate
from dlrover_run.master.jobs import Jobs
from dlrover_run.master.journal import JournalContents
from dlrover_run.rendezvous.client import AssignmentTracker
from dlrover_run.rendezvous.cut_off import CutOffDetector
from dlrover_run.rendezvous.kv import client as etcd_client
from dlrover_run.rendezvous.kv import leader as etcd_leader
from dlrover_run.rendezvous.kv import writer as etcd_writer
from dlrover_run.rendezvous.kv.client import StoreClient
from dlrover_run.rendezvous.kv.election import Election
from dlrover_run.rendezvous.kv.leader import StoreLeader
from dlrover_run.rendezvous.kv.writer import FencedWriter
from dlrover_run.store.operations import Absent, Delete, Range, Txn
from simulation import __main__ as commands
from simulation.disk import DiskJournal
from simulation.etcd_watch import Watch
from simulation.nights import first_seed, night_parts
from simulation.parameter_servers.program import ServersProgram
from simulation.program import Program
from simulation.scenario import Scenario, simulate
from simulation.seeds import PLACES, Defect, cases, demand_found, patched, run_seeds
from simulation.timeline import Broken
from simulation.torch import program as torch_program
from simulation.torch.program import TorchProgram

SEEDS = {"master": 60, "etcd": 33}
"""The seeds of `make test`; `make test-long` runs 4,000 others of each place. Of the planted defects below, 20 with a
master and 11 with etcd name one of these seeds."""


@pytest.mark.parametrize(("place", "seeds"), SEEDS.items())
def test_every_invariant_holds_whatever_happens(place: str, seeds: int) -> None:
    outcomes = run_seeds(partial(simulate, kind=PLACES[place]), 0, seeds)
    # The invariants only show something for jobs in which something has happened.
    assert {"finished", "failed"} <= {outcome.phase for outcome in outcomes}
    assert sum(outcome.rounds for outcome in outcomes) > seeds
    assert sum(outcome.completed for outcome in outcomes) > seeds / 2
    assert sum(outcome.restarts for outcome in outcomes) > seeds / 10
    assert sum(outcome.checks for outcome in outcomes) > seeds / 10
    assert sum(outcome.dismissed for outcome in outcomes) > seeds / 20
    assert sum(outcome.coordinators > 1 for outcome in outcomes) > seeds / 10


@pytest.mark.parametrize("part", night_parts(4000, 200))
@pytest.mark.parametrize("place", SEEDS)
def test_every_invariant_holds_for_the_seeds_of_the_night(place: str, part: int) -> None:
    run_seeds(partial(simulate, kind=PLACES[place]), first_seed() + part, 200)


def all_programs(program: type[Program] = Program) -> list[type[Program]]:
    """Return the programs of the simulation, without those that tests derive from them."""
    found = [each for each in program.__subclasses__() if not each.__module__.rpartition(".")[2].startswith("test_")]
    return [*found, *(each for one in found for each in all_programs(one))]


@pytest.mark.parametrize("kind", PLACES.values())
def test_the_command_that_a_broken_seed_prints_plays_the_same_program(
    monkeypatch: pytest.MonkeyPatch, kind: type[Scenario]
) -> None:
    def played(seed: int, log: Any, place: type[Scenario], program: type[Program]) -> Any:
        raise Broken(f"{seed} {place.__name__} {program.__name__}")

    printed: list[str] = []
    monkeypatch.setattr(commands, "simulate", played)
    monkeypatch.setattr(commands, "print", lambda line: printed.append(str(line)), raising=False)
    programs = all_programs()
    assert len(programs) >= 7
    for program in programs:
        printed.clear()
        monkeypatch.setattr(sys, "argv", ["simulation", "7", *f"{kind.flag}{program.flag}".split()])
        assert commands.main() == 1
        assert printed[0] == f"7 {kind.__name__} {program.__name__}"


REPLAY = """
import sys
from simulation.__main__ import main
for flags in ([], ["--etcd"], ["--parameter-servers"], ["--etcd", "--parameter-servers"]):
    sys.argv[1:] = ["4", *flags]
    main()
"""


def test_a_seed_replays_exactly_in_another_process() -> None:
    """With another `PYTHONHASHSEED`, which changes the order of sets, and with the command that prints a trace."""
    here = Path(__file__).parents[1]
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{here}:{here.parent}"}
    replayed = subprocess.run(
        [sys.executable, "-c", REPLAY], env=environment, capture_output=True, text=True, timeout=WAIT, check=True
    )
    lines: list[str] = []
    for program in (TorchProgram, ServersProgram):
        for kind in PLACES.values():
            begun = len(lines)
            simulate(4, lines.append, kind, program)
            assert len(lines) > begun + 20
    assert [line for line in replayed.stdout.splitlines() if " seeds in " not in line] == lines


def charge_without_ending(rules: Any, gate: Any, plan: Plan, present: Any, cause: Any, now: float) -> Decision:
    return Decision(round_failures.consume_restart(rules, plan, cause.report.failure, True, now))


def take_without_another_port(self: Any, wanted: Assignment) -> None:
    offered = self._next_port
    real_take(self, wanted)
    self._next_port = offered


real_take = NodeState.accept


def take_whatever_is_new(self: AssignmentTracker, wanted: Assignment) -> bool:
    self.assignment = msgspec.structs.replace(self.assignment, epoch=0)
    return real_take_word(self, wanted)


real_take_word = AssignmentTracker.take


def diagnose_none(check: NodeCheck, threshold: float) -> Diagnosis:
    return Diagnosis(tuple(NodeFinding(HealthStatus.PASSED) for _ in check.nodes))


def diagnose_both_ends(check: NodeCheck, threshold: float) -> Diagnosis:
    found = real_diagnose(check, threshold)
    ends = {end for link in check.link_facts if link.problem for end in link.ends}
    findings = (NodeFinding(HealthStatus.FAULT) if place in ends else one for place, one in enumerate(found.findings))
    return dataclasses.replace(found, findings=tuple(findings))


def diagnose_alone(check: NodeCheck, threshold: float) -> Diagnosis:
    """Name only nodes that fail to compute: the others are found only by a comparison."""
    found = real_diagnose(check, threshold)
    alone = (
        one if "comput" in one.reason and one.status is HealthStatus.FAULT else NodeFinding(HealthStatus.PASSED)
        for one in found.findings
    )
    return dataclasses.replace(found, findings=tuple(alone))


def diagnose_links_alone(check: NodeCheck, threshold: float) -> Diagnosis:
    found = real_diagnose(check, threshold)
    quick = (
        NodeFinding(HealthStatus.PASSED) if one.status is HealthStatus.STRAGGLER else one for one in found.findings
    )
    return dataclasses.replace(found, findings=tuple(quick))


real_diagnose = health_steps.diagnose


@contextmanager
def obey_the_last_sender() -> Iterator[None]:
    """Neither side checks epochs: each of the two checks alone would be enough."""
    with (
        patch.object(AssignmentTracker, "take", take_whatever_is_new),
        patch.object(Coordinator, "_compare_epochs", lambda self, status: None),
    ):
        yield


@contextmanager
def end_whenever_the_coordinator_is_gone() -> Iterator[None]:
    """Ignore the answers of other nodes, in runs that all have a short timeout."""
    with (
        patch.object(CutOffDetector, "note_answer", lambda self, now: None),
        patch.object(torch_program, "SHARE_OF_SHORT_CUT_OFFS", 1.0),
    ):
        yield


@contextmanager
def change_before_a_checkpoint() -> Iterator[None]:
    """Waits for no checkpoint, in runs that all mark some."""
    with (
        patch.object(planned_changes, "_have_saved", lambda plan, nodes: True),
        patch.object(torch_program, "SHARE_OF_SAVING_RUNS", 1.0),
    ):
        yield


real_journal_take_over = DiskJournal.take_over


@contextmanager
def keep_each_result_anew() -> Iterator[None]:
    """Each master keeps the result of a job as if that had just ended, and exits before the time for it is over."""

    def take_over(self: DiskJournal, rules: JobRules, epoch: int) -> JournalContents:
        contents = real_journal_take_over(self, rules, epoch)
        self.plan_age = 0.0
        return contents

    with patch.object(DiskJournal, "take_over", take_over), patch.object(Jobs, "keeps_result", False):
        yield


DEFECTS = {
    "a name never becomes free": Defect(keep_each_result_anew, master=0),
    "a newcomer interrupts a round that has not saved": Defect(change_before_a_checkpoint, master=4, etcd=24),
    "a node whose coordinator is gone ends though others answer": Defect(
        end_whenever_the_coordinator_is_gone, master=48, etcd=32
    ),
    "a granted request is forgotten": Defect(
        patched((Coordinator, "_requested"), by=lambda self, time: self.plan), master=66, etcd=28
    ),
    "the size that an operator asked for has no effect": Defect(
        patched((JobRules, "resized"), by=lambda self, size, wanted_nodes=0: self), master=58, etcd=55
    ),
    "a node that was asked to leave gets ranks": Defect(
        patched(
            (gathering, "eligible"),
            (planned_changes, "eligible"),
            by=lambda gate, plan, nodes: gate.healthy(plan, nodes),
        ),
        etcd=36,
    ),
    "a failure is charged twice": Defect(patched((round_failures, "_restart"), by=charge_without_ending), master=0),
    "a failure is not charged": Defect(
        patched((round_failures, "consume_restart"), by=lambda rules, plan, failure, worked, now: plan), master=0
    ),
    "a round may use a port that another one used": Defect(
        patched(
            (gathering, "offers_a_fresh_port"),
            by=lambda rules, plan, leader: True,
        ),
        master=81,
    ),
    "a node offers a port again": Defect(patched((NodeState, "accept"), by=take_without_another_port), master=0),
    "assignments are sent before the plan is in the journal": Defect(
        patched((DiskJournal, "append"), by=lambda self, plan: None), master=0
    ),
    "a node obeys the coordinator of the last message": Defect(obey_the_last_sender, master=125),
    "an old master does not notice its successor": Defect(
        patched((DiskJournal, "_look"), by=lambda self: None), master=144
    ),
    "a round is formed while it is unknown which members are alive": Defect(
        patched(
            (gathering, "disconnects_resolved_at"),
            (round_failures, "disconnects_resolved_at"),
            by=lambda members, now: None,
        ),
        master=48,
    ),
    "survivors get other ranks": Defect(
        patched(
            (gathering, "assign_ranks"),
            (planned_changes, "assign_ranks"),
            by=lambda before, living, size: assign_ranks((), living, size),
        ),
        master=0,
    ),
    "the unit of nodes is forgotten": Defect(
        patched(
            (JobRules, "size"), by=lambda self, nodes: min(nodes, self.max_nodes) if nodes >= self.min_nodes else 0
        ),
        master=0,
    ),
    "only the minimum number of nodes trains": Defect(
        patched((JobRules, "size"), by=lambda self, nodes: self.min_size if nodes >= self.min_size else 0), master=4
    ),
    "one success is enough": Defect(patched((round_failures, "all"), by=any), master=1),
    "no decision is made at a deadline": Defect(patched((Coordinator, "wake_at"), by=lambda self: None), master=1),
    "the loss of a node changes nothing": Defect(
        patched((round_failures, "_regroup_without"), by=lambda gate, plan, gone, now: Decision(plan)),
        master=0,
    ),
    "a broken connection goes unnoticed": Defect(
        patched((Coordinator, "disconnect"), by=lambda self, key, now: None), master=7
    ),
    "a recovered round is ended first": Defect(
        patched(
            (Coordinator, "assignment"),
            by=lambda self, key, waiting=None: msgspec.structs.replace(
                common_assignment(self.plan), ranks=self.ranks(key), waiting=waiting
            ),
        ),
        master=16,
    ),
    "a failure is not waited for that explains another": Defect(patched((JobRules, "blame_delay"), by=0.0), master=9),
    "two processes may have one id": Defect(patched((Coordinator, "refusal"), by=lambda self, key: None), master=49),
    "newcomers take part unchecked": Defect(
        patched(
            (NodeCheckGate, "joins"),
            by=lambda self, plan, living: [p for p in living if check_report(p.report).compute_result is not None],
        ),
        master=970,
    ),
    "no node is ever at fault": Defect(patched((health_steps, "diagnose"), by=diagnose_none), master=19),
    "a partner is blamed for a link": Defect(patched((health_steps, "diagnose"), by=diagnose_both_ends), master=19),
    "a node without a network trains": Defect(patched((health_steps, "diagnose"), by=diagnose_alone), master=157),
    "a slow node is not named": Defect(patched((health_steps, "diagnose"), by=diagnose_links_alone), master=393),
    "a node that takes no part in checks is blamed": Defect(
        patched((health_steps, "without_check"), by=lambda p: False), master=58
    ),
    "a check has no deadline": Defect(patched((health_steps, "CHECK_MARGIN"), by=1e9), master=19),
}


def always(*given: Any) -> Absent:
    return Absent(Range("/nobody/has/this"))


def enter_without_asking(self: StoreClient, own: str, status: NodeReport) -> Txn:
    entry = real_entry(self, own, status)
    return Txn((), entry.then, entry.otherwise)


real_entry = StoreClient._join_txn


async def send_and_then_store(self: FencedWriter, values: Mapping[str, bytes], lease: int) -> None:
    plan = {key: value for key, value in values.items() if key.endswith("/plan")}
    await real_write(self, {key: value for key, value in values.items() if key not in plan}, lease)
    await real_write(self, plan, lease)


real_write = FencedWriter.write


async def do_nothing(*given: Any) -> None:
    """Replace a function that is needed."""


async def renew_and_hope(self: StoreClient) -> None:
    while True:
        await asyncio.sleep(self._ttl / 3)
        await self._store.renew(self._lease)


async def sweep(self: StoreClient) -> None:
    """The last node to leave deletes all keys that begin with the name of the job."""
    await self._store.revoke(self._lease)
    everything = Delete(Range(self._keys.job, prefix=True))
    await self._store.commit(Txn((Absent(Range(self._keys.nodes, prefix=True)),), (everything,)))


@contextmanager
def leave_everything_behind() -> Iterator[None]:
    """Neither the last node nor a lease deletes the keys of a job."""
    with patch.object(StoreClient, "_leave", do_nothing), patch.object(etcd_leader, "RESULT_RETENTION", 3600.0):
        yield


real_after = Watch.after
real_take_over = StoreLeader._take_over

DEFECTS_IN_ETCD = {
    "an agent writes though another one is elected": Defect(
        patched((etcd_writer, "CreateRevisionIs"), (etcd_writer, "LeaseIs"), by=always), etcd=3
    ),
    "an older write arrives after a newer one": Defect(patched((etcd_writer, "ModRevisionIs"), by=always), etcd=0),
    "an older report arrives after a newer one": Defect(patched((etcd_client, "ModRevisionIs"), by=always), etcd=26),
    "assignments are sent before the plan is stored": Defect(
        patched((FencedWriter, "write"), by=send_and_then_store), etcd=0
    ),
    "a watch begins one revision too late": Defect(
        patched((Watch, "after"), by=lambda self, revision: real_after(self, revision + 1)), etcd=4
    ),
    "a node does not notice that its lease is gone": Defect(
        patched((StoreClient, "_renew"), by=renew_and_hope), etcd=2
    ),
    "no agent stands for election": Defect(patched((Election, "_campaign"), by=do_nothing), etcd=15),
    "two processes may write the report of one node": Defect(
        patched((StoreClient, "_join_txn"), by=enter_without_asking), etcd=49
    ),
    "the last node leaves all keys behind": Defect(leave_everything_behind, etcd=0),
    "the last node deletes the keys of another job too": Defect(patched((StoreClient, "_leave"), by=sweep), etcd=0),
    "a coordinator counts epochs by revisions alone": Defect(
        patched((StoreLeader, "_first_epoch"), by=property(lambda self: self.leader.created)), etcd=240
    ),
    "the elected agent forgets the ranked nodes when it is elected": Defect(
        patched((StoreLeader, "_take_over"), by=lambda self, stored, now: real_take_over(self, None, now)), etcd=0
    ),
    "the end of a node's lease goes unnoticed": Defect(
        patched((Coordinator, "disconnect"), by=lambda self, key, now: None), etcd=43
    ),
}


@pytest.mark.parametrize(("defect", "place", "seed"), cases({**DEFECTS, **DEFECTS_IN_ETCD}))
def test_a_planted_defect_is_found(defect: Defect, place: str, seed: int) -> None:
    demand_found(defect.variant, partial(simulate, kind=PLACES[place]), seed)
