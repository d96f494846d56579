"""The node check inside decisions, in virtual time: when it begins, which nodes it waits for, and what follows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.golden import assert_screens
from support.node_truth import Truth
from support.policy_parts import check_part, check_report, check_state, fold
from support.virtual import play, texts
from support.virtual_torch import TorchJob, rules

from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.records.validation import validate_report
from dlrover_run.features.node_check.decision.model import (
    CheckKey,
    ComputeResult,
    DeviceSpeed,
    HealthStatus,
    LinkResult,
    LinkResults,
    NodeCheckProgress,
    NodeCheckReport,
    NodeHealth,
)
from dlrover_run.features.node_check.decision.round import CHECK_MARGIN, check_status
from dlrover_run.features.node_check.decision.steps import MAX_REMEMBERED
from dlrover_run.features.node_check.rules import CHECK_ALWAYS, CHECK_NEVER, CHECK_ONCE
from dlrover_run.features.node_check.text import NodeCheckCode
from dlrover_run.transport.messages import InvalidMessage, Report, decode_from_node, encode
from dlrover_run.words.reasons import Code

TIMEOUT = 40.0


def checked_job(least: int, most: int, truth: Truth | None = None, **changes: object) -> TorchJob:
    return TorchJob(once(least, most, **changes), truth=truth or Truth())


def health(job: TorchJob) -> dict[str, HealthStatus]:
    return {node_health.node_id: node_health.status for node_health in check_state(job.plan).health}


def node_health(job: TorchJob, name: str) -> NodeHealth:
    found = check_part(job.assignment(name)).health
    assert found is not None
    return found


def trains(job: TorchJob, *ranks: str) -> bool:
    return job.plan.phase is PlanPhase.TRAINING and job.ranks == list(ranks)


def once(least: int, most: int, **changes: object) -> JobRules:
    """Return the rules of a job whose nodes are checked once."""
    return rules(least, most, **{"check": CHECK_ONCE, "check_timeout": TIMEOUT, **changes})


CRASHES, WRONG, CUT, SLOW = Truth(crashing={"b.net"}), Truth(wrong={"b.net"}), Truth(cut={"d.net"}), {"d.net": 5.0}

SCENARIOS = {
    # Which nodes it names, and which nodes train.
    "without the flag nothing is checked": (
        once(2, 2, check=CHECK_NEVER), Truth(), "come a b; round 1 a b; checks 0; named",
    ),
    "a node at fault stays dismissed while it is here": (
        once(2, 4), CRASHES, "come a b c d; fail a; round 2 a c d; lose d; wait 2; round 3 a c; dismissed b",
    ),
    "a node that reaches no other node is at fault": (
        once(3, 4), CUT, "come a b c d; round 1 a b c; named d=fault; dismissed d",
    ),
    "a dismissed node that never leaves does not block the job": (
        once(1, 1, pend_timeout=100.0), CRASHES,
        "come b; dismissed b; wait 99; phase gathering; wait 2; phase failed; dismissed b",
    ),
    "a single node is checked alone": (once(1, 1), Truth(), "come a; round 1 a; checks 1; named"),
    "a single node that fails is dismissed, and its job is over": (
        once(1, 1), CRASHES, "come b; dismissed b; gone b; phase failed; because health.dismissed no_node_left",
    ),
    "a node at fault leaves and the others train": (
        once(3, 4), CRASHES,
        "come a b c d; round 1 a c d; named b=fault; dismissed b; because health.dismissed nodes_left",
    ),
    "healthy nodes wait for a replacement and name the dismissed node": (
        once(2, 2, pend_timeout=100.0), WRONG,
        "come a b; phase gathering; gone b; because health.dismissed; wait 99; phase gathering; come c; round 1 a c;"
        "named b=fault",
    ),
    "without a replacement the job fails with a reason": (
        once(2, 2, pend_timeout=100.0), WRONG,
        "come a b; gone b; wait 101; phase failed; because health.dismissed too_few_nodes",
    ),
    "a straggler trains": (
        once(3, 4), Truth(slowness=SLOW), "come a b c d; round 1 a b c d; named d=straggler; dismissed",
    ),
    "a straggler leaves where it is to be excluded": (
        once(3, 4, exclude_stragglers=1), Truth(slowness=SLOW),
        "come a b c d; round 1 a b c; named d=straggler; dismissed d",
    ),
    "no node is blamed for a bad link": (
        once(4, 4), Truth(bad={frozenset({"a.net", "b.net"})}), "come a b c d; round 1 a b c d; named",
    ),
    "two nodes that do not reach each other train": (once(2, 2), Truth(cut={"b.net"}), "come a b; round 1 a b; named"),
    # Its rounds.
    "it waits for nodes that have not computed": (
        once(2, 2), Truth(), "mute b; come a b; phase gathering; check",
    ),
    "a node whose connection breaks for a moment still counts": (
        once(2, 3, lost_after=5.0), CUT,
        "mute d; come a b; come_computed d; lose d; wait 2; check runs; unmute d; back d; round 1 a b; named d=fault",
    ),
    "a node that was lost and has reconnected is checked again": (
        once(2, 3), Truth(), "mute a c; come_computed a b c; lose c; wait 5; back c; unmute a c; round 1 a b c; named",
    ),
    "another process under a name in the check is checked after it": (
        once(2, 3), Truth(),
        "mute c; come a b; come_computed c; lose c; mute; unmute c; replace c; round 1 a b c; checks 2; named",
    ),
    "a job whose nodes all leave during the check is over": (
        once(2, 2), Truth(), "mute a b; come_computed a b; check runs; gone a b; phase failed; check",
    ),
    "the time of a check is no part of the time in which nodes may come": (
        once(2, 2, join_timeout=60.0, pend_timeout=60.0), Truth(),
        f"come a; wait 30; mute a b; come_computed b; wait {TIMEOUT}; check runs; lose b; wait 20; phase gathering;"
        "wait 60; phase failed",
    ),
    # Replacements.
    "a spare steps in at once for a node that is dismissed": (
        once(3, 3, spares=1), WRONG, "come a b c d; number 1; phase training; checks 1; named b=fault",
    ),
    "a unit of nodes trains without the partner of a dismissed one": (
        once(2, 4, node_unit=2), WRONG, "come a b c d; round 1 a c; named b=fault; come e; round 2 a c d e",
    ),
    "a replacement that came before the result steps in": (
        once(2, 2), WRONG, "mute c; come c; come a b; phase gathering; unmute c; compute c; round 1 a c",
    ),
    "each bad replacement gives the next one its time": (
        once(2, 2, pend_timeout=100.0), Truth(wrong={"b.net", "c.net"}),
        "come a b; gone b; wait 80; come c; gone c; wait 80; phase gathering; named b=fault c=fault;"
        "because health.dismissed health.dismissed; come d;"
        "round 1 a d",
    ),
    # Once a round trains.
    "a restart checks no node again": (once(2, 2), Truth(), "come a b; fail a; number 2; checks 1"),
    "a newcomer is checked alone before the others are stopped": (
        once(2, 4), Truth(), "come a b c; wait 31; round 1 a b c; come d; round 2 a b c d; checks 2; named",
    ),
    "a bad newcomer stops no node": (
        once(2, 4), CRASHES, "come a c d; wait 31; come b; round 1 a c d; dismissed b",
    ),
    "a spare is checked before it steps in": (
        once(2, 2), CRASHES, "come a c; come b d; named b=fault; lose a; wait 2; round 2 d c",
    ),
    "a newcomer that still computes delays no round": (
        once(2, 4), Truth(), "come a b c; wait 31; mute d; come d; fail a; round 2 a b c",
    ),
    "when a round ends newcomers in a check beside it link first": (
        once(2, 3), Truth(slowness=SLOW),
        "come a b c; mute d; come d; compute d; lose c; wait 1.5; unmute d; round 2 a b d",
    ),
    "what is known of a process goes with it": (
        once(1, 3), Truth(),
        "come a b c; lose c; wait 2; round 2 a b; known a.1 b.1; replace c; round 3 a b c; known a.1 b.1 c.2",
    ),
    "a check beside training ends with the job": (
        once(2, 3), Truth(slowness=SLOW), "come a b; wait 31; mute d; come d; succeed a b; phase finished; check",
    ),
    # Nodes that were started without the flag.
    "a node without the flag trains unchecked": (
        once(3, 4), Truth(), "come a; come_unchecked c; come b d; round 1 a b c d; named c=unchecked",
    ),
    "it is reported once though each round is checked": (
        once(3, 3, check=CHECK_ALWAYS), Truth(),
        "come a b; come_unchecked c; fail a; round 2 a b c; checks 2; named c=unchecked",
    ),
    "no node is checked where none can be": (once(2, 2), Truth(), "come_unchecked a b; round 1 a b; checks 0"),
    "an unchecked node that comes later takes part in the next round": (
        once(2, 3), Truth(), "come a b; wait 31; come_unchecked c; round 2 a b c; checks 1; named c=unchecked",
    ),
    "a successor without a journal knows an unchecked node again": (
        once(2, 3), Truth(),
        "come a; come_unchecked b; wait 31; round 1 a b; successor; back a b; round 1 a b; named b=unchecked",
    ),
    # Dismissed nodes that were away, and successors.
    "a dismissed node that was away for a while stays dismissed": (
        once(2, 4), CUT, "come a b c d; lose d; wait 5; back d; wait 100; dismissed d; round 1 a b c",
    ),
    "a dismissed node stays dismissed for a successor with a journal": (
        once(2, 4), CUT,
        "come a b c d; lose d; wait 5; successor journal; back a b c; round 1 a b c; wait 20; back d; wait 20;"
        "dismissed d; round 1 a b c",
    ),
    "a successor does not wait for a dismissed node that is gone": (
        once(2, 3), WRONG, "come a; come b; wait 31; gone b; successor journal; back a; come c; round 1 a c",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("job_rules", "truth", "script"), SCENARIOS.values(), ids=SCENARIOS)
def test_what_follows_from_a_check(job_rules: JobRules, truth: Truth, script: str) -> None:
    play(TorchJob(job_rules, truth=truth), script)


def test_what_people_read() -> None:
    screens = {
        title: texts(play(TorchJob(job_rules, truth=truth), script))
        for title, (job_rules, truth, script) in SCENARIOS.items()
    }
    assert_screens(Path(__file__).with_name("checking.txt"), screens)


def test_a_lost_node_is_not_waited_for() -> None:
    script = "deaf a b c; come a b c; mute c; listen; wait 0; check runs; lose c; wait 1.5; round 1 a b; named"
    play(checked_job(2, 3), script)


def test_a_node_that_does_not_answer_in_a_round_has_failed_it() -> None:
    script = f"deaf a b c; come a b c; mute c; listen; wait 0; wait {3 * (TIMEOUT + CHECK_MARGIN)};"
    play(checked_job(2, 3), script + "round 1 a b; named c=fault")


def test_a_successor_goes_on_with_the_check() -> None:
    script = "mute d; come a b c; come_computed d; check runs; successor journal; mute; unmute d; back a b c d;"
    play(checked_job(3, 4, CRASHES), script + "round 1 a c d; named b=fault; checks 1")


def test_a_successor_without_a_journal_regards_training_nodes_as_checked() -> None:
    job = play(checked_job(2, 3), "come a b c; successor; back a b c; round 1 a b c")
    assert health(job) == dict.fromkeys("abc", HealthStatus.PASSED)
    play(job, "fail a; checks 0; number 2")


class TestBegin:
    def test_healthy_nodes_are_checked_and_train(self) -> None:
        job = checked_job(4, 4)
        job.come("a", "b", "c", "d")
        assert trains(job, "a", "b", "c", "d")
        assert set(health(job).values()) == {HealthStatus.PASSED}
        assert check_state(job.plan).check is None
        assert job.plan.reasons == (Code.NODES_HERE(number=4),)
        assert [node_health(job, name).gigabytes for name in "abcd"] == [10.0] * 4

    def test_a_node_that_never_computes_gets_a_second_task_and_is_then_at_fault(self) -> None:
        job = checked_job(2, 3)
        job.mute = {"c"}
        job.come("a", "b", "c")
        job.wait(TIMEOUT + CHECK_MARGIN - 1)
        assert check_state(job.plan).check is None
        job.wait(2)
        assert check_part(job.assignment("c")).check_task is not None
        assert job.plan.reasons == (NodeCheckCode.CHECKING(number=3, round=0),)
        assert job.waiting.text == "node check, round 0: 2 of 3 nodes have answered; missing: c"
        assert [row.node_id for row in NodeCheckProgress.get(job.waiting.parts).rows] == ["a", "b", "c"]
        job.wait(TIMEOUT + CHECK_MARGIN)
        assert node_health(job, "c").status is HealthStatus.FAULT
        assert "did not answer for 55 s" in node_health(job, "c").reason
        assert trains(job, "a", "b")

    def test_a_task_names_the_ends_of_each_link_and_is_the_same_for_both(self) -> None:
        job = checked_job(3, 3)
        job.deaf = {"a", "b", "c"}
        job.come("a", "b", "c")
        tasks = {name: check_part(job.assignment(name)).check_task for name in "abc"}
        links = {name: [tuple(end.node for end in link) for link in task.links] for name, task in tasks.items() if task}
        assert links == {"a": [(0, 1), (0, 2)], "b": [(0, 1), (1, 2)], "c": [(0, 2), (1, 2)]}
        task = tasks["c"]
        assert task is not None
        assert (task.node, task.compute, task.timeout) == (2, False, TIMEOUT)
        assert [end.address for end in task.links[0]] == ["a.net", "c.net"]


class TestResultsOfTheCheck:
    def test_rank_0_receives_all(self) -> None:
        job = checked_job(4, 4, measure_links=1)
        job.come("a", "b", "c", "d")
        assignment = job.assignment("a")
        assert [row.node_id for row in check_part(assignment).health_table] == ["a", "b", "c", "d"]
        assert {(link.one, link.other) for link in check_part(assignment).link_table} == {
            (0, 1),
            (0, 2),
            (0, 3),
            (1, 2),
            (1, 3),
            (2, 3),
        }
        assert check_part(job.assignment("b")).health_table == check_part(job.assignment("b")).link_table == ()

    @pytest.mark.long
    def test_of_very_many_rank_0_receives_the_most_urgent_ones(self) -> None:
        names = [f"n{number}" for number in range(70)]
        job = checked_job(66, 70, Truth(slowness={"n69.net": 4.0}))
        job.come(*names)
        assert job.lines[0].count(": ") == 65
        others = check_part(job.assignment("n0")).health_table
        assert len(others) == 64
        assert [row.node_id for row in others][-1] == "n69"


class TestRound:
    def test_an_answer_to_another_task_does_not_count(self) -> None:
        job = checked_job(2, 2)
        job.mute = {"a", "b"}
        job.come("a", "b", compute_result=Truth().compute("a.net"))
        stale = LinkResults(CheckKey(1, 1, 0), (LinkResult(1, 9.0),))
        for name in "ab":
            job.report(name, link_result=stale)
        job.settle()
        assert check_state(job.plan).check is not None

    def test_nonsense_about_links_is_ignored(self) -> None:
        job = checked_job(2, 2)
        job.mute = {"a"}
        job.come("a", "b", compute_result=Truth().compute("a.net"))
        assert check_state(job.plan).check is not None
        results = LinkResults(
            check_state(job.plan).check.key, (LinkResult(77, 9.0), LinkResult(0, 3.0), LinkResult(1, 5.0))
        )
        job.report("a", link_result=results)
        job.settle()
        assert trains(job, "a", "b")
        assert [row.gigabytes for row in check_state(job.plan).health] == [5.0, 5.0]

    def answered(self, *tried: tuple[LinkResult, ...], problems: tuple[str, str, str] = ("", "", "")) -> TorchJob:
        """Three nodes, a group of three, with reports of this many of their links."""
        job = checked_job(3, 3)
        job.mute = {"a", "b", "c"}
        job.come("a", "b", "c", compute_result=Truth().compute("a.net"))
        check = check_state(job.plan).check
        assert check is not None
        for name, links, problem in zip("abc", tried, problems, strict=True):
            report = msgspec.structs.replace(
                job.statuses[name],
                parts=(
                    msgspec.structs.replace(
                        check_report(job.statuses[name]), link_result=LinkResults(check.key, links, problem)
                    ),
                ),
            )
            job.coordinator.receive(report, job.now)
        job.settle()
        return job

    def test_a_link_that_an_end_did_not_try_counts_for_nothing(self) -> None:
        # The processes of a hung in the link with b, so they never tried the link with c.
        hung, waited = LinkResult(1, problem="it hung"), LinkResult(0, problem="the other end did not come")
        job = self.answered((hung,), (waited, LinkResult(2, 9.0)), (waited, LinkResult(1, 9.0)))
        check = check_state(job.plan).check
        assert check is not None
        assert [(fact.ends, bool(fact.problem)) for fact in check.link_facts] == [((0, 1), True), ((1, 2), False)]
        assert check.compute_facts[3:] == ()
        assert check.groups == ((0, 2),)

    def test_a_link_that_failed_because_a_process_of_the_other_end_died_counts_for_nothing(self) -> None:
        waited = LinkResult(0, problem="the other end is gone")
        died = (LinkResult(1, problem="killed by SIGKILL"),)
        quick = LinkResult(2, 9.0), LinkResult(1, 9.0)
        job = self.answered(
            died, (waited, quick[0]), (waited, quick[1]), problems=("local rank 0 was killed by SIGKILL", "", "")
        )
        check = check_state(job.plan).check
        assert check is not None
        assert [fact.ends for fact in check.link_facts] == [(1, 2)]
        job.mute.clear()
        job.settle()
        assert trains(job, "a", "b", "c")
        words = "its check process failed once, in a link: local rank 0 was killed by SIGKILL"
        assert [row.reason for row in check_state(job.plan).health] == [words, "", ""]

    @pytest.mark.parametrize("silent_in", [0, 1])
    def test_a_successor_restarts_the_round(self, silent_in: int) -> None:
        job = checked_job(2, 6, Truth(cut={"f.net"}, crashing={"e.net"}))
        job.mute = {"a", "b", "c", "d", "f"}
        job.come("a", "b", "c", "d", "f", compute_result=Truth().compute("a.net"))
        job.come("e")
        for number in range(silent_in):
            assert check_state(job.plan).check is not None
            assert check_state(job.plan).check.key.round == number
            for name in "abcdf":
                job.mute.discard(name)
                job.try_task(name)
                job.mute.add(name)
            job.settle()
        before = check_state(job.plan).check
        assert before is not None
        # Some nodes receive their task long before the others, and find no partner.
        task = check_part(job.assignment("a")).check_task
        if task is not None:
            alone = tuple(LinkResult(end.node, problem="it did not come") for link in task.links for end in link[1:])
            job.report("a", link_result=LinkResults(task.key, alone))
        job.succeed_by_another(9, with_journal=True, after=20.0)
        job.come_back("a", "b", "c", "d", "e", "f")
        job.mute.clear()
        job.settle()
        assert check_state(job.plan).check_count == 1
        assert trains(job, "a", "b", "c", "d")
        assert {name for name, status_of in health(job).items() if status_of is HealthStatus.FAULT} == {"e", "f"}
        assert not any("does not work" in line for line in job.lines)

    def test_no_task_belongs_to_an_earlier_round_than_a_node_knows_of(self) -> None:
        job = checked_job(2, 3)
        job.come("a", "b", "c")
        job.deaf = {"c"}
        job.fail("a")
        known_round = job.statuses["a"].known_round
        assert known_round.number == 2
        job.succeed_by_another(9, with_journal=False)
        job.deaf.clear()
        job.come_back("c")
        job.wait(7)
        job.deaf = {"a", "b", "c", "d"}
        job.come_back("a", "b")
        job.come("d")
        job.wait(5)
        assert check_part(job.assignment("a")).check_task is not None
        assert job.assignment("a").key >= known_round

    def test_when_no_node_is_left_nothing_is_reported_of_the_check(self) -> None:
        job = checked_job(1, 1)
        job.mute = {"a"}
        job.come("a", compute_result=Truth().compute("a.net"), workers=2)
        assert check_state(job.plan).check is not None
        job.leave("a")
        assert check_state(job.plan).check is None
        assert job.lines == []

    def test_a_failed_node_is_shown_while_the_check_is_running(self) -> None:
        job = checked_job(2, 4, Truth(wrong={"b.net"}, slowness={"c.net": 5.0}))
        job.come("a", "b", "c", "d")
        rows = {}
        for plan in job.stored:
            if check_state(plan).check is not None:
                rows[check_state(plan).check.key.round] = [
                    (row.status.value, row.reason) for row in check_status(check_state(plan).check, {})
                ]
        nothing, fault = ("pending", ""), ("fault", "computes wrongly: a product was off by 3")
        assert rows == {
            0: [nothing, ("pending", "a product was off by 3"), nothing, nothing],
            1: [nothing, fault, nothing, nothing],
        }
        assert (node_health(job, "b").status, node_health(job, "c").status) == (
            HealthStatus.FAULT,
            HealthStatus.STRAGGLER,
        )


class TestReplacement:
    def test_one_that_broke_since_the_last_round_is_found_where_each_is_checked(self) -> None:
        job = checked_job(2, 3, check=CHECK_ALWAYS)
        job.come("a", "b", "c")
        assert job.truth is not None
        job.truth.crashing.add("b.net")
        job.fail("a")
        assert trains(job, "a", "c")
        assert node_health(job, "b").status is HealthStatus.FAULT


class TestCheckAlways:
    def test_always_checks_before_each_round_and_computes_again(self) -> None:
        job = checked_job(2, 2, check=CHECK_ALWAYS)
        job.come("a", "b")
        assert check_state(job.plan).check_count == 1
        assert job.truth is not None
        job.truth.slowness["b.net"] = 8.0
        job.fail("a")
        assert job.plan.key.number == 2
        assert check_state(job.plan).check_count == 2
        assert node_health(job, "b").status is HealthStatus.STRAGGLER

    def test_a_slow_newcomer_computes_again_beside_the_others(self) -> None:
        job = checked_job(2, 4, Truth(slowness={"d.net": 5.0}), exclude_stragglers=1)
        job.come("a", "b", "c")
        job.wait(31)
        job.mute = {"d"}
        job.come("d", compute_result=job.truth and job.truth.compute("d.net"))
        check = check_state(job.plan).check
        assert check is not None
        assert check.during_training
        task = check_part(job.assignment("d")).check_task
        assert task is not None
        assert (task.compute, task.links) == (True, ())
        assert trains(job, "a", "b", "c")
        job.mute.clear()
        job.settle()
        assert node_health(job, "d").status is HealthStatus.STRAGGLER
        assert job.plan.key.number == 1

    def test_a_round_that_is_resized_does_not_begin_the_check_of_a_spare_anew(self) -> None:
        job = checked_job(2, 3, Truth(slowness={"d.net": 5.0}), exclude_stragglers=1)
        job.come("a", "b", "c")
        job.wait(31)
        job.mute = {"d"}
        job.come("d", compute_result=job.truth and job.truth.compute("d.net"))
        before = check_state(job.plan).check
        assert before is not None
        job.scale("2")
        assert (job.ranks, job.plan.key.number) == (["a", "b"], 2)
        assert check_state(job.plan).check == before
        job.mute.clear()
        job.settle()
        assert node_health(job, "d").status is HealthStatus.STRAGGLER


class TestUnchecked:
    """Nodes that were started without the flag, in a job with a node check."""

    def test_no_node_links_with_it(self) -> None:
        job = checked_job(3, 4)
        job.deaf = {"a", "b"}
        job.come("a", "b")
        job.mute = {"c"}
        job.come("c", check_port=0)
        job.wait(31)
        check = check_state(job.plan).check
        assert check is not None
        assert [node.node_id for node in check.nodes] == ["a", "b"]
        assert check_part(job.assignment("c")).check_task is None
        job.deaf.clear()
        job.settle()
        assert trains(job, "a", "b", "c")


class TestDismissed:
    def test_another_process_under_its_name_is_checked_like_any_other(self) -> None:
        truth = Truth(wrong={"b.net"})
        job = checked_job(2, 2, truth)
        job.come("a", "b")
        job.leave("b")
        truth.wrong.clear()
        job.come("b", incarnation="2")
        assert trains(job, "a", "b")

    def test_of_very_many_that_have_gone_the_last_ones_are_remembered(self) -> None:
        names = [f"n{number}" for number in range(40)]
        job = checked_job(2, 2, Truth(wrong={f"{name}.net" for name in names}), pend_timeout=1000.0)
        job.come("a")
        for name in names:
            job.come(name)
            job.leave(name)
        job.wait(1)
        assert job.plan.phase is PlanPhase.GATHERING
        remembered = [name for name in names if name in health(job)]
        assert remembered == names[-MAX_REMEMBERED:]


def status(**changes: object) -> NodeReport:
    fields = {"node_id": "a", "incarnation": "1", "host": "a", "address": "a", "port": 1, "workers": 1, **changes}
    return NodeReport(**fold(NodeCheckReport, fields))


@pytest.mark.parametrize(
    "key", [CheckKey(-1, 0, 0), CheckKey(2**62 + 1, 0, 0), CheckKey(1, 2**32 + 1, 0)], ids=["before", "late", "many"]
)
def test_no_node_reports_a_task_that_was_not_assigned(key: CheckKey) -> None:
    for report in (status(compute_result=ComputeResult(key)), status(link_result=LinkResults(key))):
        assert validate_report(report, Plan()) is not None
    assert (
        validate_report(
            status(compute_result=ComputeResult(CheckKey(3, 4, 5)), link_result=LinkResults(CheckKey(3, 4, 5))), Plan()
        )
        is None
    )


@pytest.mark.parametrize("speed", ["NaN", "Infinity", "-Infinity", "1e999", "-1", "1e13", "null", '"1"'])
def test_only_a_speed_is_a_speed(speed: str) -> None:
    good = encode(Report(status(compute_result=ComputeResult(devices=(DeviceSpeed(0, "cpu", 12345.5),)))))
    assert isinstance(decode_from_node(good), Report)
    with pytest.raises(InvalidMessage):
        decode_from_node(good.replace(b"12345.5", speed.encode()))


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_no_healthy_node_is_dismissed_and_every_check_ends(data: st.DataObject) -> None:
    names = [f"n{number}" for number in range(data.draw(st.integers(1, 7)))]
    addresses = [f"{name}.net" for name in names]
    ailing = data.draw(st.lists(st.sampled_from(addresses), max_size=len(names) // 2, unique=True))
    truth = Truth()
    for address in ailing:
        data.draw(st.sampled_from([truth.crashing, truth.wrong, truth.cut])).add(address)
    check = data.draw(st.sampled_from([CHECK_ONCE, CHECK_ALWAYS]))
    job = checked_job(1, len(names), truth, exclude_stragglers=data.draw(st.integers(0, 1)), check=check)
    job.come(*names)
    lost = data.draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    job.lose(*lost)
    job.wait(1000)
    dismissed = {one.node_id for one in check_state(job.plan).health if one.dismissed}
    assert check_state(job.plan).check is None
    assert not {name for name in dismissed if truth.is_healthy(f"{name}.net")}
    for name in names:
        if f"{name}.net" in truth.crashing | truth.wrong and name not in lost:
            assert name in dismissed
        has_ranks = job.coordinator.ranks(job.key(name)) is not None
        assert has_ranks <= (name not in dismissed and name in health(job))
        if has_ranks:
            assert job.statuses[name].phase is NodePhase.RUNNING
