"""What a planned change waits for: newcomers and drains of a job that marks its checkpoints."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.virtual import play
from support.virtual_torch import TorchJob, rules

from dlrover_run.coordination.decide import decide
from dlrover_run.coordination.records.plan import PlanPhase
from dlrover_run.coordination.records.requests import RequestFailed
from dlrover_run.coordination.records.rules import SCALE_WAIT
from dlrover_run.coordination.rounds import planned_changes
from dlrover_run.coordination.rounds.gathering import eligible
from dlrover_run.features.operate.commands.scale import decision
from dlrover_run.features.operate.display.text import render_status

PAIR = "come a b; wait 31; round 1 a b; "

SCRIPTS = {
    "a job that has marked no checkpoint admits a newcomer at once": "come c; round 2 a b c",
    "a newcomer waits for the next checkpoint": "mark a; come c; wait 5; round 1 a b; mark a; round 2 a b c",
    "a checkpoint before the newcomer came does not count": "mark a; mark a; come c; wait 5; round 1 a b",
    "without another checkpoint it waits for the deadline": (
        "mark a; come c; wait 59.9; round 1 a b; wait 0.2; round 2 a b c; restarts 0"
    ),
    "the deadline is that of the first newcomer": (
        "mark a; come c; wait 50; come d; wait 9.9; round 1 a b; wait 0.2; round 2 a b c d"
    ),
    "a round that has marked none yet waits for its first": (
        "mark a; come c; mark a; round 2 a b c; come d; wait 5; round 2 a b c; mark a; round 3 a b c d"
    ),
    "all nodes that save have to save": "mark a b; come c; mark a; wait 5; round 1 a b; mark b; round 2 a b c",
    "a node that does not save is not waited for": "mark b; come c; mark b; round 2 a b c",
    "a change of which nothing is left is forgotten": (
        "mark a; come c; wait 50; gone c; wait 5; come d; wait 50; round 1 a b; wait 11; round 2 a b d"
    ),
    "a newcomer that prepares interrupts no round": (
        "come_preparing c; wait 100; round 1 a b; prepared c; round 2 a b c; restarts 0"
    ),
    "one that is prepared does not wait for another": (
        "come_preparing c; come d; round 2 a b d; prepared c; round 3 a b d c"
    ),
    "a newcomer that prepares does not wait for a checkpoint": (
        "mark a; come_preparing c; mark a; prepared c; wait 5; round 1 a b; mark a; round 2 a b c"
    ),
    "a failure includes one that prepares": "come_preparing c; fail a; round 2 a b c; restarts 1",
    "a failure includes the newcomers at once": "mark a; come c; fail a; round 2 a b c; restarts 1",
    "a loss includes them at once": "mark a; come c; lose b; wait 2; round 2 a c",
    "a drain waits for the next checkpoint": (
        "mark a; drain b; wait 5; drained; mark a; drained b; leaving b; left b; round 2 a"
    ),
    "a drain waits for the deadline at most": "mark a; drain b; wait 59.9; drained; wait 0.2; drained b",
    "a job that has marked no checkpoint drains at once": "drain b; drained b",
    "a spare drains at once": "mark a; come c d e; drain e; drained e; round 1 a b",
    "a drained node and a newcomer are one change": (
        "mark a; drain b; come c; wait 5; round 1 a b; mark a; drained b; leaving b; left b; round 2 a c; restarts 0"
    ),
    "a node that is about to leave gets no ranks": (
        "mark a; drain b; come c; fail a; drained b; round 2 a c; restarts 1"
    ),
    "a node drains at once after the first success": "mark a; drain b; succeed a; drained b",
    "a successor waits for the same checkpoint": (
        "mark a; come c; wait 5; successor journal; back a b c; wait 5; round 1 a b; mark a; round 2 a b c"
    ),
    "a checkpoint of which the successor learns later counts": (
        "mark a; come c; wait 5; lose a; mark a; successor journal; back b c a; round 2 a b c"
    ),
    "a successor counts from the announcement, with which its job time begins": (
        "mark a; come c; wait 50; successor journal; back a b c; wait 59; round 1 a b; wait 2; round 2 a b c"
    ),
    "a successor without a journal knows from the nodes that they save": (
        "mark a; successor; back a b; come c; wait 5; round 1 a b; mark a; round 2 a b c"
    ),
}

RESIZES = {
    "a smaller size makes the highest ranks spares": "scale 1; round 2 a; because scaled_down; restarts 0",
    "they take part again when it grows": "scale 1; scale 2; round 3 a b; because scaled_up; restarts 0",
    "it waits for the next checkpoint": "mark a; scale 1; wait 5; round 1 a b; mark a; round 2 a",
    "a larger size waits too": (
        "mark a; scale 1; mark a; round 2 a; mark a; scale 2; wait 5; round 2 a; mark a; round 3 a b"
    ),
    "it waits for the deadline at most": "mark a; scale 1; wait 59.9; round 1 a b; wait 0.2; round 2 a",
    "a newcomer beyond the size is a spare": "scale 2; come c; wait 100; round 1 a b",
    "a spare takes the place of a node that is lost": "scale 1; round 2 a; lose a; wait 2; round 3 b",
    "a size that is taken back changes nothing": (
        "mark a; scale 1; wait 5; scale 4; wait 5; mark a; wait 5; round 1 a b"
    ),
    "a size above the nodes that are here waits for others": "scale 3; wait 5; round 1 a b; come c d; round 2 a b c",
    "a smallest size holds when nodes are lost": "scale 2:3; lose b; wait 2; phase gathering; come c; round 2 a c",
    "a failure applies it at once": "mark a; scale 1; fail b; round 2 a",
    "a successor knows it": "scale 1; round 2 a; successor journal; back a b; wait 100; round 2 a",
    "a round whose node leaves is not changed before": (
        "drain a; drained a; scale 1; wait 5; round 1 a b; leaving a; left a; round 2 b; restarts 0"
    ),
    "a drain and a size are one change": (
        "mark a; scale 1; drain a; wait 5; round 1 a b; mark a; drained a; leaving a; left a; round 2 b"
    ),
}


@pytest.mark.parametrize("script", RESIZES.values(), ids=RESIZES)
def test_another_size(script: str) -> None:
    play(TorchJob(rules(1, 4)), PAIR + script)


@pytest.mark.parametrize(
    ("size", "why"),
    [
        ("5", "--nnodes=1:4, which excludes 5"),
        ("2:5", "--nnodes=1:4, which excludes 2:5"),
        ("3:4", "only 2 nodes are here"),
    ],
)
def test_a_size_that_is_refused_changes_nothing(size: str, why: str) -> None:
    job = play(TorchJob(rules(1, 4)), PAIR)
    with pytest.raises(RequestFailed, match=why):
        job.scale(size)
    play(job, "wait 100; round 1 a b")


def test_newcomers_that_wait_for_others_delay_no_drain() -> None:
    job = TorchJob(rules(1, 4, scale_up_delay=30.0))
    play(job, PAIR + "mark a; drain b; come c d; wait 5; drained; round 1 a b; mark a; drained b")


def test_a_size_is_a_multiple_of_the_unit() -> None:
    job = play(TorchJob(rules(2, 4, node_unit=2)), "come a b c d; round 1 a b c d")
    play(job, "scale 3; round 2 a b")
    with pytest.raises(RequestFailed, match="no multiple of 2"):
        job.scale("3:3")


def test_no_size_is_taken_after_the_first_success() -> None:
    job = play(TorchJob(rules(1, 4)), PAIR + "succeed b")
    with pytest.raises(RequestFailed, match="succeeded already"):
        job.scale("1")


def test_the_status_shows_the_size_and_what_it_waits_for() -> None:
    job = play(TorchJob(rules(1, 4)), PAIR + "mark a; scale 1; wait 10")
    found = job.coordinator.status("resnet", job.now)
    assert (found.desired_nodes, found.desired_by, found.change_waits) == ("1", "ann", True)
    assert found.change_seconds == SCALE_WAIT - 10
    text = render_status(found)
    assert "scale: 1 node, asked for by ann; a planned change waits for the next checkpoint (at most 50 s more)" in text
    assert decision(found) == "2 nodes train until the next checkpoint, in at most 50 s, and then a round of 1"
    job.mark("a")
    found = job.coordinator.status("resnet", job.now)
    assert (found.change_waits, decision(found)) == (False, "1 node trains")
    assert (found.min_nodes, found.max_nodes) == (1, 4)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_planned_change(script: str) -> None:
    play(TorchJob(rules(1, 4)), PAIR + script)


def test_it_can_be_switched_off() -> None:
    play(TorchJob(rules(1, 4, scale_wait=0.0)), PAIR + "mark a; come c; round 2 a b c")


def test_newcomers_are_gathered_before_they_wait_for_a_checkpoint() -> None:
    job = TorchJob(rules(1, 5, scale_up_delay=10.0))
    play(job, PAIR + "mark a; come c; mark a; wait 9; come d; mark a; wait 2; round 1 a b; mark a; round 2 a b c d")


def test_newcomers_that_prepare_are_gathered_from_the_first_that_is_ready() -> None:
    job = TorchJob(rules(1, 5, scale_up_delay=10.0))
    script = "come_preparing c d; wait 30; prepared c; wait 9; round 1 a b; prepared d; wait 2; round 2 a b c d"
    play(job, PAIR + script + "; restarts 0")


def test_the_newcomer_reads_what_it_waits_for_and_how_long() -> None:
    job = play(TorchJob(rules(1, 4)), PAIR + "mark a; come c; wait 10")
    assert job.waiting.text == "2 nodes train; this one takes part after the next checkpoint"
    assert job.waiting.seconds == SCALE_WAIT - 10


def test_a_node_that_saves_often_reports_it_once() -> None:
    """Its reports cause decisions, and writes in etcd."""
    job = play(TorchJob(rules(1, 4)), PAIR + "mark a")
    before = job.statuses["a"]
    job.mark("a", "a")
    assert job.statuses["a"] == before


def change_at_once(plan: Any, nodes: Any) -> bool:
    return True


def count_any_checkpoint(plan: Any, nodes: Any) -> bool:
    return any(state.report.saves for state in nodes.values())


def wait_for_one_node(plan: Any, nodes: Any) -> bool:
    return any(state.report.saved_for == plan.change for state in nodes.values())


DEFECTS = {
    "a round is interrupted before a checkpoint": ("_have_saved", change_at_once),
    "a checkpoint from before counts": ("_have_saved", count_any_checkpoint),
    "the first of several nodes that save is enough": ("_have_saved", wait_for_one_node),
    "a newcomer that prepares interrupts the round": ("_ready", eligible),
    "it is never known that the job saves": ("note_checkpoints", lambda plan, nodes, now: plan),
}


@pytest.mark.parametrize(("name", "wrong"), DEFECTS.values(), ids=DEFECTS)
def test_a_planted_defect_is_found(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_changes, name, wrong)
    if name == "note_checkpoints":
        monkeypatch.setattr("dlrover_run.coordination.rounds.round_engine.note_checkpoints", wrong)
    failed = []
    for title, script in SCRIPTS.items():
        try:
            play(TorchJob(rules(1, 4)), PAIR + script)
        except AssertionError:
            failed.append(title)
    assert failed


def test_a_round_of_nodes_that_save_is_known_to_save_when_it_is_formed() -> None:
    """Otherwise the next decision on the same reports would give another plan."""
    job = play(TorchJob(rules(1, 4)), PAIR + "mark a")
    coordinator = job.coordinator
    between = msgspec.structs.replace(job.plan, phase=PlanPhase.GATHERING, saves=False)
    formed = decide(coordinator.job, between, coordinator.nodes, job.plan.clock + 100).plan
    assert (formed.phase, formed.saves) == (PlanPhase.TRAINING, True)
