"""Changes of the coordinator: with a journal and without, stopped, late, and two at the same time."""

from __future__ import annotations

import msgspec
import pytest
from support.node_truth import Truth
from support.policy_parts import check_rules
from support.virtual import play
from support.virtual_torch import KILLED, TorchJob, rules

from dlrover_run.coordination.coordinator import OWN_EPOCHS, RETURN_GRACE, Coordinator
from dlrover_run.coordination.node_views import _NOT_SENT_APART, affects_nodes
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.round import Member, NodeKey, RoundKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.ranks import rank_assignments
from dlrover_run.coordination.rounds.recovery import recover_plan
from dlrover_run.features.node_check.decision.model import NodeCheckState
from dlrover_run.features.node_check.decision.round import CHECK_MARGIN
from dlrover_run.features.node_check.rules import CHECK_ONCE
from dlrover_run.words.reasons import Code

TRIO = "come a b c;"
"""A job that trains with a, b and c, and needs two."""


def trio(**changes: object) -> TorchJob:
    return play(TorchJob(rules(2, 3, **changes)), TRIO)


GRACE = f"wait {RETURN_GRACE - 0.1}; number 1; wait 0.2;"
"""The full time for which a successor waits for members to reconnect."""

SCENARIOS = {
    "with a journal a successor goes on in the same round": (
        (2, 3), TRIO + "successor journal; back a b c; wait 60; formed 5 1 a b c; phase training; epoch 9",
    ),
    "it waits for a grace before it declares a node lost": (
        (2, 3), TRIO + "successor journal; back a c;" + GRACE + "formed 9 2 a c; because lost; restarts 0",
    ),
    "a failure next to a loss while there was no coordinator is explained by the loss": (
        (2, 3), TRIO + f"successor journal; fail b; back a b; wait {RETURN_GRACE + 0.1}; round 2 a b; restarts 0",
    ),
    "it does not wait for members that had succeeded": (
        (2, 3),
        TRIO + "succeed b; lose b; wait 2; successor journal; back a c;"
        f"wait {RETURN_GRACE + 1}; number 1; succeed a c; phase finished",
    ),
    "no node is lost for a stall of the coordinator": (
        (2, 3), TRIO + "lose b; stall 300; number 1; back b; wait 100; number 1",
    ),
    "no other time runs out in a stall": (
        (2, 2), "come a; wait 400; stall 5000; wait 199; phase gathering; wait 2; phase failed",
    ),
    "a successor that sleeps in its grace waits for the rest of it": (
        (2, 3),
        TRIO + "successor journal; back a b; wait 4; stall 60; formed 5 1 a b c; back c; wait 30; formed 5 1 a b c",
    ),
    "a successor without a journal waits for the rest of its grace too": (
        (2, 3), TRIO + "successor; back a b; wait 4; stall 60; formed 0 0; back c; wait 30; formed 5 1 a b c",
    ),
    "without a journal a spare alone begins no job of its own": (
        (1, 1), "come a b; successor; back b; wait 3; number 0; back a; formed 5 1 a",
    ),
    "without a journal no job is recovered from nodes that were never in a round": (
        (2, 2), "come a; successor; back a; come b; formed 9 1 a b",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "script"), SCENARIOS.values(), ids=SCENARIOS)
def test_what_a_coordinator_makes_of_a_job(nodes: tuple[int, int], script: str) -> None:
    play(TorchJob(rules(*nodes)), script)


def test_it_receives_what_happened_without_a_coordinator() -> None:
    play(trio(), "successor journal; fail b; number 1; back a b; number 1; back c; round 2 a b c; restarts 1")


def test_a_failure_that_was_charged_already_is_charged_once() -> None:
    play(
        trio(),
        "deaf a b c; fail b; restarts 1; successor journal; listen; back a b c; wait 30; formed 5 2 a b c; restarts 1",
    )


def test_members_of_a_round_that_waits_keep_their_ranks() -> None:
    script = "lose a c; wait 2; phase gathering; successor journal; back b c; phase gathering;"
    play(trio(), script + f"wait {RETURN_GRACE + 0.1}; round 2 c b")


