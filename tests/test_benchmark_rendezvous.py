"""`benchmarks/rendezvous.py`: its pure parts, and small trials of ours, the figures of which nobody judges."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import rendezvous
from comparison.lost import Lost
from etcd_server import program
from rendezvous_bench import etcd_place, trial
from rendezvous_bench.crowd import Event, Order, Tally
from rendezvous_bench.etcd_place import EtcdPlace
from rendezvous_bench.gathering import crowd_sizes
from rendezvous_bench.meeting_place import announce
from rendezvous_bench.outcome import QUESTIONS, Trial, growth, medians, results, sentences
from rendezvous_bench.trial import C10D, ETCD, OURS, Figure, Reading, Rival, join_at_once, join_last, lose_one, per_node

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
    order = Order("127.0.0.1:1", "job", first=3, count=2, nodes=8, least=7, interval=3.0)
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
    sentence = growth("etcd", {1: 1.0, 10: 1.0, 100: 100.0})
    assert sentence.startswith("Growth of etcd from 1 to 100 nodes")
    assert "the power 1.00 of the nodes" in sentence
    assert "steepest from 10 to 100: 2.00" in sentence
    assert growth("etcd", {2: 1.0}) == "Growth of etcd: too few sizes to say."


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
        announce((sys.executable, "-c", ""))


def test_an_etcd_that_ends_at_once_loses_the_trial_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "etcd"
    program.write_text("#!/bin/sh\necho no room >&2\n")
    program.chmod(0o755)
    monkeypatch.setattr(etcd_place, "find_program", lambda: str(program))
    with pytest.raises(Lost, match="does not serve: no room"):
        EtcdPlace()


def test_renewals_are_told_of_and_in_no_sum() -> None:
    reading = per_node(Counter({"Txn": 6, "LeaseKeepAlive": 9, "LeaseGrant": 3}), 3)
    assert (reading.value, reading.parts) == (3.0, {"LeaseGrant": 1.0, "LeaseKeepAlive": 3.0, "Txn": 2.0})
    found = [Trial("etcd", 3, 1, {"first-round-requests": reading})]
    tables = results(found, (3,), {})
    rows = {row.title: row.median for table in tables if table.name == "first-round-requests" for row in table.rows}
    assert rows == {
        "etcd, 3 nodes": 3.0,
        "etcd, 3 nodes, LeaseGrant": 1.0,
        "etcd, 3 nodes, LeaseKeepAlive": 3.0,
        "etcd, 3 nodes, Txn": 2.0,
    }
    assert "Requests that the first round costs etcd for each of its nodes: 3.00 with 3." in sentences(tables, (3,))


def test_etcd_is_told_beside_its_prototype_where_that_was_measured() -> None:
    told = sentences(results(trials("etcd", 2, 0.007) + trials("etcd", 3, 0.008), (2, 3), {}), (2, 3))
    assert "Last joiner with etcd: 7 ms with 2 nodes (the prototype 6)." in told


@pytest.mark.long
def test_a_crowd_meets_at_a_real_master_and_shrinks_when_a_node_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "STEADY_INTERVALS", 0.01)
    monkeypatch.setattr(trial, "SETTLE", 0.0)
    found = join_at_once(OURS, 3, WAIT) | join_last(OURS, 3, WAIT, pause=0.0)
    found |= lose_one(OURS, 3, WAIT, age=0.0, elected=False)
    assert set(found) == {question.figure for question in QUESTIONS if OURS.name in question.rivals}
    assert all(reading.ended for reading in found.values())


@pytest.mark.long
def test_a_crowd_meets_in_a_real_etcd_and_outlives_any_of_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    program("etcd")  # Skips where no etcd can be had, and fails where there should be one.
    monkeypatch.setattr(trial, "STEADY_INTERVALS", 0.01)
    monkeypatch.setattr(trial, "SETTLE", 0.0)
    monkeypatch.setattr(trial, "RENEWAL_INTERVAL", 0.5)
    found = join_at_once(ETCD, 3, WAIT) | join_last(ETCD, 3, WAIT, pause=0.0)
    for elected in (False, True):
        found |= lose_one(ETCD, 3, WAIT, age=0.0, elected=elected)
    assert set(found) == {question.figure for question in QUESTIONS if ETCD.name in question.rivals}
    assert all(reading.ended for reading in found.values())
    first = found["first-round-requests"].parts
    assert (first["LeaseGrant"], first["Watch"]) == pytest.approx((4 / 3, 4 / 3)), "one a node, one of who is elected"
    assert first["Txn"] >= 1
