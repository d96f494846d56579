"""Which node starts the next master after the loss of the first one's machine, and how many members it needs."""

from __future__ import annotations

import asyncio

import pytest
from support.virtual_torch import TorchJob

from dlrover_run.coordination.coordinator import RETURN_GRACE, Coordinator
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.quorum import LostMaster, needed_members
from dlrover_run.rendezvous.master_client.listed_hosts import ListedHosts, resolve_listed
from dlrover_run.rendezvous.master_client.succession import (
    CANDIDATE_DELAY,
    FIRST_DELAY,
    START_DELAY,
    Succession,
    SuccessionStep,
)
from dlrover_run.rendezvous.reach import Reach

A, B, C, D = "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"
RULES = JobRules(min_nodes=2, max_nodes=4)
FIRST_TURN = 100.0 + RULES.lost_after + START_DELAY
REFUSES, ACCEPTS, SILENT = Reach.REFUSES, Reach.ACCEPTS, Reach.SILENT


def lost(*candidates: str) -> Succession:
    """A job of these nodes whose master on A is lost at 100.0."""
    succession = Succession()
    succession.learn(candidates, len(candidates))
    succession.note_connected(A)
    succession.note_lost(100.0)
    return succession


def step(own: str, now: float, candidates: tuple[str, ...] = (A, B, C), **reached: Reach) -> SuccessionStep:
    addresses = {"a": A, "b": B, "c": C, "d": D}
    return lost(*candidates).step(own, {addresses[name]: reach for name, reach in reached.items()}, RULES, now)


def test_an_agent_on_the_machine_of_the_master_has_the_first_turn() -> None:
    assert step(B, FIRST_TURN - 0.1, a=REFUSES, c=REFUSES) == SuccessionStep()
    assert step(B, FIRST_TURN, a=REFUSES, c=REFUSES) == SuccessionStep(starts=LostMaster(3, 1))


def test_the_candidates_have_their_turns_in_the_order_of_the_ranks() -> None:
    assert step(C, FIRST_TURN + CANDIDATE_DELAY - 0.1, a=REFUSES, b=SILENT) == SuccessionStep()
    assert step(C, FIRST_TURN + CANDIDATE_DELAY, a=REFUSES, b=SILENT).starts
    assert step(D, FIRST_TURN + 999, a=REFUSES, b=SILENT) == SuccessionStep(), "it is no candidate"


def test_a_master_of_an_earlier_candidate_is_tried_first() -> None:
    assert step(C, FIRST_TURN, a=REFUSES, b=ACCEPTS) == SuccessionStep((B,))


def test_a_silent_master_is_succeeded_only_by_a_node_that_reaches_most_machines() -> None:
    assert step(B, FIRST_TURN, a=SILENT, c=REFUSES) == SuccessionStep(starts=LostMaster(3, 0))
    assert step(B, FIRST_TURN, a=SILENT, c=SILENT).starts is None
    assert step(B, FIRST_TURN, (A, B), a=SILENT).starts is None, "half of the nodes may be alive without it"
    assert step(B, FIRST_TURN, (A, B), a=REFUSES).starts


def test_a_master_that_listens_has_no_successor() -> None:
    assert not step(B, FIRST_TURN, a=ACCEPTS, c=REFUSES).starts


def first_step(
    own: str, now: float, least: int = 2, hosts: tuple[str, ...] = (A, B, C), **reached: Reach
) -> SuccessionStep:
    """The same for a node that looks since 100.0 for the first master, where the cluster lists these nodes."""
    succession = Succession()
    succession.learn_listed(ListedHosts(hosts, own), len(hosts))
    succession.note_lost(100.0)
    addresses = {"a": A, "b": B, "c": C, "d": D}
    rules = JobRules(min_nodes=least, max_nodes=len(hosts))
    return succession.step(own, {addresses[name]: reach for name, reach in reached.items()}, rules, now)


@pytest.mark.parametrize("first", [REFUSES, SILENT])
def test_a_first_node_that_does_not_come_is_replaced_by_the_next_one_of_the_list(first: Reach) -> None:
    turn = 100.0 + FIRST_DELAY
    assert first_step(B, turn - 0.1, a=first, c=REFUSES) == SuccessionStep()
    assert first_step(B, turn, a=first, c=REFUSES) == SuccessionStep(starts=LostMaster(3, 0)), "it may come yet"
    assert first_step(C, turn + CANDIDATE_DELAY - 0.1, a=first, b=REFUSES) == SuccessionStep()
    assert first_step(C, turn, a=first, b=ACCEPTS) == SuccessionStep((B,))


def test_no_node_replaces_the_first_one_where_no_round_could_be_formed_without_it() -> None:
    late = 100.0 + FIRST_DELAY + 60
    all_needed = SuccessionStep(obstacle="all 3 nodes of the job are needed for its first round")
    assert first_step(B, late, 3, a=REFUSES, c=REFUSES) == all_needed
    assert first_step(B, late, 1, a=SILENT, c=REFUSES) == all_needed, "the first node could form a round alone"
    cut_off = SuccessionStep(obstacle="this node reaches 1 of 3 machines of the job, too few to start the next master")
    assert first_step(B, late, a=SILENT, c=SILENT) == cut_off