def test_a_running_job_is_recovered_as_soon_as_all_its_nodes_have_reported() -> None:
    play(trio(), "fail b; successor; back c a b; formed 5 2 a b c; restarts 1; epoch 9; wait 100; number 2")


def test_restarts_are_not_forgotten_between_two_rounds() -> None:
    script = "fail b; lose a b; wait 1.1; phase gathering; successor; back c;"
    play(trio(), script + f"wait {RETURN_GRACE + 0.1}; restarts 1")


def test_members_that_do_not_reconnect_are_lost_and_their_ranks_free() -> None:
    job = play(
        trio(), f"successor; back a c; wait {RETURN_GRACE - 0.1}; formed 0 0; wait 0.2; formed 9 2 a c; restarts 0"
    )
    assert job.plan.reasons == (Code.LOST(names=("node 1 (host unknown)",), number=1),)


def test_what_happened_meanwhile_is_reported() -> None:
    assert play(trio(), "successor; fail b; back a b c; formed 9 2 a b c; restarts 1").plan.failure == KILLED


def test_a_job_between_two_rounds_continues_with_the_nodes_that_connect() -> None:
    script = f"lose b c; wait 2; phase gathering; successor; back a; come d; wait {RETURN_GRACE + 0.1};"
    play(trio(), script + "formed 9 2 a d; phase training")


def test_a_round_that_only_some_received_is_followed_by_another() -> None:
    play(trio(), f"deaf c; fail b; successor; listen; back c a b; wait {RETURN_GRACE + 0.1}; formed 9 3 a b c")


def test_a_job_that_was_over_stays_so() -> None:
    job = play(trio(max_restarts=0), "fail b; successor journal")
    assert job.coordinator.wake_at() is None
    job.come_back("a")
    assert job.assignment("a").phase is PlanPhase.FAILED
    assert job.assignment("a").failure == KILLED


class TestWithAJournal:
    def test_a_round_that_no_node_received_is_sent_by_the_successor(self) -> None:
        job = trio()
        job.deaf = {"a", "b", "c"}
        job.lose("c")
        job.wait(2)
        assert job.plan.key.number == 2
        job.succeed_by_another(9, with_journal=True)
        job.deaf = set()
        job.come_back("a", "b")
        assert {job.ranks_of(name).key for name in "ab"} == {RoundKey(5, 2)}
        assert {job.statuses[name].known_round for name in "ab"} == {RoundKey(5, 2)}

    def test_job_time_goes_on_where_it_was(self) -> None:
        job = trio(max_restarts=1, restart_window=60.0)
        job.wait(100)
        job.fail("b")
        clock = job.stored[-1].clock
        job.succeed_by_another(9, with_journal=True)
        job.come_back("a", "b", "c")
        job.wait(50)
        job.fail("b")
        assert job.plan.phase is PlanPhase.FAILED
        assert clock + 49 < job.plan.clock < clock + 51

    def test_it_has_to_be_later_than_its_predecessor(self) -> None:
        with pytest.raises(ValueError, match="epoch 4 is not later than the plan's, 4"):
            Coordinator(rules(1, 1), 0.0, 4, Plan(epoch=4, key=RoundKey(4, 1)))


