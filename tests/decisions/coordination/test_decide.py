"""Every rule of rounds, in virtual time: when a round forms and with which nodes, what ends it, and what that costs."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.golden import assert_screens
from support.harness import calls_of
from support.virtual import play, texts
from support.virtual_torch import KILLED, LOST_PEER, TorchJob, rules

from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.decide import decide
from dlrover_run.coordination.decision import MAX_VALUE
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
    # What is waited for, and for how long.
    "a first round forms at once with the most nodes": (
        rules(1, 2), "come a; phase gathering; come b; round 1 a b; because nodes_here",
    ),
    "each newcomer begins the last call again": (
        rules(2, 4),
        "come a b; wait 29; come c; wait 29; phase gathering; wait 1.1; round 1 a b c;"
        "because nodes_here last_call_over",
    ),
    "a job to which too few nodes came fails": (
        TRIO, "come a; wait 599; phase gathering; wait 1.1; phase failed; because too_few_nodes",
    ),
    "the missing ranks are named where people gave them": (
        rules(4, 4), "come_ranked a=1 b=3; wait 600.1; phase failed; because too_few_nodes missing",
    ),
    "nothing is waited for without nodes": (
        rules(2, 2), "come a; lose a; wait 5000; phase gathering; due; come b; wait 500; come c; round 1 b c",
    ),
    "there is a time to wake for each thing that is waited for": (
        rules(2, 3, scale_up_delay=5.0),
        "come a; due 600; come b; due 30; wait 31; come c; lose c; due 1; wait 2; lose b; due 1; wait 2;"
        "phase gathering; due 599",
    ),
    "nothing is to be done while nothing happens": (TRIO, "come a b c; due"),
    "one node of several is here": (rules(2, 4), "come a; phase gathering"),
    "enough nodes are here": (rules(2, 4), "come a b c; phase gathering"),
    "two nodes are missing": (TRIO, "come a b c; lose b c; wait 2; phase gathering"),
    "more spares than asked for wait": (rules(2, 3, spares=1), "come a b c; come d e; round 1 a b c"),
    "a newcomer waits for others": (rules(1, 3, scale_up_delay=10.0), "come a; wait 31; come b; round 1 a"),
    "of many nodes that are lost some are named": (
        rules(2, 7), "come a b c d e f g; lose c d e f; left g; wait 2; because lost left_on_request",
    ),
    # Members that are lost, come back, or come.
    "a replacement for too few takes the free rank": (
        rules(3, 3), "come a b c; lose b; wait 1.1; phase gathering; come z; round 2 a z c; because lost",
    ),
    "another process under the same id replaces the first one at once": (
        TRIO, "come a b c; lose b; replace b; round 2 a b c; processes a.1 b.2 c.1; restarts 0",
    ),
    "below the minimum the job waits, and then names the missing nodes": (
        TRIO,
        "come a b c; lose b c; wait 599; phase gathering; wait 3; phase failed; because lost too_few_nodes missing",
    ),
    "a newcomer starts a larger round": (
        TRIO, "come a b c; lose c; wait 2; come d; round 3 a b d; because scaled_up; restarts 0",
    ),
    "a flood of losses is one round": (
        rules(1, 5), "come a b c d e; lose b; wait 0.5; lose c d; wait 3; round 2 a e; because lost",
    ),
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
    "a node that is requested to leave has its grace period": (
        TRIO, "come a b c; leaving b; wait 25; round 1 a b c; left b; round 2 a c; because left_on_request",
    ),
    "what the peers of a node that leaves fail of costs nothing": (
        TRIO, "come a b c; leaving b; lose_peer a; round 2 a c; restarts 0; failed; because asked_to_leave",
    ),
    "when the last node has left the job is over": (
        TRIO,
        "come a b c; leaving a b c; phase training; left a b c; phase failed; because left_on_request no_node_left",
    ),
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
    "a failure costs one restart whichever node reports it": (
        TRIO,
        "come a b c; deaf a b c; lose_peer a c; number 1; fail b; wait 10; receive a; receive b; receive c;"
        "round 2 a b c; restarts 1; failed b",
    ),
    "restarts end": (
        rules(2, 3, max_restarts=2),
        "come a b c; fail b; restarts 1; phase training; fail b; restarts 2; phase training; fail a;"
        "phase failed; restarts 2; because worker_failed restarts_used",
    ),
    "a failure after a loss is laid to the loss": (
        rules(2, 3, max_restarts=0), "come a b c; lose c; wait 0.2; fail a; wait 2; round 2 a b",
    ),
    "a connection that breaks before the blame of a lost peer is due is waited for": (
        TRIO, "come a b c; lose_peer a; wait 1.5; lose c; wait 0.9; number 1; wait 0.2; round 2 a b; restarts 0",
    ),
    "a window forgives": (
        rules(2, 3, max_restarts=1, restart_window=60.0),
        "come a b c;" + 5 * "fail b; phase training; wait 61;" + "fail b; wait 59; fail b; phase failed;"
        "because worker_failed restarts_of_window_used",
    ),
    "a leader that never answers fails the job by name": (
        TRIO, "come a b c; deaf a; fail b b; wait 599; phase gathering; wait 2; phase failed; because rank0_silent",
    ),
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


def test_what_people_read() -> None:
    screens = {title: texts(play(TorchJob(job_rules), script)) for title, (job_rules, script) in SCENARIOS.items()}
    assert_screens(Path(__file__).with_name("decide.txt"), screens)


def test_the_last_one_to_leave_ends_a_job_that_had_lost_the_others() -> None:
    play(trio(), "lose a b; wait 1.1; left c; phase failed")


def test_a_job_whose_nodes_were_all_lost_waits_for_others() -> None:
    play(trio(), "lose a b c; wait 2; phase gathering; wait 601; phase failed")


class TestFirstRound:
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


class TestLeaving:
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


class TestWords:
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
    assert lines[0].startswith("survivors changes the part of survivors from null to {")
    assert lines[1].startswith(
        'rounds changes phase from "training" to "gathering", since from 0.0 to 100.0, restart_count'
    )
    assert lines[3].startswith('rounds changes phase from "gathering" to "training", key from {')
    assert all(len(value) < MAX_VALUE + 60 for value in re.split(r" from | to ", "".join(lines)))
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
    assert [
        line
        for line in job.coordinator.take_log_lines()
        if line.startswith('debug: a request changes phase from "training" to "failed"')
    ]
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
