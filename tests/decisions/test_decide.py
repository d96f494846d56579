"""Every rule of the rounds, in virtual time: when one forms and with whom, what ends it, and what that costs."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from harness import calls_of
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_job import KILLED, LOST_PEER, VirtualJob, rules

from dlrover_run.coordination.decide import decide
from dlrover_run.coordination.membership import MemberState
from dlrover_run.coordination.model import (
    Failure,
    Member,
    NodeKey,
    NodePhase,
    NodeReport,
    Plan,
    PlanPhase,
    RoundKey,
    rank_assignments,
)
from dlrover_run.coordination.reasons import Code, codes, sentence
from dlrover_run.coordination.rules import JobRules
from dlrover_run.coordination.text import node_name
from dlrover_run.policies.registry import policy_of


def training(job: VirtualJob, number: int, *ranks: str) -> bool:
    """Whether that round trains with these nodes in the order of their ranks."""
    return (job.plan.phase, job.plan.key.number, job.ranks) == (PlanPhase.TRAINING, number, list(ranks))


class TestFirstRound:
    def test_forms_at_once_with_the_most_nodes(self) -> None:
        job = VirtualJob(rules(1, 2))
        job.come("a")
        assert job.plan.phase is PlanPhase.GATHERING
        job.come("b")
        assert training(job, 1, "a", "b")
        assert job.plan.reasons == (Code.NODES_HERE(number=2),)

    def test_waits_for_a_last_call_that_each_newcomer_begins_again(self) -> None:
        job = VirtualJob(rules(2, 4))
        job.come("a", "b")
        job.wait(29)
        job.come("c")
        job.wait(29)
        assert job.plan.phase is PlanPhase.GATHERING
        job.wait(1.1)
        assert training(job, 1, "a", "b", "c")
        assert job.plan.reasons == (
            Code.NODES_HERE(number=3),
            Code.LAST_CALL_OVER(seconds=30.0),
        )

    def test_falls_back_to_the_last_call_of_those_who_are_left(self) -> None:
        job = VirtualJob(rules(1, 4))
        job.come("a")
        job.wait(20)
        job.come("b")
        job.lose("b")
        job.wait(10.1)
        assert training(job, 1, "a")

    def test_waits_for_a_connection_that_has_just_broken(self) -> None:
        job = VirtualJob(rules(1, 4))
        job.come("a", "b")
        job.wait(29.5)
        job.lose("b")
        job.wait(0.6)
        assert job.plan.phase is PlanPhase.GATHERING
        job.come_back("b")
        assert training(job, 1, "a", "b")

    def test_never_has_more_than_the_most(self) -> None:
        job = VirtualJob(rules(1, 2))
        job.come("a", "b", "c")
        assert training(job, 1, "a", "b")
        assert job.assignment("c").ranks is None

    def test_is_rounded_down_to_the_unit(self) -> None:
        job = VirtualJob(rules(2, 6, node_unit=2))
        job.come("a", "b", "c")
        job.wait(30.1)
        assert training(job, 1, "a", "b")

    def test_is_full_at_the_largest_multiple_of_the_unit(self) -> None:
        job = VirtualJob(rules(1, 5, node_unit=2))
        job.come("a", "b", "c", "d")
        assert training(job, 1, "a", "b", "c", "d")

    def test_fails_when_too_few_came(self) -> None:
        job = VirtualJob(rules(2, 3))
        job.come("a")
        job.wait(599)
        assert job.plan.phase is PlanPhase.GATHERING
        job.wait(1.1)
        assert job.plan.phase is PlanPhase.FAILED
        assert job.plan.reasons == (Code.TOO_FEW_NODES(seconds=600.0, number=1, least=2, names=("a",)),)

    def test_names_the_ranks_that_are_missing_where_people_gave_them(self) -> None:
        job = VirtualJob(rules(4, 4))
        job.come("a", preferred_rank=1)
        job.come("b", preferred_rank=3)
        job.wait(600.1)
        assert job.plan.reasons == (
            Code.TOO_FEW_NODES(seconds=600.0, number=2, least=4, names=("node 1 (a)", "node 3 (b)")),
            Code.MISSING(names=("node 0", "node 2")),
        )

    def test_does_not_wait_for_ever_for_nodes_that_come_and_go(self) -> None:
        job = VirtualJob(rules(3, 3))
        job.come("a")
        for come, go in (("b", "a"), ("c", "b"), ("d", "c")):
            job.wait(180)
            job.come(come)
            job.wait(5)
            job.lose(go)
        assert job.plan.phase is PlanPhase.GATHERING
        job.wait(60)
        assert job.plan.phase is PlanPhase.FAILED

    def test_nothing_is_waited_for_without_nodes(self) -> None:
        job = VirtualJob(rules(2, 2))
        job.come("a")
        job.lose("a")
        job.wait(5000)
        assert job.plan.phase is PlanPhase.GATHERING
        assert job.coordinator.wake_at() is None
        job.come("b")
        job.wait(500)
        job.come("c")
        assert training(job, 1, "b", "c")

    def test_forms_on_the_port_that_its_first_node_offers(self) -> None:
        job = VirtualJob(rules(2, 2))
        job.come("b", port=70)
        job.come("a", port=60, epoch=job.plan.epoch)
        assert (job.plan.store_address, job.plan.store_port) == ("a.net", 60)

    def test_waits_for_a_port_that_was_offered_to_no_other_coordinator(self) -> None:
        job = VirtualJob(rules(2, 2))
        job.deaf.add("a")
        job.come("a", port=60)
        job.come("b")
        assert job.plan.phase is PlanPhase.GATHERING, "one before this may have told others of a round at that port"
        job.deaf.clear()
        job.settle()
        assert training(job, 1, "a", "b")
        assert job.plan.store_port != 60

    def test_forms_on_the_store_that_flags_name(self) -> None:
        job = VirtualJob(rules(2, 2, store=("10.0.0.1", 29500)))
        job.come("a", "b")
        assert (job.plan.store_address, job.plan.store_port) == ("10.0.0.1", 29500)
        job.fail("a")
        assert training(job, 2, "a", "b")
        assert (job.plan.store_address, job.plan.store_port) == ("10.0.0.1", 29500)


def trio(**changes: object) -> VirtualJob:
    """A job that trains with a, b and c, and needs two."""
    job = VirtualJob(rules(2, 3, **changes))
    job.come("a", "b", "c")
    return job


class TestMembership:
    def test_a_lost_node_leaves_a_smaller_round_at_once(self) -> None:
        job = trio()
        job.lose("b")
        job.wait(0.9)
        assert job.plan.key.number == 1
        job.wait(0.2)
        assert training(job, 2, "a", "c")
        assert (job.plan.restart_count, codes(job.plan.reasons)) == (0, ("lost",))

    def test_a_node_that_is_back_in_time_was_never_away(self) -> None:
        job = trio()
        job.lose("b")
        job.wait(0.9)
        job.come_back("b")
        job.wait(100)
        assert training(job, 1, "a", "b", "c")

    def test_a_node_that_is_back_in_the_instant_in_which_it_is_lost(self) -> None:
        job = trio()
        job.lose("b")
        due = job.coordinator.wake_at()
        assert due is not None
        job.now = due
        job.come_back("b")
        assert training(job, 1, "a", "b", "c")
        job.lose("b")
        due = job.coordinator.wake_at()
        assert due is not None
        job.now = due
        job.settle()
        job.come_back("b")
        assert training(job, 3, "a", "c", "b")
        assert len(job.stored) == 3

    def test_a_replacement_takes_the_free_rank(self) -> None:
        job = trio()
        job.lose("a")
        job.wait(1.1)
        assert training(job, 2, "c", "b")
        job.come("aa")
        assert training(job, 3, "c", "b", "aa")

    def test_a_replacement_for_too_few_takes_the_free_rank(self) -> None:
        job = VirtualJob(rules(3, 3))
        job.come("a", "b", "c")
        job.lose("b")
        job.wait(1.1)
        assert job.plan.phase is PlanPhase.GATHERING
        job.come("z")
        assert training(job, 2, "a", "z", "c")
        assert job.plan.reasons == (Code.LOST(names=("node 1 (b)",), number=1),)

    def test_another_process_under_the_same_id_replaces_the_first_at_once(self) -> None:
        job = trio()
        job.lose("b")
        job.come("b", incarnation="2")
        assert training(job, 2, "a", "b", "c")
        assert job.plan.members[1].incarnation == "2"
        assert job.plan.restart_count == 0

    def test_a_spare_steps_in_at_once(self) -> None:
        job = trio()
        job.come("d")
        assert training(job, 1, "a", "b", "c")
        job.say("b", NodePhase.LEFT)
        assert training(job, 2, "a", "d", "c")

    def test_below_the_least_the_job_waits_and_then_names_who_is_missing(self) -> None:
        job = trio()
        job.lose("b", "c")
        job.wait(599)
        assert job.plan.phase is PlanPhase.GATHERING
        job.wait(3)
        assert job.plan.phase is PlanPhase.FAILED
        assert job.plan.reasons == (
            Code.LOST(names=("node 1 (b)", "node 2 (c)"), number=2),
            Code.TOO_FEW_NODES(seconds=600.0, number=1, least=2, names=("node 0 (a)",)),
            Code.MISSING(names=("node 1 (b)", "node 2 (c)")),
        )

    def test_a_newcomer_starts_a_larger_round(self) -> None:
        job = trio()
        job.lose("c")
        job.wait(2)
        job.come("d")
        assert training(job, 3, "a", "b", "d")
        assert job.plan.reasons == (Code.SCALED_UP(names=("node 2 (d)",), after=3, before=2),)
        assert job.plan.restart_count == 0

    def test_a_newcomer_that_makes_no_unit_full_is_a_spare(self) -> None:
        job = VirtualJob(rules(2, 4, node_unit=2))
        job.come("a", "b", "c")
        job.wait(31)
        assert training(job, 1, "a", "b")
        job.come("d")
        assert training(job, 2, "a", "b", "c", "d")

    def test_newcomers_are_gathered_for_as_long_as_was_asked(self) -> None:
        job = VirtualJob(rules(1, 9, scale_up_delay=10.0))
        job.come("a")
        job.wait(31)
        job.come("b")
        job.wait(6)
        job.come("c")
        assert training(job, 1, "a")
        job.wait(4.1)
        assert training(job, 2, "a", "b", "c")

    def test_the_last_newcomer_ends_the_gathering(self) -> None:
        job = VirtualJob(rules(1, 3, scale_up_delay=10.0))
        job.come("a")
        job.wait(31)
        job.come("b", "c")
        assert training(job, 2, "a", "b", "c")

    def test_no_new_node_joins_after_the_first_success(self) -> None:
        job = trio()
        job.lose("c")
        job.wait(2)
        job.succeed("a")
        job.come("d")
        job.wait(100)
        assert training(job, 2, "a", "b")
        job.succeed("b")
        assert job.plan.phase is PlanPhase.FINISHED

    def test_a_flood_of_losses_is_one_round(self) -> None:
        job = VirtualJob(rules(1, 5))
        job.come("a", "b", "c", "d", "e")
        job.lose("b")
        job.wait(0.5)
        job.lose("c", "d")
        job.wait(3)
        assert training(job, 2, "a", "e")
        assert job.plan.reasons == (Code.LOST(names=("node 1 (b)", "node 2 (c)", "node 3 (d)"), number=3),)


class TestLeaving:
    def test_a_node_that_is_asked_to_go_has_its_grace(self) -> None:
        job = trio()
        job.say("b", NodePhase.LEAVING)
        job.wait(25)
        assert training(job, 1, "a", "b", "c")
        job.say("b", NodePhase.LEFT)
        assert training(job, 2, "a", "c")
        assert job.plan.reasons == (Code.LEFT_ON_REQUEST(names=("node 1 (b)",), number=1),)

    def test_the_others_do_not_wait_for_its_connection_to_be_lost(self) -> None:
        job = trio()
        job.say("b", NodePhase.LEAVING)
        job.lose("b")
        assert training(job, 2, "a", "c")

    def test_what_its_peers_fail_of_costs_nothing(self) -> None:
        job = trio()
        job.say("b", NodePhase.LEAVING)
        job.fail("a", LOST_PEER)
        assert training(job, 2, "a", "c")
        assert (job.plan.restart_count, job.plan.failure) == (0, None)
        assert job.plan.reasons == (Code.ASKED_TO_LEAVE(names=("node 1 (b)",), number=1),)

    def test_it_gets_no_ranks_in_the_next_round(self) -> None:
        job = trio()
        job.say("b", NodePhase.LEAVING)
        job.lose("c")
        job.wait(2)
        assert job.plan.phase is PlanPhase.GATHERING
        job.come("d")
        assert training(job, 2, "a", "d")

    def test_when_the_last_node_has_left_the_job_is_over(self) -> None:
        job = trio()
        for name in "abc":
            job.say(name, NodePhase.LEAVING)
        assert job.plan.phase is PlanPhase.TRAINING
        for name in "abc":
            job.say(name, NodePhase.LEFT)
        assert job.plan.phase is PlanPhase.FAILED
        assert job.plan.reasons == (
            Code.LEFT_ON_REQUEST(names=("node 0 (a)",), number=1),
            Code.NO_NODE_LEFT(),
        )

    def test_the_last_one_to_leave_ends_a_job_that_had_lost_the_others(self) -> None:
        job = trio()
        job.lose("a", "b")
        job.wait(1.1)
        job.say("c", NodePhase.LEFT)
        assert job.plan.phase is PlanPhase.FAILED

    @pytest.mark.parametrize("lease", [0.0, 9.0], ids=["master", "etcd"])
    @pytest.mark.parametrize("gap", [0.0, 0.1, 0.45])
    @pytest.mark.parametrize("lost", ["a", "b", "c", "ab", "abc", ""])
    def test_what_becomes_of_a_job_does_not_depend_on_the_order_in_which_its_nodes_go(
        self, lost: str, gap: float, lease: float
    ) -> None:
        """With etcd it is heard of a lost node when its lease has run out."""
        phases = set()
        for order in itertools.permutations("abc"):
            job = VirtualJob(rules(1, 3, lost_after=0.0 if lease else 1.0))
            job.come("a", "b", "c")
            began = job.now
            events = [(place * gap, place, name) for place, name in enumerate(order)]
            events += [(at + lease, 3, name) for at, _, name in events if lease and name in lost]
            for at, place, name in sorted(events):
                job.wait(began + at - job.now)
                if name not in lost:
                    job.leave(name)
                elif lease and place < 3:
                    job.deaf.add(name)
                else:
                    job.lose(name)
            job.wait(2.0)
            phases.add(job.plan.phase)
        assert phases == {PlanPhase.GATHERING if lost else PlanPhase.FAILED}

    def test_a_node_that_may_come_back_keeps_the_job_from_its_end(self) -> None:
        job = trio()
        job.lose("a")
        job.say("b", NodePhase.LEFT)
        job.say("c", NodePhase.LEFT)
        job.come_back("a")
        assert job.plan.phase is PlanPhase.GATHERING
        job.come("d")
        assert training(job, 2, "a", "d")

    def test_a_job_whose_nodes_were_all_lost_waits_for_others(self) -> None:
        job = trio()
        job.lose("a", "b", "c")
        job.wait(2)
        assert job.plan.phase is PlanPhase.GATHERING
        job.wait(601)
        assert job.plan.phase is PlanPhase.FAILED

    def test_a_node_that_cannot_start_its_workers_costs_a_restart_and_goes(self) -> None:
        job = trio()
        job.say("b", NodePhase.LEFT, Failure(2, "b", "could not be started: no such file"))
        assert training(job, 2, "a", "c")
        assert job.plan.restart_count == 1
        assert job.plan.reasons == (
            Code.WORKER_FAILED(rank=2, node="node 1 (b)", what="could not be started: no such file"),
        )

    def test_a_node_that_goes_after_its_workers_succeeded_is_not_missed(self) -> None:
        job = trio()
        job.succeed("b")
        job.say("b", NodePhase.LEAVING)
        job.say("b", NodePhase.LEFT)
        job.wait(10)
        assert training(job, 1, "a", "b", "c")
        job.succeed("a", "c")
        assert job.plan.phase is PlanPhase.FINISHED


class TestEnding:
    def test_the_job_is_finished_when_all_workers_succeeded(self) -> None:
        job = trio()
        job.succeed("a", "b")
        assert job.plan.phase is PlanPhase.TRAINING
        job.succeed("c")
        assert (job.plan.phase, codes(job.plan.reasons)) == (PlanPhase.FINISHED, ("all_succeeded",))
        assert job.assignment("a").phase is PlanPhase.FINISHED

    def test_a_lost_node_that_had_succeeded_is_not_missed(self) -> None:
        job = trio()
        job.succeed("b")
        job.lose("b")
        job.wait(50)
        assert training(job, 1, "a", "b", "c")
        assert [member.done for member in job.plan.members] == [False, True, False]
        assert job.key("b") not in job.coordinator.members
        job.succeed("a", "c")
        assert job.plan.phase is PlanPhase.FINISHED

    def test_a_node_lost_after_anothers_success_is_missed(self) -> None:
        job = trio()
        job.succeed("b")
        job.lose("c")
        job.wait(2)
        assert training(job, 2, "a", "b")
        job.succeed("a")
        assert job.plan.phase is PlanPhase.TRAINING

    def test_a_failure_after_anothers_success_starts_everybody_again(self) -> None:
        job = trio()
        job.succeed("b")
        job.fail("c")
        assert training(job, 2, "a", "b", "c")
        assert job.assignment("b").restart_count == 1

    def test_a_job_that_is_over_stays_so(self) -> None:
        job = trio(max_restarts=0)
        job.fail("c")
        assert job.plan.phase is PlanPhase.FAILED
        job.come("d", "e", "f")
        job.lose("a")
        job.wait(5000)
        assert job.plan.phase is PlanPhase.FAILED
        assert job.coordinator.wake_at() is None
        assert job.assignment("e").phase is PlanPhase.FAILED

    def test_members_that_were_away_learn_that_the_job_has_failed(self) -> None:
        job = trio(max_restarts=0)
        job.fail("a")
        before = job.plan
        job.lose("b")
        job.wait(20)
        job.come_back("b")
        assert job.assignment("b").phase is PlanPhase.FAILED
        assert job.assignment("b").failure == before.failure is not None
        assert job.plan is before


class TestBudget:
    def test_a_failure_costs_one_restart_whichever_node_reports_it(self) -> None:
        job = trio()
        job.deaf = {"a", "b", "c"}
        job.say("a", NodePhase.FAILED, LOST_PEER)
        job.say("c", NodePhase.FAILED, LOST_PEER)
        assert job.plan.key.number == 1
        job.fail("b")
        job.wait(10)
        for name in "abc":
            job.hear_again(name)
        assert training(job, 2, "a", "b", "c")
        assert (job.plan.restart_count, job.plan.failure) == (1, KILLED)

    def test_restarts_end(self) -> None:
        job = trio(max_restarts=2)
        for count in (1, 2):
            job.fail("b")
            assert (job.plan.phase, job.plan.restart_count) == (PlanPhase.TRAINING, count)
        job.fail("a")
        assert (job.plan.phase, job.plan.restart_count) == (PlanPhase.FAILED, 2)
        assert job.plan.reasons == (
            Code.WORKER_FAILED(rank=1, node="node 0 (b)", what="was killed by SIGKILL"),
            Code.RESTARTS_USED(most=2),
        )

    def test_without_restarts_the_first_failure_is_the_end(self) -> None:
        job = trio(max_restarts=0)
        job.fail("b")
        assert (job.plan.phase, codes(job.plan.reasons)) == (PlanPhase.FAILED, ("worker_failed",))

    def test_leaving_and_joining_does_not_go_round_it(self) -> None:
        job = trio(max_restarts=1)
        job.fail("b")
        for _ in range(3):
            job.lose("c")
            job.wait(2)
            job.come_back("c")
        assert (job.plan.restart_count, job.plan.key.number) == (1, 8)
        job.fail("b")
        assert job.plan.phase is PlanPhase.FAILED

    def test_a_change_of_membership_is_free(self) -> None:
        job = trio(max_restarts=0)
        for _ in range(20):
            job.lose("c")
            job.wait(2)
            job.come_back("c")
        assert training(job, 41, "a", "b", "c")
        assert job.plan.restart_count == 0

    def test_a_failure_after_a_loss_is_laid_to_the_loss(self) -> None:
        job = trio(max_restarts=0)
        job.lose("c")
        job.wait(0.2)
        job.fail("a", Failure(0, "a", "raised ValueError: peer gone"))
        job.wait(2)
        assert training(job, 2, "a", "b")

    def test_a_failure_before_a_loss_counts(self) -> None:
        job = trio()
        failed = msgspec.structs.replace(job.statuses["a"], phase=NodePhase.FAILED, failure=KILLED)
        job.coordinator.receive(failed, job.now)
        job.now += 0.1
        job.coordinator.disconnect(job.key("c"), job.now)
        job.away.add("c")
        job.settle()
        assert (job.plan.phase, job.plan.restart_count) == (PlanPhase.GATHERING, 1)
        job.wait(2)
        assert training(job, 2, "a", "b")
        assert (job.plan.restart_count, job.plan.failure) == (1, msgspec.structs.replace(KILLED, node_rank=0))

    def test_a_failure_while_a_connection_was_broken_counts_when_that_is_back(self) -> None:
        job = trio()
        job.lose("c")
        job.wait(0.2)
        job.fail("a")
        assert job.plan.key.number == 1
        job.come_back("c")
        assert training(job, 2, "a", "b", "c")
        assert job.plan.restart_count == 1

    def test_who_only_lost_a_peer_waits_for_the_cause(self) -> None:
        job = trio(max_restarts=0)
        job.fail("a", LOST_PEER)
        job.wait(0.5)
        job.lose("b")
        job.wait(1.1)
        assert training(job, 2, "a", "c")
        assert job.plan.restart_count == 0

    def test_a_lost_peer_that_nothing_explains_counts(self) -> None:
        job = trio()
        job.fail("a", LOST_PEER)
        job.wait(1.9)
        assert job.plan.key.number == 1
        job.wait(0.2)
        assert training(job, 2, "a", "b", "c")
        assert job.plan.restart_count == 1

    def test_where_a_loss_is_known_only_with_the_end_of_a_lease_that_is_waited_for(self) -> None:
        job = trio(max_restarts=0, detection_delay=9.0)
        job.fail("a", LOST_PEER)
        job.fail("c", LOST_PEER)
        job.wait(9.0)
        job.lose("b")
        job.wait(1.1)
        assert training(job, 2, "a", "c")
        assert job.plan.restart_count == 0

    def test_when_every_node_has_lost_a_peer_no_node_has_vanished(self) -> None:
        job = trio(detection_delay=9.0)
        for name in "abc":
            job.fail(name, LOST_PEER)
        assert training(job, 2, "a", "b", "c")
        assert job.plan.restart_count == 1

    def test_one_node_waits_for_no_cause(self) -> None:
        job = VirtualJob(rules(1, 1))
        job.come("a")
        job.fail("a", LOST_PEER)
        assert training(job, 2, "a")

    def test_the_report_of_an_old_round_costs_nothing(self) -> None:
        job = trio()
        late = msgspec.structs.replace(job.statuses["b"], phase=NodePhase.FAILED, failure=KILLED)
        job.fail("a")
        assert job.plan.key.number == 2
        job.coordinator.receive(late, job.now)
        job.settle()
        assert (job.plan.key.number, job.plan.restart_count) == (2, 1)

    def test_a_window_forgives(self) -> None:
        job = trio(max_restarts=1, restart_window=60.0)
        for _ in range(5):
            job.fail("b")
            assert job.plan.phase is PlanPhase.TRAINING
            job.wait(61)
        job.fail("b")
        job.wait(59)
        job.fail("b")
        assert job.plan.phase is PlanPhase.FAILED
        assert job.plan.reasons[-1] == Code.RESTARTS_OF_WINDOW_USED(most=1, window=60.0)

    def test_what_a_window_has_forgiven_is_written_down(self) -> None:
        job = trio(max_restarts=1, restart_window=60.0)
        job.fail("b")
        job.wait(61)
        assert job.stored[-1].restart_times == ()
        job.wait(3600)
        job.succeed_by_another(6, with_journal=True)
        job.come_back("a", "b", "c")
        job.fail("b")
        assert job.plan.phase is PlanPhase.TRAINING

    def test_a_job_that_never_gets_to_work_stops_early_whatever_it_says(self) -> None:
        job = trio(max_restarts=100, early_failure_limit=3)
        for port in (4711, 4712):
            job.fail("b", Failure(1, "b", f"raised RuntimeError: cannot reach 127.0.0.1:{port}"), progressed=False)
            assert job.plan.phase is PlanPhase.TRAINING
        job.fail("b", progressed=False)
        assert job.plan.phase is PlanPhase.FAILED
        assert job.plan.reasons[1:] == (Code.EARLY_FAILURES(number=3),)

    def test_work_done_begins_the_early_count_again_and_a_lost_node_does_not(self) -> None:
        job = trio(max_restarts=100, early_failure_limit=3)
        for progressed in (False, False, True, False, False):
            job.fail("b", progressed=progressed)
            assert job.plan.phase is PlanPhase.TRAINING
        job.lose("c")
        job.wait(1.1)
        assert training(job, job.plan.key.number, "a", "b")
        job.fail("b", progressed=False)
        assert job.plan.phase is PlanPhase.FAILED

    def test_no_limit_is_no_limit(self) -> None:
        job = trio(max_restarts=100, early_failure_limit=0)
        for _ in range(50):
            job.fail("b", progressed=False)
        assert job.plan.phase is PlanPhase.TRAINING


class TestFreshStore:
    def test_every_round_has_another_port(self) -> None:
        job = trio(max_restarts=9)
        ports = {job.plan.store_port}
        for _ in range(5):
            job.fail("b")
            ports.add(job.plan.store_port)
        assert len(ports) == 6

    def test_a_rank_0_node_that_does_not_know_the_last_round_is_waited_for(self) -> None:
        job = trio()
        job.deaf = {"a"}
        job.fail("b")
        assert training(job, 2, "a", "b", "c")
        job.fail("b")
        assert job.plan.phase is PlanPhase.GATHERING
        assert job.plan.restart_count == 2
        job.hear_again("a")
        assert training(job, 3, "a", "b", "c")

    def test_two_rounds_in_succession_before_a_rank_0_node_knows_of_any(self) -> None:
        job = trio()
        first = job.plan.store_port
        job.deaf = {"a"}
        job.fail("c")
        second = job.plan.store_port
        job.lose("b")
        job.wait(2)
        assert job.plan.phase is PlanPhase.GATHERING
        job.hear_again("a")
        assert training(job, 3, "a", "c")
        assert len({first, second, job.plan.store_port}) == 3

    def test_a_leader_that_never_answers_fails_the_job_by_name(self) -> None:
        job = trio()
        job.deaf = {"a"}
        job.fail("b")
        job.fail("b")
        job.wait(599)
        assert job.plan.phase is PlanPhase.GATHERING
        job.wait(2)
        assert job.plan.phase is PlanPhase.FAILED
        assert job.plan.reasons == (Code.RANK0_SILENT(node="node 0 (a)", seconds=600.0),)

    def test_a_lost_leader_is_not_waited_for(self) -> None:
        job = trio()
        job.deaf = {"a"}
        job.fail("b")
        job.fail("b")
        job.lose("a")
        job.wait(2)
        assert training(job, 3, "c", "b")

    def test_a_node_that_missed_a_round_which_it_led_offers_another_port_first(self) -> None:
        job = VirtualJob(rules(1, 1))
        job.come("a")
        job.deaf = {"a"}
        job.fail("a")
        used = job.plan.store_port
        assert used == job.statuses["a"].port
        job.lose("a")
        job.wait(2)
        job.come_back("a")
        assert job.plan.phase is PlanPhase.GATHERING
        job.hear_again("a")
        assert training(job, 3, "a")
        assert job.plan.store_port != used


class TestWaking:
    def test_there_is_a_time_to_wake_for_each_thing_that_is_waited_for(self) -> None:
        job = VirtualJob(rules(2, 3, scale_up_delay=5.0))

        def due() -> float:
            time_ = job.coordinator.wake_at()
            assert time_ is not None
            return round(time_ - job.now, 1)

        job.come("a")
        assert due() == 600
        job.come("b")
        assert due() == 30
        job.wait(31)
        job.come("c")
        job.lose("c")
        assert due() == 1
        job.wait(2)
        job.lose("b")
        assert due() == 1
        job.wait(2)
        assert job.plan.phase is PlanPhase.GATHERING
        assert due() == 599

    def test_nothing_is_to_be_done_while_nothing_happens(self) -> None:
        job = trio()
        assert job.coordinator.wake_at() is None


class TestWords:
    def test_of_who_is_here_and_how_long_still(self) -> None:
        job = VirtualJob(rules(2, 4))
        job.come("a")
        assert (job.waiting.text, job.waiting.seconds) == ("1 node of 2 to 4 is here: a", 600)
        job.come("b", "c")
        assert (job.waiting.text, job.waiting.seconds) == ("3 nodes of 2 to 4 are here: a, b and c", 30)

    def test_nodes_on_one_machine_are_distinguished_by_the_ranks_that_they_were_given(self) -> None:
        job = VirtualJob(rules(3, 3))
        job.come("a", host="vm", preferred_rank=0)
        job.come("b", host="vm", preferred_rank=2)
        assert job.waiting.text == "2 nodes of 3 are here: node 0 (vm) and node 2 (vm); missing: node 1"

    @pytest.mark.parametrize(
        ("host", "rank", "name"),
        [
            ("gpu09", 2, "node 2 (gpu09)"),
            ("gpu09", None, "gpu09"),
            ("node 4", 1, "node 4"),
            ("", 1, "node 1 (host unknown)"),
        ],
    )
    def test_a_node_has_one_name(self, host: str, rank: int | None, name: str) -> None:
        assert node_name(host, rank) == name

    def test_of_who_is_missing(self) -> None:
        job = trio()
        job.lose("b", "c")
        job.wait(2)
        assert job.waiting.text == "1 node of 2 to 3 is here: node 0 (a); missing: node 1 (b) and node 2 (c)"

    def test_for_a_spare(self) -> None:
        job = trio(spares=1)
        job.come("d", "e")
        assert job.waiting.text == "3 nodes train; this one waits to step in, 2 spares in all (1 asked for)"
        assert job.waiting.seconds is None

    def test_for_a_newcomer_that_is_gathered(self) -> None:
        job = VirtualJob(rules(1, 3, scale_up_delay=10.0))
        job.come("a")
        job.wait(31)
        job.come("b")
        assert job.waiting.text == "1 node trains; this one takes part in the next round"
        assert job.waiting.seconds == 10

    def test_of_many_nodes_at_once(self) -> None:
        job = VirtualJob(rules(2, 7))
        job.come(*"abcdefg")
        job.lose(*"cdef")
        job.say("g", NodePhase.LEFT)
        job.wait(2)
        assert job.plan.reasons == (
            Code.LOST(names=("node 2 (c)", "node 3 (d)", "2 others"), number=4),
            Code.LEFT_ON_REQUEST(names=("node 6 (g)",), number=1),
        )


def at_work(nodes: int, phases: list[NodePhase]) -> tuple[Plan, dict[NodeKey, MemberState]]:
    """A round of so many nodes, of which the first ones have those phases."""
    members = tuple(Member(f"n{n}", "1", f"host{n}", 1) for n in range(nodes))
    plan = Plan(epoch=1, phase=PlanPhase.TRAINING, key=RoundKey(1, 1), members=members, reasons=sentence("x"))
    present = {}
    for n, seat in enumerate(rank_assignments(plan).values()):
        phase = phases[n] if n < len(phases) else NodePhase.RUNNING
        failure = Failure(n, f"host{n}", "failed") if phase is NodePhase.FAILED else None
        status = NodeReport(
            node_id=f"n{n}",
            incarnation="1",
            host=f"host{n}",
            address="x",
            port=n + 1,
            workers=1,
            phase=phase,
            ranks=seat,
            known_round=plan.key,
            epoch=1,
            failure=failure,
        )
        present[status.key] = MemberState(
            status, 0.0, 0.0, succeeded=plan.key if phase is NodePhase.SUCCEEDED else None
        )
    return plan, present


PHASES = [NodePhase.RUNNING, NodePhase.FAILED, NodePhase.SUCCEEDED, NodePhase.LEAVING, NodePhase.LEFT]


@given(st.lists(st.sampled_from(PHASES), min_size=1, max_size=6), st.integers(0, 2), st.data())
def test_the_order_of_the_statuses_does_not_matter_and_deciding_twice_changes_nothing(
    phases: list[NodePhase], budget: int, data: st.DataObject
) -> None:
    plan, present = at_work(len(phases), phases)
    job_rules = rules(1, 6, max_restarts=budget)
    plan = decide(policy_of(job_rules), plan, present, 100.0).plan
    shuffled = dict(data.draw(st.permutations(list(present.items()))))
    again, _ = at_work(len(phases), phases)
    assert decide(policy_of(job_rules), again, shuffled, 100.0).plan == plan
    assert decide(policy_of(job_rules), plan, shuffled, 100.0).plan == plan
    assert plan.restart_count <= budget


STEPS = st.lists(
    st.tuples(st.sampled_from(["come", "lose", "back", "fail", "peer", "succeed", "leave", "wait"]), st.integers(0, 5)),
    max_size=25,
)


@settings(max_examples=150)
@given(STEPS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 2))
def test_any_order_of_events_keeps_the_rules(steps: list[tuple[str, int]], least: int, budget: int, unit: int) -> None:
    job = VirtualJob(rules(least, 4, max_restarts=budget, node_unit=unit, pend_timeout=60.0, join_timeout=60.0))
    failures = 0
    for step, number in steps:
        name = f"n{number}"
        known, is_away = name in job.statuses, name in job.away
        number_before = job.plan.key.number
        if step == "come" and (not known or is_away):
            job.come(name, incarnation=str(len(job.stored)) + str(job.now))
        elif step == "lose" and known and not is_away:
            job.lose(name)
        elif step == "back" and known and is_away:
            job.come_back(name)
        elif step in ("fail", "peer") and known and job.statuses[name].phase is NodePhase.RUNNING:
            failures += 1
            job.fail(name, KILLED if step == "fail" else LOST_PEER)
        elif step == "succeed" and known and job.statuses[name].phase is NodePhase.RUNNING:
            job.succeed(name)
        elif step == "leave" and known:
            job.say(name, NodePhase.LEAVING)
        elif step == "wait":
            job.wait(3.0**number / 3)
        assert job.plan.restart_count <= min(failures, budget)
        if job.plan.key.number > number_before:
            size = len(job.plan.members)
            assert least <= size <= 4
            assert size % unit == 0
        due = job.coordinator.wake_at()
        assert due is None or due > job.now


def test_deciding_for_two_thousand_nodes_takes_moments() -> None:
    """Linear: ten times the nodes are about ten times the work, far from a hundred times."""

    def calls(nodes: int) -> int:
        plan, present = at_work(nodes, [])
        return calls_of(lambda: decide(policy_of(rules(1, nodes)), plan, present, 1.0))

    assert calls(2000) < 20 * calls(200)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"min_nodes": 0}, "1 to 20000 nodes"),
        ({"min_nodes": 3, "max_nodes": 2}, "not 3 to 2"),
        ({"min_nodes": 3, "max_nodes": 3, "node_unit": 2}, "no multiple of 2"),
        ({"join_timeout": -1.0}, "below 0"),
        ({"last_call_timeout": float("inf")}, "not finite"),
        ({"keep_alive_attempts": 0}, "an interval and an attempt"),
    ],
)
def test_rules_that_no_job_can_have_are_reported(wrong: dict[str, float], words: str) -> None:
    problem = JobRules(**{"min_nodes": 1, "max_nodes": 4, **wrong}).problem()  # type: ignore[arg-type]
    assert problem is not None
    assert words in problem