class TestWhatAWaitingNodeReceives:
    """What it receives follows from the deadline that concerns it, not from the next deadline of any decision."""

    @staticmethod
    def short_of_budget(least: int, most: int, **changes: object) -> TorchJob:
        """Return a job of two nodes that has used a restart, which expires after 60 s."""
        job = TorchJob(rules(least, most, restart_window=60.0, last_call_timeout=1.0, **changes))
        job.come("a", "b")
        job.wait(1.1)
        job.fail("b")
        assert job.plan.restart_count == 1
        return job

    def test_a_newcomer_counts_down_to_its_round_and_not_to_the_end_of_a_restart(self) -> None:
        job = self.short_of_budget(1, 4, scale_up_delay=30.0)
        job.wait(50)
        job.come("c")
        assert (job.waiting.text, job.waiting.seconds) == ("2 nodes train; this one takes part in the next round", 30)
        job.wait(30.1)
        assert len(job.ranks) == 3

    def test_a_node_that_waits_for_a_replacement_counts_down_to_the_failure_of_the_job(self) -> None:
        job = self.short_of_budget(2, 2, pend_timeout=600.0)
        job.wait(10)
        job.lose("a")
        job.wait(1.1)
        assert job.plan.phase is PlanPhase.GATHERING
        assert job.waiting.seconds == 600
        job.wait(595)
        assert (job.plan.phase, job.waiting.seconds) == (PlanPhase.GATHERING, 5)
        job.wait(6)
        assert job.plan.phase is PlanPhase.FAILED

    def test_a_newcomer_that_still_computes_is_not_informed_that_it_takes_part(self) -> None:
        job = TorchJob(rules(1, 3, check=CHECK_ONCE), truth=Truth())
        job.come("a", "b", "c")
        job.lose("c")
        job.wait(1.1)
        job.mute.add("d")
        job.come("d")
        waiting = job.waiting
        assert waiting.text == "2 nodes train; meanwhile the node check looks at those who have come"
        assert waiting.seconds == round(check_rules(job.rules).check_timeout + CHECK_MARGIN)

    def test_a_spare_has_no_countdown_while_a_member_may_be_lost(self) -> None:
        job = TorchJob(rules(1, 2, spares=1))
        job.come("a", "b", "c")
        job.lose("a")
        assert job.waiting.seconds is None
        assert "waits to step in" in job.waiting.text


@pytest.mark.parametrize("field", sorted({*Plan.__struct_fields__} - _NOT_SENT_APART))
def test_a_change_of_any_field_is_sent_to_the_nodes(field: str) -> None:
    """Also of a field that is added to the plan later, unless it is listed as a field that is not sent to nodes."""
    changed = msgspec.structs.replace(
        Plan(), **{field: (NodeCheckState(check_count=1),) if field == "parts" else object()}
    )
    assert affects_nodes(Plan(), changed)


class TestWithoutAJournal:
    @pytest.mark.parametrize("missing", [["a"], ["b"], ["a", "b"], ["a", "c"], ["b", "c"]])
    def test_nodes_keep_the_ranks_of_their_workers_though_others_did_not_come_back(self, missing: list[str]) -> None:
        job = trio()
        reports = [job.statuses[name] for name in "abc" if name not in missing]
        adopted = recover_plan(Plan(epoch=9), reports, grace_over=True)
        assert adopted is not None
        assert {
            key: ranks.first_rank for key, ranks in rank_assignments(adopted).items() if key.incarnation == "1"
        } == {status.key: status.ranks.first_rank for status in reports if status.ranks is not None}

    def test_while_some_are_missing_each_node_keeps_its_assignment(self) -> None:
        job = trio()
        ranks = job.ranks_of("a")
        job.succeed_by_another(9, with_journal=False)
        job.come_back("a")
        assignment = job.assignment("a")
        assert (assignment.phase, assignment.key, assignment.ranks, assignment.epoch) == (
            PlanPhase.TRAINING,
            RoundKey(5, 1),
            ranks,
            9,
        )
        assert job.statuses["a"].phase is NodePhase.RUNNING

    def test_an_epoch_that_is_higher_than_its_own_is_overtaken(self) -> None:
        job = trio()
        job.succeed_by_another(3, with_journal=False)
        job.come_back("a")
        assert job.plan.epoch == 5 + 1 + 3
        assert not job.coordinator.superseded
        job.come_back("b", "c")
        job.fail("b")
        assert job.plan.key == RoundKey(9, 2)

    def test_two_coordinators_that_overtake_the_same_epoch_get_different_epochs(self) -> None:
        status = NodeReport(node_id="a", incarnation="1", host="a", address="a", port=1, workers=1, epoch=10**9)
        epochs = set()
        for own in (5 * OWN_EPOCHS + 1, 5 * OWN_EPOCHS + 2):
            coordinator = Coordinator(rules(1, 2), 0.0, own)
            coordinator.receive(status, 0.0)
            assert coordinator.advance(0.0), "an epoch of another's is stored before it is sent to any node"
            epochs.add(coordinator.plan.epoch)
        assert len(epochs) == 2
        assert min(epochs) > 10**9

    def test_a_node_that_knows_a_later_round_than_we_do_can_lead(self) -> None:
        job = TorchJob(rules(1, 2))
        job.come("b")
        job.wait(31)
        job.deaf = {"b"}
        job.come("a")
        assert job.statuses["a"].known_round == RoundKey(5, 2)
        job.succeed_by_another(9, with_journal=False)
        job.come_back("b")
        assert job.plan.key == RoundKey(5, 1)
        job.deaf = {"a"}
        job.lose("b")
        job.come_back("a")
        job.wait(2)
        assert (job.plan.key, job.ranks) == (RoundKey(9, 2), ["a"])