def test_a_master_is_looked_for_at_the_last_place_and_on_the_candidates_before_this_node() -> None:
    succession = Succession()
    succession.learn_listed(ListedHosts((A, B, C, D), C), 4)
    assert [succession.other_places(own) for own in (B, C, D)] == [(A,), (A, B), (A, B, C)]
    succession.note_connected(D)
    assert succession.other_places(C) == (D, A, B)
    succession.learn((D, C), 2)
    assert (succession.other_places(C), succession.other_places(A)) == ((D,), (D,))


def test_what_the_first_round_names_counts_instead_of_the_list() -> None:
    succession = Succession()
    succession.learn_listed(ListedHosts((A, B, C), B), 3)
    succession.learn((D, C), 2)
    succession.learn_listed(ListedHosts((A, B, C), B), 3)
    assert (succession.candidates, succession.nodes, succession.own) == ((D, C), 2, None)


def test_the_addresses_of_a_list_are_those_by_which_other_nodes_find_them() -> None:
    hosts = ("192.0.2.1", "192.0.2.2", "no-such-host.invalid")
    found = asyncio.run(resolve_listed(hosts, "192.0.2.2"))
    assert found == ListedHosts(hosts, "192.0.2.2")
    own = asyncio.run(resolve_listed(("192.0.2.1", "127.0.0.1"), "192.0.2.9"))
    assert own == ListedHosts(("192.0.2.1", "192.0.2.9"), "192.0.2.9"), "a loopback name is no address for the others"


@pytest.mark.parametrize("members", range(2, 9))
def test_two_successors_never_both_have_enough_members(members: int) -> None:
    for ended in (0, 1):
        for least in range(1, members + 1):
            needed = needed_members(members, least, ended)
            assert 2 * needed > members - ended
            if not ended:
                assert members - needed < least, "the nodes of the old master are too few for a round"


@pytest.mark.parametrize(("here", "forms"), [("bc", False), ("bcd", True)])
def test_a_master_in_place_of_the_first_one_needs_a_quorum_of_the_listed_nodes(here: str, forms: bool) -> None:
    rules = JobRules(min_nodes=2, max_nodes=4, last_call_timeout=1.0)
    job = TorchJob(rules)
    job.coordinator = Coordinator(rules, job.now, 9, names_successors=True, lost=LostMaster(4, 0))
    job.come(*here)
    job.wait(RETURN_GRACE + 5.0)
    assert (job.plan.phase is PlanPhase.TRAINING) is forms
    if not forms:
        # It waits for the first round as any master does, and not as one that has lost nodes.
        job.wait(rules.master_timeout)
        assert job.plan.phase is PlanPhase.GATHERING
        job.come("d")
        job.wait(5.0)
        assert sorted(job.ranks) == ["b", "c", "d"]


def succeeded(ended: int, rules: JobRules) -> TorchJob:
    """Four nodes train, and the machine of the first is lost with the master; the next master has no report yet."""
    job = TorchJob(rules)
    job.come("a", "b", "c", "d")
    assert job.ranks == ["a", "b", "c", "d"]
    job.away |= set("abcd")
    job.coordinator = Coordinator(rules, job.now, 9, names_successors=True, lost=LostMaster(4, ended))
    return job


ELASTIC = JobRules(min_nodes=1, max_nodes=4)


def test_the_next_master_goes_on_with_more_than_half_of_the_nodes() -> None:
    job = succeeded(0, JobRules(min_nodes=2, max_nodes=4))
    job.come_back("b", "c", "d")
    job.wait(RETURN_GRACE + 0.1)
    assert (job.plan.phase, sorted(job.ranks), job.plan.quorum) == (PlanPhase.TRAINING, ["b", "c", "d"], 0)
    assert job.assignment("d").successors == tuple(f"{name}.net" for name in job.ranks)


@pytest.mark.parametrize(("ended", "here"), [(0, "bcd"), (1, "b")])
def test_the_next_master_forms_no_round_while_others_may_train_on(ended: int, here: str) -> None:
    """A silent master could go on with one node of this job; one node of three is not the most of them."""
    job = succeeded(ended, ELASTIC)
    job.come_back(*here)
    job.wait(RETURN_GRACE + 0.1)
    assert job.plan.phase is PlanPhase.GATHERING
    job.wait(ELASTIC.master_timeout)
    assert job.plan.phase is PlanPhase.FAILED


def test_the_next_master_goes_on_where_the_node_of_the_last_one_has_ended() -> None:
    job = succeeded(1, ELASTIC)
    job.come_back("b", "c")
    job.wait(RETURN_GRACE + 0.1)
    assert (job.plan.phase, sorted(job.ranks)) == (PlanPhase.TRAINING, ["b", "c"])
