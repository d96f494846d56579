"""`benchmarks/rendezvous.py`: its pure parts, and one small trial of ours, the figures of which nobody judges."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import rendezvous
from comparison.lost import Lost
from rendezvous_bench.crowd import Event, Order, Tally
from rendezvous_bench.gathering import crowd_sizes
from rendezvous_bench.meeting_place import MeetingPlace
from rendezvous_bench.outcome import QUESTIONS, Trial, growth, medians, results
from rendezvous_bench.trial import C10D, OURS, Figure, Reading, Rival, join_at_once, join_last

WAIT = 60.0


def trials(rival: str, nodes: int, *times: float, limit: float | None = None) -> list[Trial]:
    def figures(time: float) -> dict[Figure, Reading]:
        return {"last-joiner": Reading(time, ended=time != limit)}

    return [Trial(rival, nodes, at, figures(time)) for at, time in enumerate(times, start=1)]


def test_every_node_but_the_last_is_in_a_crowd_and_none_twice() -> None:
    assert crowd_sizes(2) == [1, 1]
    assert crowd_sizes(8) == [2, 2, 2, 1, 1]
    for nodes in range(2, 40):
        sizes = crowd_sizes(nodes)
        assert (sum(sizes), sizes[-1], min(sizes)) == (nodes, 1, 1)


def test_what_a_crowd_and_its_driver_say_survives_the_way() -> None:
    order = Order("127.0.0.1:1", "job", first=3, count=2, nodes=8, least=7)
    assert Order.parse(order.line()) == order
    event = Event("failed", 5, why='it said:\n"no"')
    assert event.line().count("\n") == 1
    assert Event.parse(event.line()) == event


def test_a_tally_tells_when_the_last_node_is_there_and_of_each_world_apart() -> None:
    told: list[Event] = []
    now = iter(range(100))
    tally = Tally(2, told.append, lambda: next(now))
    tally.reach("seated", 8)
    tally.reach("seated", 7)
    assert told == []
    tally.reach("seated", 8)
    tally.reach("seated", 7)
    assert told == [Event("seated", 2, 8), Event("seated", 3, 7)]
    tally.fail("x" * 10_000)
    assert len(told[-1].line()) < 4096, "a line has to be written whole"


def test_the_rivals_are_compared_at_the_same_number_of_nodes() -> None:
    found = trials("dlrover-run", 2, 0.01, 0.02) + trials("c10d", 2, 1.0, 0.1) + trials("dlrover-run", 8, 0.03)
    table = results(found, (2, 8), {})[0]
    rows = {row.title: row for row in table.rows}
    assert rows["dlrover-run, 2 nodes"].ratio == pytest.approx((0.01 + 0.2) / 2)
    assert rows["dlrover-run, 8 nodes"].ratio is None
    assert list(rows) == ["dlrover-run, 2 nodes", "c10d, 2 nodes", "dlrover-run, 8 nodes"]


def test_a_rival_that_was_tried_once_and_did_not_end_gives_a_bound() -> None:
    found = trials("dlrover-run", 512, 0.09, 0.08) + trials("c10d", 512, 45.0, limit=45.0)
    ours, theirs = results(found, (512,), {})[0].rows
    assert (ours.ratio, ours.bound, ours.reached) == (0.002, True, True)
    assert (theirs.limit, theirs.lost, theirs.notes) == (45.0, 1, "did not end in 45 s (1x)")


def test_a_lost_trial_of_ours_misses_the_target_and_counts_in_no_growth() -> None:
    lost = [Trial("dlrover-run", 2, 1, {}, "refused")]
    table = results([*lost, *trials("dlrover-run", 8, 0.1), *trials("c10d", 2, 1.0)], (2, 8), {})[0]
    assert table.rows[0].reached is False
    assert medians(table, "dlrover-run", (2, 8)) == {8: 0.1}


def test_growth_is_the_exponent_over_all_and_of_the_steepest_step() -> None:
    sentence = growth({1: 1.0, 10: 1.0, 100: 100.0})
    assert "the power 1.00 of the nodes" in sentence
    assert "steepest from 10 to 100: 2.00" in sentence
    assert growth({2: 1.0}) == "Growth: too few sizes to say."


def test_each_figure_has_one_table_and_only_who_is_compared_is_missed() -> None:
    assert len({question.figure for question in QUESTIONS}) == len(QUESTIONS)
    absent = {result.name: result.absent for result in results([], (2,), {C10D.name: "no torch"})}
    assert absent["last-joiner"] == {"c10d": "no torch"}
    assert absent["death"] == {}


def test_torch_is_not_tried_again_with_nodes_that_it_did_not_bring_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_once(rival: Rival, nodes: int, repetition: int, limit: float) -> Trial:
        return trials(rival.name, nodes, 45.0 if nodes >= 8 else 1.0, limit=45.0)[0]

    monkeypatch.setattr(rendezvous, "try_once", try_once)
    tried, absent = rendezvous.run((OURS, C10D), (2, 8, 32), repetitions=2, limit=45.0)
    assert [trial.nodes for trial in tried if trial.rival == "c10d"] == [2, 8, 2]
    assert len(tried) == 3 + 6, "ours is tried whatever comes of it"
    assert absent == {"c10d, 32 nodes": "it did not bring 8 together"}


def test_a_server_that_cannot_listen_loses_the_trial_in_its_own_words() -> None:
    with pytest.raises(Lost, match="did not say where it listens"):
        MeetingPlace((sys.executable, "-c", ""))


def test_a_crowd_meets_at_a_real_master_and_shrinks_when_a_node_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rendezvous_bench.trial.STEADY_INTERVALS", 0.01)
    at_once = join_at_once(OURS, 3, WAIT)
    in_turn = join_last(OURS, 3, WAIT, pause=0.0)
    assert set(at_once | in_turn) == {question.figure for question in QUESTIONS}
    assert all(reading.ended for reading in (at_once | in_turn).values())
