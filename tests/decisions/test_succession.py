"""Which node starts the next master after the loss of the first one's machine, and how many members it needs."""

from __future__ import annotations

import pytest
from virtual_job import VirtualJob

from dlrover_run.coordination.coordinator import RETURN_GRACE, Coordinator
from dlrover_run.coordination.model import PlanPhase
from dlrover_run.coordination.recovery import needed_members
from dlrover_run.coordination.rules import JobRules
from dlrover_run.rendezvous.master.succession import CANDIDATE_DELAY, START_DELAY, Step, Succession
from dlrover_run.rendezvous.reach import Reach

A, B, C, D = "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"
LOST_AFTER = 1.0
FIRST_TURN = 100.0 + LOST_AFTER + START_DELAY
REFUSES, ACCEPTS, SILENT = Reach.REFUSES, Reach.ACCEPTS, Reach.SILENT


def lost(*candidates: str) -> Succession:
    """A job of these nodes whose master on A is lost at 100.0."""
    succession = Succession()
    succession.learn(candidates)
    succession.note_connected(A)
    succession.note_lost(100.0)
    return succession


def step(own: str, now: float, candidates: tuple[str, ...] = (A, B, C), **reached: Reach) -> Step:
    addresses = {"a": A, "b": B, "c": C, "d": D}
    return lost(*candidates).step(own, {addresses[name]: reach for name, reach in reached.items()}, LOST_AFTER, now)


def test_an_agent_on_the_machine_of_the_master_has_the_first_turn() -> None:
    assert step(B, FIRST_TURN - 0.1, a=REFUSES, c=REFUSES) == Step()
    assert step(B, FIRST_TURN, a=REFUSES, c=REFUSES) == Step(starts=True, ended=1)


def test_the_candidates_have_their_turns_in_the_order_of_the_ranks() -> None:
    assert step(C, FIRST_TURN + CANDIDATE_DELAY - 0.1, a=REFUSES, b=SILENT) == Step()
    assert step(C, FIRST_TURN + CANDIDATE_DELAY, a=REFUSES, b=SILENT).starts
    assert step(D, FIRST_TURN + 999, a=REFUSES, b=SILENT) == Step(), "it is no candidate"


def test_a_master_of_an_earlier_candidate_is_tried_first() -> None:
    assert step(C, FIRST_TURN, a=REFUSES, b=ACCEPTS) == Step((B,))


def test_a_silent_master_is_succeeded_only_by_a_node_that_reaches_most_machines() -> None:
    assert step(B, FIRST_TURN, a=SILENT, c=REFUSES) == Step(starts=True)
    assert step(B, FIRST_TURN, a=SILENT, c=SILENT) == Step()
    assert step(B, FIRST_TURN, (A, B), a=SILENT) == Step(), "half of the nodes may be alive without it"
    assert step(B, FIRST_TURN, (A, B), a=REFUSES).starts


def test_a_master_that_listens_has_no_successor() -> None:
    assert not step(B, FIRST_TURN, a=ACCEPTS, c=REFUSES).starts


@pytest.mark.parametrize("members", range(2, 9))
def test_two_successors_never_both_have_enough_members(members: int) -> None:
    for ended in (0, 1):
        for least in range(1, members + 1):
            needed = needed_members(members, least, ended)
            assert 2 * needed > members - ended
            if not ended:
                assert members - needed < least, "the nodes of the old master are too few for a round"


def succeeded(ended: int, rules: JobRules) -> VirtualJob:
    """Four nodes train, and the machine of the first is lost with the master; the next master has no report yet."""
    job = VirtualJob(rules)
    job.come("a", "b", "c", "d")
    assert job.ranks == ["a", "b", "c", "d"]
    job.away |= set("abcd")
    job.coordinator = Coordinator(rules, job.now, 9, names_successors=True, ended=ended)
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