class TestNextToEachOther:
    def test_one_that_was_asleep_notices_its_successor(self) -> None:
        job = trio()
        later = msgspec.structs.replace(job.statuses["a"], epoch=6)
        job.coordinator.receive(later, job.now)
        assert job.coordinator.superseded
        before = job.plan
        job.lose("b", "c")
        job.wait(100)
        assert job.plan is before
        assert job.coordinator.wake_at() is None

    def test_a_second_process_is_refused_while_the_first_is_connected(self) -> None:
        job = trio()
        twin = NodeKey("b", "2")
        assert job.coordinator.refusal(twin) == "node id b is in use by another process, on b, that is alive"
        assert job.coordinator.refusal(job.key("b")) is None
        job.lose("b")
        assert job.coordinator.refusal(twin) is None

    def test_the_first_is_refused_once_it_has_been_replaced(self) -> None:
        job = trio()
        first = job.key("b")
        job.lose("b")
        job.come("b", incarnation="2")
        assert job.coordinator.refusal(first) is not None


DISPUTES = {
    "members that are connected obey this one": ((2, 3), TRIO, "b"),
    "members may come back to it": ((2, 3), TRIO + "lose b c", "b"),
    "one of them is enough": ((2, 3), TRIO + "lose b; wait 2", "a"),
    "a spare obeys this one": ((1, 1), "come a b", "b"),
    "a member of a round that has just ended may come back": ((2, 3), TRIO + "fail b; lose a c", "a"),
    "no other node is known": ((1, 3), "come a", None),
    "a spare without a connection may have gone to the other": ((1, 1), "come a b; lose b", None),
    "a spare has never obeyed a coordinator": ((1, 1), "deaf b; come a b", None),
    "the others have left": ((1, 3), TRIO + "deaf a b c; left b c", None),
    "the others are lost": ((1, 3), TRIO + "deaf a; lose b c; wait 2; number 2", None),
    "the other has succeeded and gone": ((1, 2), "come a b; succeed b; lose b; wait 2", None),
    "it has formed no round": ((3, 3), "come a b", None),
    "it has waited for its lost nodes for long enough": ((3, 3), TRIO + "deaf a; lose c; wait 10", None),
    "it has waited for its lost nodes for a moment only": ((3, 3), TRIO + "deaf a; lose c; wait 2", "b"),
}  # fmt: skip
"""The node because of which a report that another coordinator is later is not believed, or None. It is the report of
node a, or of node c where a is the other."""


@pytest.mark.parametrize(("nodes", "script", "against"), DISPUTES.values(), ids=DISPUTES)
def test_a_later_coordinator_is_believed_only_if_no_other_node_may_obey_this_one(
    nodes: tuple[int, int], script: str, against: str | None
) -> None:
    job = play(TorchJob(rules(*nodes)), script)
    name = "c" if against == "a" else "a"
    report = msgspec.structs.replace(job.statuses[name], epoch=job.plan.epoch + 1)
    line = f"{name} obeys a later coordinator than the other nodes of the job, such as {against}"
    assert job.coordinator.dispute_epoch(report, job.now) == (line if against else None)
    same = msgspec.structs.replace(report, epoch=job.plan.epoch)
    assert job.coordinator.dispute_epoch(same, job.now) is None


