"""Every rule of rounds, in virtual time: when a round forms and with which nodes, what ends it, and what that costs."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.harness import calls_of
from support.virtual import play
from support.virtual_torch import KILLED, LOST_PEER, TorchJob, rules

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.decide import decide
from dlrover_run.coordination.membership import KnownNode
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.requests import Action, OperatorRequest
from dlrover_run.coordination.records.round import (
    Failure,
    Member,
    NodeKey,
    RoundKey,
)
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.ranks import rank_assignments
from dlrover_run.features.node_check.rules import CHECK_ALWAYS, NodeCheckRules
from dlrover_run.features.registry import job_of
from dlrover_run.features.survivors.rules import SurvivorsRules
from dlrover_run.words.reasons import Code, sentence
from dlrover_run.words.text import node_name


def training(job: TorchJob, number: int, *ranks: str) -> bool:
    """Whether that round trains with these nodes in the order of their ranks."""
    return (job.plan.phase, job.plan.key.number, job.ranks) == (PlanPhase.TRAINING, number, list(ranks))


TRIO = rules(2, 3)


def trio(**changes: object) -> TorchJob:
    """A job that trains with a, b and c, and needs two."""
    return play(TorchJob(rules(2, 3, **changes)), "come a b c")


SCENARIOS = {
    # The first round.
    "a round never has more than the most nodes": (rules(1, 2), "come a b c; round 1 a b"),
    "a round is rounded down to the unit": (rules(2, 6, node_unit=2), "come a b c; wait 30.1; round 1 a b"),
    "a round is full at the largest multiple of the unit": (rules(1, 5, node_unit=2), "come a b c d; round 1 a b c d"),
    "the last call falls back to that of those who are left": (
        rules(1, 4), "come a; wait 20; come b; lose b; wait 10.1; round 1 a",
    ),
    "a round waits for a connection that has just broken": (
        rules(1, 4), "come a b; wait 29.5; lose b; wait 0.6; phase gathering; back b; round 1 a b",
    ),
    "a job does not wait forever for nodes that join and leave": (
        rules(3, 3),
        "come a; wait 180; come b; wait 5; lose a; wait 180; come c; wait 5; lose b; wait 180; come d; wait 5; lose c;"
        "phase gathering; wait 60; phase failed",
    ),
    # Members that are lost, come back, or come.
    "a lost node leaves a smaller round at once": (
        TRIO, "come a b c; lose b; wait 0.9; number 1; wait 0.2; round 2 a c; restarts 0; because lost",
    ),
    "nodes of one rack that are lost together cost one round": (
        rules(2, 4), "come a b c d; lose a c; wait 0.9; number 1; wait 0.2; round 2 d b; restarts 0; because lost",
    ),
    "a node that is back in time was never away": (
        TRIO, "come a b c; lose b; wait 0.9; back b; wait 100; round 1 a b c",
    ),
    "a replacement takes the free rank": (
        TRIO, "come a b c; lose a; wait 1.1; round 2 c b; come aa; round 3 c b aa",
    ),
    "a spare steps in at once": (TRIO, "come a b c; come d; round 1 a b c; left b; round 2 a d c"),
    "no node joins after the first success": (
        TRIO, "come a b c; lose c; wait 2; succeed a; come d; wait 100; round 2 a b; succeed b; phase finished",
    ),
    "a newcomer that makes no unit full is a spare": (
        rules(2, 4, node_unit=2), "come a b c; wait 31; round 1 a b; come d; round 2 a b c d",
    ),
    "newcomers are gathered for as long as was asked": (
        rules(1, 9, scale_up_delay=10.0), "come a; wait 31; come b; wait 6; come c; round 1 a; wait 4.1; round 2 a b c",
    ),
    "the last newcomer ends the gathering": (
        rules(1, 3, scale_up_delay=10.0), "come a; wait 31; come b c; round 2 a b c",
    ),
    # Members that leave.
    "the loss of a node that leaves is not waited for": (TRIO, "come a b c; leaving b; lose b; round 2 a c"),
    "a node that leaves gets no ranks": (
        TRIO, "come a b c; leaving b; lose c; wait 2; phase gathering; come d; round 2 a d",
    ),
    "a node that may come back keeps the job from its end": (
        TRIO, "come a b c; lose a; left b c; back a; phase gathering; come d; round 2 a d",
    ),
    "a node that goes after its workers succeeded is not missed": (
        TRIO, "come a b c; succeed b; leaving b; left b; wait 10; round 1 a b c; succeed a c; phase finished",
    ),
    # The end.
    "a job is finished when all workers have succeeded": (
        TRIO, "come a b c; succeed a b; phase training; succeed c; phase finished; because all_succeeded",
    ),
    "a node that is lost after the success of another one is missed": (
        TRIO, "come a b c; succeed b; lose c; wait 2; round 2 a b; succeed a; phase training",
    ),
    "a failure after the success of another node starts all workers again": (
        TRIO, "come a b c; succeed b; fail c; round 2 a b c; restarts 1",
    ),
    # The restart budget.
    "without restarts the first failure is the end": (
        rules(2, 3, max_restarts=0), "come a b c; fail b; phase failed; because worker_failed",
    ),
    "a change of membership is free and gives no restart back": (
        rules(2, 3, max_restarts=1),
        "come a b c; fail b; lose c; wait 2; back c; lose c; wait 2; back c; round 6 a b c; restarts 1;"
        "fail b; phase failed",
    ),
    "a failure while a connection was broken counts when that is back": (
        TRIO, "come a b c; lose c; wait 0.2; fail a; number 1; back c; round 2 a b c; restarts 1",
    ),
    "a node that only lost a peer waits for the cause": (
        rules(2, 3, max_restarts=0), "come a b c; lose_peer a; wait 0.5; lose b; wait 1.1; round 2 a c; restarts 0",
    ),
    "a lost peer that nothing explains counts": (
        TRIO, "come a b c; lose_peer a; wait 1.9; number 1; wait 0.2; round 2 a b c; restarts 1",
    ),
    "the end of a lease is waited for where only that shows a loss": (
        rules(2, 3, max_restarts=0, detection_delay=9.0),
        "come a b c; lose_peer a c; wait 9.0; lose b; wait 1.1; round 2 a c; restarts 0",
    ),
    "no node has vanished when every node has lost a peer": (
        rules(2, 3, detection_delay=9.0), "come a b c; lose_peer a b c; round 2 a b c; restarts 1",
    ),
    "one node waits for no cause": (rules(1, 1), "come a; lose_peer a; round 2 a"),
    "work that is done begins the early count again and a lost node does not": (
        rules(2, 3, max_restarts=100, early_failure_limit=3),
        "come a b c; fail_early b b; fail b; fail_early b b; phase training; lose c; wait 1.1; round 7 a b;"
        "fail_early b; phase failed",
    ),
    "no early limit": (
        rules(1, 1, max_restarts=100, early_failure_limit=0), "come a; fail_early a a a a a a a a; phase training",
    ),
    "restarts that have expired from the window are stored": (
        rules(2, 3, max_restarts=1, restart_window=60.0),
        "come a b c; fail b; wait 61; wait 3600; successor journal; back a b c; fail b; phase training",
    ),
    # A port that no round has used.
    "a node of rank 0 that does not know the last round is waited for": (
        TRIO,
        "come a b c; deaf a; fail b; round 2 a b c; fail b; phase gathering; restarts 2; receive a; round 3 a b c",
    ),
    "a lost node of rank 0 is not waited for": (
        TRIO, "come a b c; deaf a; fail b b; lose a; wait 2; round 3 c b",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("job_rules", "script"), SCENARIOS.values(), ids=SCENARIOS)
def test_what_follows_from_events(job_rules: JobRules, script: str) -> None:
    play(TorchJob(job_rules), script)


def test_the_last_one_to_leave_ends_a_job_that_had_lost_the_others() -> None:
    play(trio(), "lose a b; wait 1.1; left c; phase failed")


def test_a_job_whose_nodes_were_all_lost_waits_for_others() -> None:
    play(trio(), "lose a b c; wait 2; phase gathering; wait 601; phase failed")


class TestFirstRound:
    def test_forms_at_once_with_the_most_nodes(self) -> None:
        job = TorchJob(rules(1, 2))
        job.come("a")
        assert job.plan.phase is PlanPhase.GATHERING
        job.come("b")
        assert training(job, 1, "a", "b")
        assert job.plan.reasons == (Code.NODES_HERE(number=2),)

    def test_waits_for_a_last_call_that_each_newcomer_begins_again(self) -> None:
        job = TorchJob(rules(2, 4))
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

    def test_fails_when_too_few_came(self) -> None:
        job = TorchJob(rules(2, 3))
        job.come("a")
        job.wait(599)
        assert job.plan.phase is PlanPhase.GATHERING
        job.wait(1.1)
        assert job.plan.phase is PlanPhase.FAILED
        assert job.plan.reasons == (Code.TOO_FEW_NODES(seconds=600.0, number=1, least=2, names=("a",)),)

    def test_names_the_ranks_that_are_missing_where_people_gave_them(self) -> None:
        job = TorchJob(rules(4, 4))
        job.come("a", preferred_rank=1)
        job.come("b", preferred_rank=3)
        job.wait(600.1)
        assert job.plan.reasons == (
            Code.TOO_FEW_NODES(seconds=600.0, number=2, least=4, names=("node 1 (a)", "node 3 (b)")),
            Code.MISSING(names=("node 0", "node 2")),
        )

    def test_nothing_is_waited_for_without_nodes(self) -> None:
        job = TorchJob(rules(2, 2))
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
        job = TorchJob(rules(2, 2))
        job.come("b", port=70)
        job.come("a", port=60, epoch=job.plan.epoch)
        assert (job.plan.store_address, job.plan.store_port) == ("a.net", 60)

    def test_waits_for_a_port_that_was_offered_to_no_other_coordinator(self) -> None:
        job = TorchJob(rules(2, 2))
        job.deaf.add("a")
        job.come("a", port=60)
        job.come("b")
        assert job.plan.phase is PlanPhase.GATHERING, "one before this may have sent others a round at that port"
        job.deaf.clear()
        job.settle()
        assert training(job, 1, "a", "b")
        assert job.plan.store_port != 60

    def test_forms_on_the_store_that_flags_name(self) -> None:
        job = TorchJob(rules(2, 2, store=("10.0.0.1", 29500)))
        job.come("a", "b")
        assert (job.plan.store_address, job.plan.store_port) == ("10.0.0.1", 29500)
        job.fail("a")
        assert training(job, 2, "a", "b")
        assert (job.plan.store_address, job.plan.store_port) == ("10.0.0.1", 29500)


class TestMembership:
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

    def test_a_replacement_for_too_few_takes_the_free_rank(self) -> None:
        job = TorchJob(rules(3, 3))
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

    def test_below_the_minimum_the_job_waits_and_then_names_the_missing_nodes(self) -> None:
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

    def test_a_flood_of_losses_is_one_round(self) -> None:
        job = TorchJob(rules(1, 5))
        job.come("a", "b", "c", "d", "e")
        job.lose("b")
        job.wait(0.5)
        job.lose("c", "d")
        job.wait(3)
        assert training(job, 2, "a", "e")
        assert job.plan.reasons == (Code.LOST(names=("node 1 (b)", "node 2 (c)", "node 3 (d)"), number=3),)


class TestLeaving:
    def test_a_node_that_is_requested_to_leave_has_its_grace_period(self) -> None:
        job = trio()
        job.report_phase("b", NodePhase.LEAVING)
        job.wait(25)
        assert training(job, 1, "a", "b", "c")
        job.report_phase("b", NodePhase.LEFT)
        assert training(job, 2, "a", "c")
        assert job.plan.reasons == (Code.LEFT_ON_REQUEST(names=("node 1 (b)",), number=1),)

    def test_what_its_peers_fail_of_costs_nothing(self) -> None:
        job = trio()
        job.report_phase("b", NodePhase.LEAVING)
        job.fail("a", LOST_PEER)
        assert training(job, 2, "a", "c")
        assert (job.plan.restart_count, job.plan.failure) == (0, None)
        assert job.plan.reasons == (Code.ASKED_TO_LEAVE(names=("node 1 (b)",), number=1),)

    def test_when_the_last_node_has_left_the_job_is_over(self) -> None:
        job = trio()
        for name in "abc":
            job.report_phase(name, NodePhase.LEAVING)
        assert job.plan.phase is PlanPhase.TRAINING
        for name in "abc":
            job.report_phase(name, NodePhase.LEFT)
        assert job.plan.phase is PlanPhase.FAILED
        assert job.plan.reasons == (
            Code.LEFT_ON_REQUEST(names=("node 0 (a)",), number=1),
            Code.NO_NODE_LEFT(),
        )

    @pytest.mark.parametrize("lease", [0.0, 9.0], ids=["master", "etcd"])
    @pytest.mark.parametrize("gap", [0.0, 0.1, 0.45])
    @pytest.mark.parametrize("lost", ["a", "b", "c", "ab", "abc", ""])
    def test_what_becomes_of_a_job_does_not_depend_on_the_order_in_which_its_nodes_go(
        self, lost: str, gap: float, lease: float
    ) -> None:
        """With etcd the loss of a node is noticed when its lease has expired."""
        phases = set()
        for order in itertools.permutations("abc"):
            job = TorchJob(rules(1, 3, lost_after=0.0 if lease else 1.0))
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

    def test_a_node_that_cannot_start_its_workers_costs_a_restart_and_goes(self) -> None:
        job = trio()
        job.report_phase("b", NodePhase.LEFT, Failure(2, "b", "could not be started: no such file"))
        assert training(job, 2, "a", "c")
        assert job.plan.restart_count == 1
        assert job.plan.reasons == (
            Code.WORKER_FAILED(rank=2, node="node 1 (b)", what="could not be started: no such file"),
        )


class TestEnding:
    def test_a_lost_node_that_had_succeeded_is_not_missed(self) -> None:
        job = trio()
        job.succeed("b")
        job.lose("b")
        job.wait(50)
        assert training(job, 1, "a", "b", "c")
        assert [member.done for member in job.plan.members] == [False, True, False]
        assert job.key("b") not in job.coordinator.nodes
        job.succeed("a", "c")
        assert job.plan.phase is PlanPhase.FINISHED

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
        job.report_phase("a", NodePhase.FAILED, LOST_PEER)
        job.report_phase("c", NodePhase.FAILED, LOST_PEER)
        assert job.plan.key.number == 1
        job.fail("b")
        job.wait(10)
        for name in "abc":
            job.receive_again(name)
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

    def test_a_job_without_progress_stops_early_whatever_its_errors(self) -> None:
        job = trio(max_restarts=100, early_failure_limit=3)
        for port in (4711, 4712):
            job.fail("b", Failure(1, "b", f"raised RuntimeError: cannot reach 127.0.0.1:{port}"), progressed=False)
            assert job.plan.phase is PlanPhase.TRAINING
        job.fail("b", progressed=False)
        assert job.plan.phase is PlanPhase.FAILED
        assert job.plan.reasons[1:] == (Code.EARLY_FAILURES(number=3),)


class TestFreshStore:
    def test_every_round_has_another_port(self) -> None:
        job = trio(max_restarts=9)
        ports = {job.plan.store_port}
        for _ in range(5):
            job.fail("b")
            ports.add(job.plan.store_port)
        assert len(ports) == 6

    def test_two_rounds_in_succession_before_a_rank_0_node_knows_of_any(self) -> None:
        job = trio()
        first = job.plan.store_port
        job.deaf = {"a"}
        job.fail("c")
        second = job.plan.store_port
        job.lose("b")
        job.wait(2)
        assert job.plan.phase is PlanPhase.GATHERING
        job.receive_again("a")
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

    def test_a_node_that_missed_a_round_which_it_led_offers_another_port_first(self) -> None:
        job = TorchJob(rules(1, 1))
        job.come("a")
        job.deaf = {"a"}
        job.fail("a")
        used = job.plan.store_port
        assert used == job.statuses["a"].port
        job.lose("a")
        job.wait(2)
        job.come_back("a")
        assert job.plan.phase is PlanPhase.GATHERING
        job.receive_again("a")
        assert training(job, 3, "a")
        assert job.plan.store_port != used


class TestWaking:
    def test_there_is_a_time_to_wake_for_each_thing_that_is_waited_for(self) -> None:
        job = TorchJob(rules(2, 3, scale_up_delay=5.0))

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
    def test_nodes_that_are_here_and_the_time_left(self) -> None:
        job = TorchJob(rules(2, 4))
        job.come("a")
        assert (job.waiting.text, job.waiting.seconds) == ("1 node of 2 to 4 is here: a", 600)
        job.come("b", "c")
        assert (job.waiting.text, job.waiting.seconds) == ("3 nodes of 2 to 4 are here: a, b and c", 30)

    def test_nodes_on_one_machine_are_distinguished_by_the_ranks_that_they_were_given(self) -> None:
        job = TorchJob(rules(3, 3))
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

    def test_missing_nodes(self) -> None:
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
        job = TorchJob(rules(1, 3, scale_up_delay=10.0))
        job.come("a")
        job.wait(31)
        job.come("b")
        assert job.waiting.text == "1 node trains; this one takes part in the next round"
        assert job.waiting.seconds == 10

    def test_of_many_nodes_at_once(self) -> None:
        job = TorchJob(rules(2, 7))
        job.come(*"abcdefg")
        job.lose(*"cdef")
        job.report_phase("g", NodePhase.LEFT)
        job.wait(2)
        assert job.plan.reasons == (
            Code.LOST(names=("node 2 (c)", "node 3 (d)", "2 others"), number=4),
            Code.LEFT_ON_REQUEST(names=("node 6 (g)",), number=1),
        )


def at_work(nodes: int, phases: list[NodePhase]) -> tuple[Plan, dict[NodeKey, KnownNode]]:
    """Return a round of that many nodes, of which the first have those phases."""
    members = tuple(Member(f"n{n}", "1", f"host{n}", 1) for n in range(nodes))
    plan = Plan(epoch=1, phase=PlanPhase.TRAINING, key=RoundKey(1, 1), members=members, reasons=sentence("x"))
    present = {}
    for n, ranks in enumerate(rank_assignments(plan).values()):
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
            ranks=ranks,
            known_round=plan.key,
            epoch=1,
            failure=failure,
        )
        present[status.key] = KnownNode(status, 0.0, 0.0, succeeded=plan.key if phase is NodePhase.SUCCEEDED else None)
    return plan, present


PHASES = [NodePhase.RUNNING, NodePhase.FAILED, NodePhase.SUCCEEDED, NodePhase.LEAVING, NodePhase.LEFT]


@given(st.lists(st.sampled_from(PHASES), min_size=1, max_size=6), st.integers(0, 2), st.data())
def test_the_order_of_the_statuses_does_not_matter_and_deciding_twice_changes_nothing(
    phases: list[NodePhase], budget: int, data: st.DataObject
) -> None:
    plan, present = at_work(len(phases), phases)
    job_rules = rules(1, 6, max_restarts=budget)
    plan = decide(job_of(job_rules), plan, present, 100.0).plan
    shuffled = dict(data.draw(st.permutations(list(present.items()))))
    again, _ = at_work(len(phases), phases)
    assert decide(job_of(job_rules), again, shuffled, 100.0).plan == plan
    assert decide(job_of(job_rules), plan, shuffled, 100.0).plan == plan
    assert plan.restart_count <= budget


def test_a_decision_says_who_has_changed_what() -> None:
    job = job_of(rules(1, 2, max_restarts=1, parts=(SurvivorsRules(reconfigure_timeout=10.0),)))
    plan, present = at_work(2, [NodePhase.FAILED])
    decision = decide(job, plan, present, 100.0)
    # A round ends, and the next one begins: the observers look after each.
    assert [change.author for change in decision.changes] == ["survivors", "rounds"] * 2 + ["survivors"]
    lines = list(map(str, decision.changes))
    assert lines[0] == "survivors changes the part of survivors"
    assert lines[1].startswith("rounds changes phase, since, restart_count")
    assert lines[3].startswith("rounds changes phase, key")
    assert decide(job, decision.plan, present, 100.0).changes == ()
    assert job.order == "each decision asks survivors, rounds"


def test_a_change_by_the_gate_has_the_gate_as_its_author() -> None:
    job = job_of(rules(1, 2, max_restarts=1, parts=(NodeCheckRules(check=CHECK_ALWAYS),)))
    assert job.order == "each decision asks rounds, which asks the gate node_check"
    _, present = at_work(2, [])
    present = {
        key: msgspec.structs.replace(
            state,
            report=msgspec.structs.replace(state.report, phase=NodePhase.WAITING, ranks=None, known_round=RoundKey()),
        )
        for key, state in present.items()
    }
    decision = decide(job, Plan(), present, 100.0)
    assert [change.author for change in decision.changes] == ["node_check"]
    plan, present = at_work(2, [NodePhase.FAILED])
    authors = [change.author for change in decide(job, plan, present, 100.0).changes]
    assert authors[:3] == ["rounds", "node_check", "rounds"], "at the end of the round it forgets who has passed"


def test_the_debug_lines_of_a_coordinator_name_requests_and_recovery() -> None:
    job = TorchJob(rules(1, 2, max_restarts=1))
    job.coordinator.shows_changes = True
    job.come("a", "b")
    job.coordinator.take_log_lines()
    job.coordinator.request(OperatorRequest(Action.STOP), job.now)
    job.coordinator.advance(job.now)
    assert [line for line in job.coordinator.take_log_lines() if line.startswith("debug: a request changes phase")]
    found = Coordinator(rules(1, 2, max_restarts=1), 0.0, epoch=2)
    found.shows_changes = True
    _, present = at_work(2, [])
    for state in present.values():
        found.receive(state.report, 0.0)
    found.advance(0.0)
    assert [line for line in found.take_log_lines() if line.startswith("debug: recovery changes")]


def test_what_waiting_nodes_read_is_made_of_what_the_decision_has_looked_at() -> None:
    """A node that drains takes no part in the next round, so it is not counted among those that are here."""
    job = TorchJob(rules(3, 3))
    play(job, "come a b")
    plan = msgspec.structs.replace(job.plan, draining=(job.statuses["b"].key,))
    decision = decide(job_of(rules(3, 3)), plan, job.coordinator.nodes, job.now)
    assert decision.wait is not None
    waiting = decision.wait(decision.deadlines, job.now)
    assert waiting is not None
    assert waiting.reasons[0] == Code.NODES_OF(number=1, wanted="3")
    job.lose("a")
    assert decision.wait(decision.deadlines, job.now) == waiting, "of the nodes as they were"


STEPS = st.lists(
    st.tuples(st.sampled_from(["come", "lose", "back", "fail", "peer", "succeed", "leave", "wait"]), st.integers(0, 5)),
    max_size=25,
)


@settings(max_examples=150)
@given(STEPS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 2))
def test_any_order_of_events_keeps_the_rules(steps: list[tuple[str, int]], least: int, budget: int, unit: int) -> None:
    job = TorchJob(rules(least, 4, max_restarts=budget, node_unit=unit, pend_timeout=60.0, join_timeout=60.0))
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
            job.report_phase(name, NodePhase.LEAVING)
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
        return calls_of(lambda: decide(job_of(rules(1, nodes)), plan, present, 1.0))

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
