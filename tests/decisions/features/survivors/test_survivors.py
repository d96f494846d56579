"""Workers that outlive their round: what the coordinator sends the nodes, and what a node does with each worker."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.virtual import play
from support.virtual_torch import TorchJob, rules

from dlrover_run.coordination.membership import KnownNode
from dlrover_run.coordination.records.plan import Plan
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.coordination.records.validation import validate_report
from dlrover_run.features.registry import decode_part, job_of
from dlrover_run.features.survivors.model import (
    MAX_GROUP,
    MAX_UUID,
    Formation,
    Store,
    SurvivorsAssignment,
    SurvivorsReport,
    SurvivorsState,
    uuid_of,
)
from dlrover_run.features.survivors.observer import SurvivorsObserver, choose_store
from dlrover_run.features.survivors.rules import SurvivorsRules
from dlrover_run.features.survivors.text import SurvivorsCode
from dlrover_run.features.survivors.worker_record import (
    Step,
    WorkerRecord,
    ended_before_its_group,
    next_step,
    node_part,
)
from dlrover_run.words.reasons import codes, render

RULES = rules(2, 4, parts=(SurvivorsRules(reconfigure_timeout=10.0),), last_call_timeout=1.0)
OLDER = (SurvivorsCode.OLDER_TORCH(version="2.13.0"),)
UNABLE = {"older torch": OLDER, "no block": (SurvivorsCode.NO_BLOCK(worker="rank 0"),)}


class SurvivingJob(TorchJob):
    """A job whose nodes report stores and handles when a test says so. Each node has two workers."""

    def __init__(self) -> None:
        super().__init__(RULES)
        self.store_ports: dict[str, int] = {}

    def join(self, *names: str) -> None:
        """Nodes come that can run a store."""
        for port, name in enumerate(names, 7000 + len(self.store_ports)):
            self.store_ports[name] = port
            self.come(name, parts=(SurvivorsReport(port=port),))

    def say(self, name: str, **part: Any) -> None:
        """The workers of a node have something new for the round that it has received."""
        key = self.statuses[name].known_round
        whole = SurvivorsReport(key=key, port=self.store_ports.get(name, 0), store=self.part(name).store)
        self.report(name, parts=(replace(whole, **part),))

    def offer(self, *names: str, kept: int = 0) -> None:
        for name in names:
            number = self.statuses[name].known_round.number
            self.say(name, handles=tuple(f"{name}{rank} of {number}" for rank in (0, 1)), kept=kept)

    def part(self, name: str) -> SurvivorsAssignment:
        return SurvivorsAssignment.get(self.assignment(name).parts)

    @property
    def formation(self) -> Formation | None:
        return SurvivorsState.get(self.plan.parts).formation


def trained() -> SurvivingJob:
    """A job of two nodes whose first group has formed."""
    job = SurvivingJob()
    job.join("a", "b")
    job.wait(2)
    job.offer("a", "b")
    return job


def test_a_job_without_the_rule_has_no_such_observer() -> None:
    assert job_of(rules(1, 1, parts=(SurvivorsRules(),))).observers == {}
    assert type(job_of(RULES).observers["survivors"]) is SurvivorsObserver


def test_the_group_of_a_round_forms_once_all_workers_have_offered() -> None:
    job = SurvivingJob()
    job.join("a", "b")
    job.wait(2)
    assert job.plan.key.number == 1
    assert job.part("b") == SurvivorsAssignment(
        job.plan.key, Store("a", "1", "a.net", 7000), None, 10.0, job.part("b").start_timeout
    )
    job.offer("b")
    assert job.formation is None
    job.offer("a")
    found = job.part("a").formation
    assert found == Formation(job.plan.key, uuid_of(job.plan.key) or 0, ("a0 of 1", "a1 of 1", "b0 of 1", "b1 of 1"))
    assert job.part("b").formation == found


def test_a_failure_is_charged_and_the_next_group_has_another_uuid_and_the_same_store() -> None:
    job = trained()
    first = job.formation
    play(job, "fail b; round 2 a b; restarts 1")
    assert job.formation is None
    assert job.part("a").formation is None
    assert job.part("a").store == Store("a", "1", "a.net", 7000)
    job.offer("a", kept=2)
    job.offer("b", kept=1)
    assert first is not None
    assert job.formation is not None
    assert job.formation.uuid > first.uuid
    assert job.lines == [render((SurvivorsCode.KEPT(round=2, kept=3, of=4),))]


def test_handles_of_an_earlier_round_or_of_a_node_that_has_failed_do_not_count() -> None:
    job = trained()
    play(job, "fail b; number 2")
    old = tuple(f"a{rank} of 1" for rank in (0, 1))
    job.say("a", key=RoundKey(job.plan.epoch, 1), handles=old)
    job.offer("b")
    assert job.formation is None
    play(job, "deaf b")
    job.offer("a")
    assert job.formation is not None
    play(job, "listen; fail a; number 3")
    job.offer("b")
    # A worker of b has died since. The round goes on until it is known whether it only lost a peer.
    play(job, "lose_peer b; number 3")
    job.offer("a")
    assert job.formation is None


def test_a_node_that_is_away_holds_the_group_back() -> None:
    job = SurvivingJob()
    job.join("a", "b")
    job.wait(2)
    job.offer("a")
    job.lose("b")
    job.statuses["b"] = replace(
        job.statuses["b"], parts=(SurvivorsReport(job.plan.key, ("b0", "b1"), port=7001, store=job.part("b").store),)
    )
    assert job.formation is None
    play(job, "back b")
    assert job.formation is not None


def test_the_store_stays_until_its_node_is_lost_or_offers_another_port() -> None:
    job = SurvivingJob()
    job.join("a", "b", "c")
    job.wait(2)
    assert job.part("c").store == Store("a", "1", "a.net", 7000)
    play(job, "lose a; wait 2; round 2 c b")
    assert job.part("b").store == Store("c", "1", "c.net", 7002)
    job.join("d")
    play(job, "round 3 c b d; fail b; number 4")
    assert job.part("b").store == Store("c", "1", "c.net", 7002)
    job.store_ports["c"] = 7009
    job.say("c")
    play(job, "fail b; number 5")
    assert job.part("b").store == Store("c", "1", "c.net", 7009)


@pytest.mark.parametrize("case", ["older torch", "no block", "without", "all without"])
def test_one_worker_that_cannot_makes_it_a_round_of_today_and_one_line_says_why(case: str) -> None:
    job = SurvivingJob()
    for name in "ab":
        if case == "all without" or (case == "without" and name == "b"):
            job.come(name)
        else:
            job.join(name)
    job.wait(2)
    if case in UNABLE:
        job.say("b", unable=UNABLE[case])
    assert job.formation == Formation(job.plan.key)
    state = SurvivorsState.get(job.plan.parts)
    expected = {
        "older torch": "survivors.unable",
        "no block": "survivors.no_block",
        "without": "survivors.without",
        "all without": "survivors.without",
    }
    assert codes(state.why_not)[0] == expected[case]
    play(job, "fail a; number 2")
    if case in UNABLE:
        job.say("b", unable=UNABLE[case])
    assert job.formation == Formation(job.plan.key)
    assert len(job.lines) == 1, "it is said once"


def test_a_round_that_is_too_large_is_one_of_today() -> None:
    job = SurvivingJob()
    for name in "ab":
        job.come(name, parts=(SurvivorsReport(port=7000),), workers=MAX_GROUP // 2 + 1)
    for name in "ab":
        job.statuses[name] = replace(job.statuses[name], workers=MAX_GROUP // 2 + 1)
        job.report(name)
    job.wait(2)
    assert codes(SurvivorsState.get(job.plan.parts).why_not) == ("survivors.too_large",)


def test_a_coordinator_without_records_comes_to_the_same_group() -> None:
    job = trained()
    play(job, "fail b; number 2")
    job.offer("a", "b", kept=1)
    formation, store = job.formation, job.part("a").store
    job.succeed_by_another(9, with_journal=False)
    play(job, "back a b; wait 10; number 2")
    assert (job.formation, job.part("a").store) == (formation, store)


def test_a_coordinator_without_records_finds_the_store_in_the_reports() -> None:
    stores = [Store(name, "1", f"{name}.net", port) for port, name in enumerate("abc", 7000)]

    def state(own: Store, known: Store | None) -> KnownNode:
        part = SurvivorsReport(port=own.port, store=known)
        report = NodeReport(
            node_id=own.node_id, incarnation="1", host="h", address=own.address, port=0, workers=2, parts=(part,)
        )
        return KnownNode(report, 0.0, 0.0)

    a, b, c = stores
    assert choose_store(None, [state(a, None), state(b, b)]) == b
    assert choose_store(None, [state(a, c), state(b, c)]) == a, "its node is not here"
    assert choose_store(a, [state(b, b), state(a, a)]) == a
    assert choose_store(a, []) is None


def test_a_uuid_belongs_to_one_round() -> None:
    keys = [RoundKey(epoch, number) for epoch in (0, 1, 2**42 - 1) for number in (1, 2, 2**21 - 1)]
    uuids = [uuid_of(key) for key in keys]
    assert len(set(uuids)) == len(keys)
    assert all(uuid is not None and 0 < uuid <= MAX_UUID for uuid in uuids)
    assert [uuid_of(RoundKey(*key)) for key in ((1, 2**21), (2**42, 1), (0, 0))] == [None] * 3


def test_a_report_has_the_handles_of_all_workers_or_of_none() -> None:
    report = NodeReport(node_id="a", incarnation="1", host="a", address="", port=0, workers=2)
    for handles, is_valid in (((), True), (("x", "y"), True), (("x",), False), (("x", "x"), False)):
        sent = replace(report, parts=(SurvivorsReport(handles=handles, port=7000),))
        assert (validate_report(sent, Plan()) is None) is is_valid


def test_a_report_has_the_port_of_a_store() -> None:
    report = NodeReport(
        node_id="a", incarnation="1", host="a", address="", port=0, workers=2, parts=(SurvivorsReport(),)
    )
    assert validate_report(report, Plan()) == "a reports no port for the store of its workers"


def test_the_records_travel_and_all_nodes_have_the_long_part_in_common() -> None:
    job = trained()
    sent = job.assignment("a")
    assert msgspec.json.decode(msgspec.json.encode(sent), type=type(sent), dec_hook=decode_part) == sent
    assert msgspec.json.decode(msgspec.json.encode(job.plan), type=Plan, dec_hook=decode_part) == job.plan
    common, own = job.part("a").split()
    assert common == job.part("b")
    assert own.join(common) == job.part("a")


# What a node does with one worker.

ONE, TWO = RoundKey(5, 1), RoundKey(5, 2)
STORE = Store("a", "1", "a.net", 7000)
ELSEWHERE = replace(STORE, port=7001)
PART = SurvivorsAssignment(TWO, STORE, None, 10.0, 600.0)
IN_PLACE = replace(PART, formation=Formation(TWO, 7, ("x", "y")))
AS_TODAY = replace(PART, formation=Formation(TWO))
OLD = WorkerRecord(started=ONE, store=STORE, able=True, asked=ONE, offered=ONE, handle="w", informed=ONE, formed=ONE)
NEW = WorkerRecord(started=TWO, store=STORE)
ASKED = OLD.note_asked(TWO, 100.0)
OFFERED = ASKED.note_offer(TWO, "x")
TOLD = OFFERED.note_informed(Formation(TWO, 7, ("x", "y")), 105.0)

STEPS: dict[str, tuple[WorkerRecord, SurvivorsAssignment, float, Step]] = {
    "a survivor is asked": (OLD, PART, 100, Step.ASK),
    "it has time to answer": (ASKED, PART, 109.9, Step.WAIT),
    "it is given up": (ASKED, PART, 110, Step.GIVE_UP),
    "it has offered": (OFFERED, PART, 500, Step.WAIT),
    "it receives the handles": (OFFERED, IN_PLACE, 500, Step.FORM),
    "it has time to form": (TOLD, IN_PLACE, 114.9, Step.WAIT),
    "it does not form": (TOLD, IN_PLACE, 115, Step.FAIL),
    "it trains": (TOLD.note_formed(TWO), IN_PLACE, 1e6, Step.WAIT),
    "it has lost its peers": (TOLD.note_formed(TWO).note_lost(TWO, 200), IN_PLACE, 209.9, Step.WAIT),
    "it could not form": (TOLD.note_lost(TWO, 112), IN_PLACE, 114.9, Step.WAIT),
    "the peer that does not answer is ended first": (TOLD.note_lost(TWO, 112), IN_PLACE, 115.9, Step.WAIT),
    "nothing follows that either": (TOLD.note_lost(TWO, 112), IN_PLACE, 116, Step.FAIL),
    "nothing follows that": (TOLD.note_formed(TWO).note_lost(TWO, 200), IN_PLACE, 211, Step.FAIL),
    "the next round follows that": (replace(OLD, lost=ONE, lost_at=99), PART, 1e6, Step.ASK),
    "its script has no block": (replace(OLD, able=False), PART, 100, Step.REPLACE),
    "its store is lost": (replace(OLD, store=ELSEWHERE), PART, 100, Step.REPLACE),
    "no store is left": (OLD, replace(PART, store=None), 100, Step.REPLACE),
    "the round is one of today": (OFFERED, AS_TODAY, 100, Step.REPLACE),
    "a group of another round is no news": (ASKED, replace(PART, formation=Formation(ONE, 6, ("w",))), 101, Step.WAIT),
    "a new worker has not connected": (NEW, PART, 1e6, Step.WAIT),
    "a new worker has connected": (replace(NEW, able=True), PART, 100, Step.ASK),
    "a new worker does not answer": (replace(NEW, able=True).note_asked(TWO, 100), PART, 110, Step.FAIL),
    "a new worker cannot": (replace(NEW, unable=OLDER), PART, 100, Step.WAIT),
    "a new worker forms as today": (replace(NEW, unable=OLDER), AS_TODAY, 100, Step.FORM),
    "it has formed as today": (NEW.note_informed(Formation(TWO), 1), AS_TODAY, 1e6, Step.WAIT),
}


def test_a_survivor_that_ends_before_its_next_group_is_replaced() -> None:
    assert ended_before_its_group(ASKED, TWO, 0)
    assert not ended_before_its_group(ASKED, TWO, 1), "a failure of the round"
    assert not ended_before_its_group(OFFERED, TWO, 0), "others may know its handle"
    assert not ended_before_its_group(replace(ASKED, started=TWO), TWO, 0), "it has begun with this round"


def test_a_worker_that_connects_after_its_group_was_decided_cannot_keep_its_process() -> None:
    new = replace(NEW, able=False)
    assert new.note_hello().able
    late = new.note_informed(Formation(TWO), 1).note_hello()
    assert not late.able
    assert next_step(late, replace(PART, key=RoundKey(5, 3)), 2).step is Step.REPLACE


@pytest.mark.parametrize("case", STEPS)
def test_what_is_due_for_a_worker(case: str) -> None:
    worker, part, now, step = STEPS[case]
    assert next_step(worker, part, now).step is step


def test_a_further_round_does_not_extend_the_time_of_a_worker_that_does_not_answer() -> None:
    three = RoundKey(5, 3)
    worker = ASKED.note_asked(three, 108.0)
    assert next_step(worker, replace(PART, key=three), 109.0).at == 110.0
    late = worker.note_offer(TWO, "too late")
    assert (late.offered, late.handle) == (ONE, "w")
    answered = worker.note_offer(three, "z").note_asked(RoundKey(5, 4), 200.0)
    assert answered.asked_at == 200.0


def test_a_worker_of_a_group_of_today_does_not_survive_it() -> None:
    worker = replace(NEW, able=True).note_informed(Formation(TWO), 100.0)
    assert next_step(worker, replace(PART, key=RoundKey(5, 3)), 101.0).step is Step.REPLACE


def test_a_node_reports_all_of_its_handles_or_none() -> None:
    other = replace(NEW, able=True).note_asked(TWO, 100.0)
    assert node_part([OFFERED, other], 2, PART, 7000).handles == ()
    assert node_part([OFFERED], 2, PART, 7000).handles == (), "one of the workers has ended"
    found = node_part([OFFERED, other.note_offer(TWO, "y")], 2, PART, 7000)
    assert found == SurvivorsReport(TWO, ("x", "y"), kept=1, port=7000, store=STORE)
    assert node_part([OFFERED, replace(other, unable=OLDER)], 2, PART, 0).unable == OLDER
    formed = [replace(one, informed=TWO, formed=TWO) for one in (OFFERED, other)]
    assert node_part(formed, 2, PART, 0).formed
    assert not node_part([*formed[:1], other], 2, PART, 0).formed