def test_a_node_that_has_left_or_is_lost_disputes_no_coordinator_though_nothing_was_decided_since() -> None:
    job = play(TorchJob(rules(1, 2)), "come a b")
    later = msgspec.structs.replace(job.statuses["a"], epoch=6)
    assert job.coordinator.dispute_epoch(later, job.now) is not None
    job.coordinator.disconnect(job.key("b"), job.now)
    assert job.coordinator.dispute_epoch(later, job.now) is not None
    assert job.coordinator.dispute_epoch(later, job.now + job.rules.lost_after) is None
    job.coordinator.receive(msgspec.structs.replace(job.statuses["b"], phase=NodePhase.LEFT), job.now)
    assert job.coordinator.dispute_epoch(later, job.now) is None


EXPECTED = {
    "members, and spares that passed a node check": ("come a b c", {"a": "running", "b": "running", "c": "waiting"}),
    "no spare that failed it": ("come a b bad; dismissed bad", {"a": "running", "b": "running"}),
    "no member that has succeeded": ("come a b; succeed b; lose b; wait 2", {"a": "running"}),
    "no node of a job that is over": ("come a b c; succeed a b; phase finished", {}),
}  # fmt: skip


@pytest.mark.parametrize(("script", "expected"), EXPECTED.values(), ids=EXPECTED)
def test_the_nodes_that_a_successor_waits_for(script: str, expected: dict[str, str]) -> None:
    job = TorchJob(rules(2, 2, check=CHECK_ONCE, check_timeout=40.0), truth=Truth(wrong={"bad.net"}))
    play(job, f"{script}; successor journal")
    nodes = job.coordinator.nodes
    assert {key.node_id: state.report.phase.value for key, state in nodes.items()} == expected
    assert not any(state.connected or state.is_lost(state.joined_at) for state in nodes.values())
    job.wait(RETURN_GRACE + 1)
    assert not {key.node_id for key in job.coordinator.nodes} - {member.node_id for member in job.plan.members}


class TestLateness:
    def test_a_node_that_may_have_been_cut_off_is_waited_for(self) -> None:
        job = trio()
        job.coordinator.extend_grace(job.now)
        job.lose("b")
        job.wait(RETURN_GRACE - 0.1)
        assert job.plan.key.number == 1
        job.wait(0.2)
        assert job.ranks == ["a", "c"]


def test_a_report_without_news_is_ignored() -> None:
    job = trio()
    assert not job.coordinator.receive(job.statuses["a"], job.now)
    job.lose("a")
    assert job.coordinator.receive(job.statuses["a"], job.now), "it is back"


def test_a_node_that_left_is_forgotten_and_a_lost_spare_too() -> None:
    job = trio()
    job.come("d")
    job.lose("d")
    job.report_phase("c", NodePhase.LEFT)
    job.wait(2)
    assert set(job.coordinator.nodes) == {job.key("a"), job.key("b")}


@pytest.mark.parametrize(("nodes", "grace"), [(2, RETURN_GRACE), (2000, RETURN_GRACE + 10.0)])
def test_the_nodes_of_a_large_job_have_longer_to_come_back_to_a_new_master(nodes: int, grace: float) -> None:
    members = tuple(Member(f"n{number}", "1", "h", 1) for number in range(nodes))
    plan = Plan(epoch=1, key=RoundKey(1, 1), phase=PlanPhase.TRAINING, members=members)
    successor = Coordinator(JobRules(min_nodes=nodes, max_nodes=nodes), 0.0, 2, plan)
    times = [state.lost_at for state in successor.nodes.values()]
    assert times == pytest.approx([grace] * nodes, abs=0.1)
