"""A stall of a round with several nodes: what the coordinator finds in all reports, and which node acts on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.policy_parts import running_report

from dlrover_run.coordination.decide import decide
from dlrover_run.coordination.membership import KnownNode
from dlrover_run.coordination.observer import Observation
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase, NodeReport
from dlrover_run.coordination.records.round import Member, NodeKey, RoundKey
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.records.validation import validate_report
from dlrover_run.coordination.rounds.ranks import rank_assignments
from dlrover_run.features.hangs.node.diagnosis import CoordinatedDiagnosis, Quiet
from dlrover_run.features.hangs.node.round_watch import RoundWatch
from dlrover_run.features.hangs.node.stall_report import StallReport
from dlrover_run.features.hangs.search.codes import GuiltCode
from dlrover_run.features.hangs.search.detector import UNLEARNED_LIMIT, Resumed, StallCode, Stalled
from dlrover_run.features.hangs.search.guilt import NODES_AGE_MARGIN
from dlrover_run.features.hangs.search.outside import LearnedPauses
from dlrover_run.features.hangs.search.suspects import Place, Suspect
from dlrover_run.features.hangs.stalls.model import (
    MAX_SUSPECTS,
    StallAssignment,
    StallFinding,
    StallNodeReport,
    StallQuestion,
    StallState,
)
from dlrover_run.features.hangs.stalls.observer import StallObserver
from dlrover_run.features.hangs.stalls.observer import find as find_state
from dlrover_run.features.hangs.stalls.rules import StallRules
from dlrover_run.features.registry import decode_part, job_of
from dlrover_run.observe.records import Evidence, Traffic
from dlrover_run.observe.tick import Tick

RULES = JobRules(3, 3, parts=(StallRules(watched=1),))
TICK = Tick(dict, lambda name, error: None)
"""Its tasks never run."""
KEY = RoundKey(5, 2)
PLAN = Plan(
    epoch=5,
    phase=PlanPhase.TRAINING,
    key=KEY,
    members=tuple(Member(f"n{place}", "i", f"node-{place}", 2) for place in range(3)),
)


def quiet(place: int, *suspects: Suspect, number: int = 1, trains: bool = False) -> StallNodeReport:
    """A node whose workers wait in a collective, apart from these."""
    others = {rank: Suspect(rank, Place.COLLECTIVE) for rank in (2 * place, 2 * place + 1)}
    return StallNodeReport(number, trains, tuple((others | {one.rank: one for one in suspects}).values()))


def quiet_workers(suspects: tuple[Suspect, ...], code: StallCode = StallCode.TRAINING) -> Quiet:
    """What a watch finds of these workers of a node, after 9 s."""
    stalled = Stalled(code, tuple(one.rank for one in suspects), 1.0, 3.0)
    return Quiet(stalled, 10.0, suspects, {}, trains=code is StallCode.ALONE, exchanged_at=None)


def diagnosis_of(
    reports: list[StallReport],
    wake: Callable[[], None] = lambda: None,
    witnesses: Callable[[float], int] = lambda since: 0,
) -> CoordinatedDiagnosis:
    return CoordinatedDiagnosis(KEY, wake, witnesses, reports.append, lambda resumed: None, LearnedPauses())


def report(place: int, part: StallNodeReport | None, phase: NodePhase = NodePhase.RUNNING) -> NodeReport:
    return running_report(PLAN, PLAN.members[place], part, phase=phase)


def nodes_with(*parts: StallNodeReport | None, **changes: Any) -> dict[NodeKey, KnownNode]:
    reports = [report(place, part) for place, part in enumerate(parts)]
    return {one.key: KnownNode(one, 0.0, 0.0, **changes) for one in reports}


def find(plan: Plan, state: dict[NodeKey, KnownNode]) -> StallFinding | None:
    return find_state(plan, state).finding


ELSEWHERE = Suspect(5, Place.ELSEWHERE, file="/u/train.py", line=10, function="load")
ALL = (quiet(0), quiet(1), quiet(2, ELSEWHERE))


def test_the_guilty_rank_is_named_with_its_node() -> None:
    found = find(PLAN, nodes_with(*ALL))
    assert found is not None
    assert (found.key, found.ranks, found.nodes, found.to_restart) == (KEY, (5,), ("node-2",), (5,))
    assert GuiltCode.ELSEWHERE.within(found.reasons)
    assert GuiltCode.PLACE.within(found.reasons)


@pytest.mark.parametrize("busy", range(3))
def test_no_stall_while_one_node_makes_progress(busy: int) -> None:
    parts = [None if place == busy else part for place, part in enumerate(ALL)]
    assert find(PLAN, nodes_with(*parts)) is None


def test_no_stall_while_a_node_is_away_or_between_rounds() -> None:
    assert find(PLAN, nodes_with(*ALL, disconnected_at=1.0, lost_at=9.0)) is None
    assert find(PLAN, nodes_with(*ALL[:2])) is None
    gathering = msgspec.structs.replace(PLAN, phase=PlanPhase.GATHERING)
    assert find(gathering, nodes_with(*ALL)) is None
    next_round = msgspec.structs.replace(PLAN, key=RoundKey(5, 3))
    assert find(next_round, nodes_with(*ALL)) is None, "reports of the last round"


def test_independent_idle_workers_are_no_stall() -> None:
    idle = [[Suspect(2 * place + each, Place.ELSEWHERE) for each in (0, 1)] for place in range(3)]
    assert find(PLAN, nodes_with(*(quiet(place, *workers) for place, workers in enumerate(idle)))) is None
    counting = [quiet(place, *workers, trains=place == 1) for place, workers in enumerate(idle)]
    found = find(PLAN, nodes_with(*counting))
    assert found is not None
    assert (found.ranks, found.nodes, found.to_restart) == ((), (), (0,))


def test_a_node_whose_workers_have_all_ended() -> None:
    state = nodes_with(*ALL[:2], None)
    key = PLAN.members[2].key
    state[key] = KnownNode(report(2, None, NodePhase.SUCCEEDED), 0.0, 0.0, succeeded=KEY)
    found = find(PLAN, state)
    assert found is not None
    assert (found.ranks, found.nodes, found.to_restart) == ((4, 5), ("node-2",), (0,))
    assert GuiltCode.ENDED.within(found.reasons)


def test_a_rank_that_has_not_connected_to_the_store() -> None:
    late = quiet(2, Suspect(4, late=True), Suspect(5, late=True))
    found = find(PLAN, nodes_with(*ALL[:2], late))
    assert found is not None
    assert (found.ranks, found.nodes) == ((4, 5), ("node-2",))
    assert GuiltCode.LATE.within(found.reasons)
    alone = [quiet(place, *(Suspect(2 * place + each, late=True) for each in (0, 1))) for place in range(3)]
    assert find(PLAN, nodes_with(*alone)) is None, "no worker has reached it"


@pytest.mark.parametrize(("more", "ranks"), [(NODES_AGE_MARGIN / 2, ()), (NODES_AGE_MARGIN * 2, (3,))])
def test_ages_of_two_nodes_are_compared_with_a_margin(more: float, ranks: tuple[int, ...]) -> None:
    def aged(place: int) -> StallNodeReport:
        here = (2 * place, 2 * place + 1)
        return quiet(place, *(Suspect(r, Place.COLLECTIVE, sent_age=0.1 + (more if r == 3 else 0)) for r in here))

    found = find(PLAN, nodes_with(*map(aged, range(3))))
    assert found is not None
    assert found.ranks == ranks


def test_a_node_may_report_its_own_ranks_only() -> None:
    assert validate_report(report(2, ALL[2]), PLAN) is None
    assert validate_report(report(2, ALL[1]), PLAN) is not None
    found = find(PLAN, nodes_with(ALL[0], ALL[1], quiet(2, Suspect(0, state="T"))))
    assert found is None or 0 not in found.ranks


# Some workers hang, and others train.

ALONE = Suspect(5, Place.ELSEWHERE, alone=True, counts=True, file="/u/train.py", line=10, function="load")
PARTLY = StallNodeReport(3, True, (ALONE,), partly=True)


def trains(part: StallNodeReport | None, witnesses: int, number: int) -> StallNodeReport:
    """The report of a node whose workers have trained since a question."""
    return msgspec.structs.replace(part or StallNodeReport(), answered=number, witnesses=witnesses)


@pytest.mark.parametrize(
    "part", [PARTLY, quiet(2, ALONE, number=3), quiet(2, ALONE, Suspect(4, Place.UNKNOWN), number=3)]
)
def test_nodes_are_asked_before_a_worker_counts_as_one_that_hangs_while_others_train(part: StallNodeReport) -> None:
    asked = find_state(PLAN, nodes_with(None, None, part))
    assert asked == StallState(question=StallQuestion(KEY, 3))
    found = find_state(PLAN, nodes_with(trains(None, 2, 3), None, part))
    assert found.question == asked.question
    assert found.finding is not None
    assert (found.finding.ranks, found.finding.nodes, found.finding.to_restart) == ((5,), ("node-2",), (5,))
    assert found.finding.alone
    assert found.finding.number == 3
    assert GuiltCode.OTHERS_GO_ON.within(found.finding.reasons)


@pytest.mark.parametrize(
    ("first", "second", "is_found"),
    [
        (None, None, False),
        (trains(None, 1, 3), None, False),
        (trains(None, 1, 3), trains(None, 1, 3), True),
        (trains(None, 2, 2), trains(None, 2, 4), False),
    ],
)
def test_two_workers_must_train_since_this_question(
    first: StallNodeReport | None, second: StallNodeReport | None, is_found: bool
) -> None:
    assert (find(PLAN, nodes_with(first, second, PARTLY)) is not None) == is_found
    own = trains(PARTLY, 2, 3)
    assert find(PLAN, nodes_with(None, None, own)) is not None, "workers of the same node"


def test_no_question_is_asked_about_workers_that_may_wait_for_one_that_works() -> None:
    waiting = [
        quiet(place, *(Suspect(2 * place + each, Place.COLLECTIVE, alone=True, counts=True) for each in (0, 1)))
        for place in (1, 2)
    ]
    assert find_state(PLAN, nodes_with(None, *waiting)) == StallState()
    partly = [msgspec.structs.replace(part, partly=True) for part in waiting]
    assert find_state(PLAN, nodes_with(None, *partly)) == StallState()
    assert find_state(PLAN, nodes_with(None, None, ALL[2])) == StallState(), "quiet for a short time"


def test_a_worker_of_another_node_that_waits_for_it_shows_that_it_trains() -> None:
    hangs = msgspec.structs.replace(PARTLY, suspects=(msgspec.structs.replace(ALONE, counts=False),))
    waits = StallNodeReport(1, False, (Suspect(0, Place.COLLECTIVE, alone=True),), partly=True)
    assert find_state(PLAN, nodes_with(None, None, hangs)) == StallState()
    assert find_state(PLAN, nodes_with(waits, None, hangs)) == StallState(question=StallQuestion(KEY, 4))
    found = find(PLAN, nodes_with(waits, trains(None, 2, 4), hangs))
    assert found is not None
    assert found.ranks == (5,)


def test_if_the_others_stop_too_it_is_a_stall_of_the_round() -> None:
    found = find(PLAN, nodes_with(trains(ALL[0], 2, 3), ALL[1], quiet(2, ALONE, number=3)))
    assert found is not None
    assert not found.alone
    assert found.ranks == (5,)


def test_the_question_is_sent_to_all_nodes_until_the_worker_makes_progress() -> None:
    job = job_of(RULES)
    observer = job.observers["stalls"]
    asking = decide(job, PLAN, nodes_with(None, None, PARTLY), 10.0).plan
    sent = observer.orders(asking, rank_assignments(asking))
    assert set(sent) == {member.key for member in PLAN.members}
    assert set(sent.values()) == {StallAssignment(question=StallQuestion(KEY, 3))}
    assert decide(job, asking, nodes_with(None, None, PARTLY), 11.0).plan is asking
    going_on = decide(job, asking, nodes_with(None, None, None), 12.0).plan
    assert observer.orders(going_on, rank_assignments(going_on)) == {}
    assert observer.observe(ended(asking), nodes_with(*ALL), 12.0).part == StallState()


def test_a_node_answers_when_its_workers_have_trained_since_it_was_asked() -> None:
    woken: list[None] = []
    since: list[float] = []
    found = {"witnesses": 0}

    def witnesses(asked_at: float) -> int:
        since.append(asked_at)
        return found["witnesses"]

    stalls = diagnosis_of([], lambda: woken.append(None), witnesses)

    def part() -> StallNodeReport | None:
        return StallNodeReport.find(stalls.add_to_report(report(0, None)).parts)

    def sample(at: float) -> None:
        stalls.observe([Evidence(0, at, Traffic())])

    def asked(number: int) -> Assignment:
        question = StallAssignment(question=StallQuestion(KEY, number)) if number else None
        return Assignment(epoch=5, phase=PlanPhase.TRAINING, key=KEY, parts=() if question is None else (question,))

    sample(10.0)
    stalls.follow(asked(3))
    sample(11.0)
    sample(12.0)
    assert (since, part()) == ([11.0, 11.0], None)
    found["witnesses"] = 2
    sample(13.0)
    assert part() == StallNodeReport(answered=3, witnesses=2)
    stalls.diagnose(quiet_workers(ALL[0].suspects))
    assert part() == trains(ALL[0], 2, 3)
    stalls.resume(Resumed(1.0, (0, 1)))
    found["witnesses"] = 0
    stalls.follow(asked(4))
    assert part() is None, "another question"
    sample(20.0)
    found["witnesses"] = 1
    sample(21.0)
    assert part() == StallNodeReport(answered=4, witnesses=1)
    assert since[-2:] == [20.0, 20.0]
    stalls.follow(asked(0))
    assert part() is None
    assert len(woken) == 6


def test_a_node_acts_on_a_worker_that_hangs_alone_once_for_each_question() -> None:
    workers: Any = SimpleNamespace(key=KEY, group=SimpleNamespace(running=[1]))
    watch: Any = Watch()
    reports: list[StallReport] = []
    diagnosis = diagnosis_of(reports)
    stalls = RoundWatch(workers, watch, diagnosis)
    stalls.begin(TICK)
    for _ in range(3):
        diagnosis.diagnose(quiet_workers((ALONE,), StallCode.ALONE))
    assert StallNodeReport.find(stalls.add_to_report(report(2, None)).parts) == PARTLY
    for number in (3, 3, 2):
        finding = StallFinding(KEY, number, (5,), ("node-2",), (GuiltCode.IDLE(),), (5,), alone=True)
        stalls.follow(Assignment(epoch=5, phase=PlanPhase.TRAINING, key=KEY, parts=(StallAssignment(finding),)))
    assert [found.is_alone for found in reports] == [True, True]


def test_the_records_survive_encoding() -> None:
    for part in (ALL[2], PARTLY, trains(None, 2, 3)):
        sent = report(2, part)
        assert msgspec.json.decode(msgspec.json.encode(sent), type=NodeReport, dec_hook=decode_part) == sent
    found = find(PLAN, nodes_with(*ALL))
    assert found is not None
    plan = msgspec.structs.replace(PLAN, parts=(StallState(found, StallQuestion(KEY, 3)),))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan, dec_hook=decode_part) == plan


@pytest.mark.parametrize(
    "part",
    [
        {"type": "stalls", "suspects": [{"rank": rank} for rank in range(257)]},
        {"type": "stalls", "suspects": [{"rank": 1, "file": "x" * 141}]},
        {"type": "stalls", "suspects": [{"rank": 1, "function": "a\nb"}]},
        {"type": "stalls", "suspects": [{"rank": 1, "state": "TT"}]},
        {"type": "stalls", "witnesses": -1},
    ],
)
def test_a_part_out_of_bounds_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Expected|Object"):
        decode_part(StallNodeReport, part)


def ended(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, phase=PlanPhase.GATHERING)


def test_the_finding_is_sent_to_all_nodes_until_they_make_progress() -> None:
    job = job_of(RULES)
    observer = job.observers["stalls"]
    assert type(observer) is StallObserver
    stalled = decide(job, PLAN, nodes_with(*ALL), 10.0).plan
    sent = observer.orders(stalled, rank_assignments(stalled))
    assert set(sent) == {member.key for member in PLAN.members}
    assert decide(job, stalled, nodes_with(*ALL), 11.0).plan is stalled
    going_on = decide(job, stalled, nodes_with(None, *ALL[1:]), 12.0).plan
    assert observer.orders(going_on, rank_assignments(going_on)) == {}
    assert observer.observe(ended(stalled), nodes_with(*ALL), 12.0).part == StallState()


def test_without_a_stall_it_changes_no_decision() -> None:
    observer = StallObserver(RULES)
    assert observer.observe(PLAN, nodes_with(None, None, None), 1.0) == Observation()
    assert observer.observe(ended(PLAN), nodes_with(*ALL), 1.0) == Observation()
    assert observer.orders(PLAN, rank_assignments(PLAN)) == {}


class Watch:
    """The watch of a round, as `RoundWatch` uses it."""

    def close(self) -> None: ...


def assigned(number: int, key: RoundKey = KEY) -> Assignment:
    finding = StallFinding(key, number, (5,), ("node-2",), (GuiltCode.LOCKED(),), (5,))
    return Assignment(epoch=5, phase=PlanPhase.TRAINING, key=key, parts=(StallAssignment(finding),))


def test_a_node_acts_on_each_finding_once_and_only_while_it_is_quiet() -> None:
    woken: list[None] = []
    workers: Any = SimpleNamespace(key=KEY, group=SimpleNamespace(running=[1]))
    watch: Any = Watch()
    reports: list[StallReport] = []
    diagnosis = diagnosis_of(reports, lambda: woken.append(None))
    stalls = RoundWatch(workers, watch, diagnosis)
    stalls.begin(TICK)
    stalls.follow(assigned(1))
    assert reports == []
    diagnosis.diagnose(quiet_workers(ALL[0].suspects))
    assert StallNodeReport.find(stalls.add_to_report(report(0, None)).parts) == ALL[0]
    other = msgspec.structs.replace(report(0, None), ranks=None)
    assert stalls.add_to_report(other).parts == (), "a report on another round"
    stalls.follow(assigned(1, RoundKey(5, 1)))
    stalls.follow(assigned(2))
    stalls.follow(assigned(2))
    (found,) = reports
    assert (found.guilty, found.reasons, found.to_restart) == ((5,), (GuiltCode.LOCKED(),), (5,))
    assert (found.nodes, found.is_alone) == (("node-2",), False)
    diagnosis.resume(Resumed(1.0, (0, 1)))
    stalls.follow(assigned(3))
    diagnosis.diagnose(quiet_workers(ALL[0].suspects))
    stalls.follow(assigned(2))
    stalls.follow(assigned(4))
    assert len(reports) == 2
    assert len(woken) == 3
    stalls.close()
    stalls.follow(assigned(5))
    assert len(reports) == 2


def test_a_node_with_more_quiet_workers_than_a_report_may_have_reports_none_and_acts_on_nothing() -> None:
    reports: list[StallReport] = []
    diagnosis = diagnosis_of(reports)
    diagnosis.diagnose(quiet_workers(tuple(Suspect(rank) for rank in range(MAX_SUSPECTS + 1))))
    assert StallNodeReport.find(diagnosis.add_to_report(report(0, None)).parts) is None
    diagnosis.follow(assigned(1))
    assert reports == []
    diagnosis.diagnose(quiet_workers(tuple(Suspect(rank) for rank in range(MAX_SUSPECTS))))
    diagnosis.follow(assigned(2))
    assert len(reports) == 1


def early(part: StallNodeReport) -> StallNodeReport:
    return msgspec.structs.replace(part, early=True)


@pytest.mark.parametrize("which", [(0,), (2,), (0, 1, 2)])
def test_before_the_pauses_of_a_node_are_known_only_what_never_ends_is_a_stall(which: tuple[int, ...]) -> None:
    def parts(guilty: Suspect) -> list[StallNodeReport]:
        return [early(part) if place in which else part for place, part in enumerate((*ALL[:2], quiet(2, guilty)))]

    assert find(PLAN, nodes_with(*parts(ELSEWHERE))) is None
    found = find(PLAN, nodes_with(*parts(msgspec.structs.replace(ELSEWHERE, state="T"))))
    assert found is not None
    assert found.ranks == (5,)


def test_a_node_whose_pauses_are_not_known_reports_again_when_they_do_not_matter_any_more() -> None:
    reports: list[StallReport] = []
    diagnosis = diagnosis_of(reports)
    stalled = quiet_workers((ELSEWHERE,)).stalled
    known = quiet_workers((ELSEWHERE,))
    diagnosis.diagnose(replace(known, stalled=replace(stalled, early=True)))

    def part() -> StallNodeReport | None:
        return StallNodeReport.find(diagnosis.add_to_report(report(2, None)).parts)

    first = part()
    assert first is not None
    assert first.early
    assert diagnosis.due(known.stalled.since + UNLEARNED_LIMIT - 1) == ()
    (again,) = diagnosis.due(known.stalled.since + UNLEARNED_LIMIT)
    diagnosis.diagnose(replace(known, stalled=again))
    second = part()
    assert second is not None
    assert (second.early, second.number) == (False, first.number + 1)
    assert diagnosis.due(1e6) == ()
