"""How nodes are paired in the rounds of a node check."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.check_world import (
    THRESHOLD,
    Computing,
    NodeTruth,
    Outcome,
    World,
    check_world,
    draw_odd_world,
    whole,
    with_nodes,
)

from dlrover_run.features.node_check.decision.diagnosis import ENOUGH_WITNESSES
from dlrover_run.features.node_check.decision.model import MAX_LINKS, HealthStatus
from dlrover_run.features.node_check.decision.notes import MAX_LINK_NOTES
from dlrover_run.features.node_check.decision.pairing import EVERY_PAIR, MAX_ROUNDS

OLD = NodeTruth(trusted=True)
CRASHES_ONCE = NodeTruth(computing=Computing.FAILS_ONCE)


def first_groups(*nodes: NodeTruth) -> tuple[tuple[int, ...], ...]:
    return check_world(World(nodes)).held[0].groups


NEW, SMALL, LARGE = NodeTruth(), NodeTruth(workers=1), NodeTruth(workers=8)

FIRST_ROUNDS: list[tuple[str, list[NodeTruth], tuple[tuple[int, ...], ...]]] = [
    ("two", [NEW] * 2, ((0, 1),)),
    ("an odd one makes a triple", [NEW] * 3, ((0, 1, 2),)),
    ("neighbours in pairs", [NEW] * 4, ((0, 1), (2, 3))),
    ("neighbours in pairs and a triple", [NEW] * 7, ((0, 1), (2, 3), (4, 5, 6))),
    ("newcomers with each other", [NEW, NEW, OLD, NEW, OLD, NEW, NEW, NEW], ((0, 1), (3, 5), (6, 7))),
    ("an odd newcomer with a node that has passed", [*[NEW] * 5, OLD, OLD], ((0, 1), (2, 3), (4, 5))),
    ("an odd newcomer with the only one that has passed", [NEW, NEW, NEW, OLD], ((0, 1), (2, 3))),
    ("of two pairs that may both have a slow end one is compared", [NEW, NEW, OLD, NEW, OLD, NEW], ((0, 1, 2), (3, 5))),
    ("of two pairs with an odd newcomer one is compared", [NEW, NEW, NEW, OLD, OLD], ((0, 1, 4), (2, 3))),
    ("an only link is compared", [OLD, OLD, OLD, NEW], ((1, 2, 3),)),
    ("an only pair is compared", [NEW, NEW, OLD, OLD], ((0, 1, 2),)),
    ("an only link of two nodes is not", [OLD, NEW], ((0, 1),)),
    ("nodes with as many workers", [SMALL, LARGE, SMALL, LARGE], ((0, 2), (1, 3))),
    ("an odd number of workers in a triple", [LARGE, SMALL, SMALL], ((0, 1, 2),)),
    ("two numbers of workers", [LARGE, SMALL], ((0, 1),)),
]


@pytest.mark.parametrize(("nodes", "groups"), [row[1:] for row in FIRST_ROUNDS], ids=[row[0] for row in FIRST_ROUNDS])
def test_the_first_links(nodes: list[NodeTruth], groups: tuple[tuple[int, ...], ...]) -> None:
    assert first_groups(*nodes) == groups


def test_a_single_node_links_its_own_workers_and_one_worker_has_no_link() -> None:
    assert first_groups(NodeTruth(workers=2)) == ((0,),)
    assert check_world(whole(1)).held == ()


def test_a_node_that_failed_to_compute_tries_again_while_the_others_link_and_links_after_that() -> None:
    outcome = check_world(World((NodeTruth(), CRASHES_ONCE, NodeTruth(), NodeTruth(), NodeTruth())))
    assert outcome.held[0] == ((1,), ((0, 2), (3, 4)))
    assert outcome.held[1].groups == ((0, 1),)
    of_two = check_world(World((NodeTruth(), CRASHES_ONCE)))
    assert [tuple(tasks) for tasks in of_two.held] == [((1,), ()), ((), ((0, 1),))]


def test_a_node_that_cannot_compute_takes_no_part_in_links() -> None:
    crashes, wrong = NodeTruth(computing=Computing.FAILS), NodeTruth(computing=Computing.WRONG)
    outcome = check_world(World((crashes, wrong, *whole(3).nodes)))
    assert {end for fact in outcome.check.link_facts for end in fact.ends} == {2, 3, 4}


def test_a_slow_first_reading_is_tried_again_in_the_first_round() -> None:
    assert check_world(World((NodeTruth(slower=4.0), *whole(2).nodes))).held[0].compute == (0,)


def test_nodes_in_doubt_link_with_healthy_ones_that_they_have_not_linked_with() -> None:
    outcome = check_world(World((NodeTruth(cut=True), *whole(5).nodes)))
    assert [tasks.groups for tasks in outcome.held] == [((0, 1), (2, 3), (4, 5)), ((0, 2), (1, 3)), ((0, 1 + 3),)]


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_world_in_which_all_nodes_have_linked_takes_one_round(nodes: int) -> None:
    assert len(check_world(whole(nodes), nodes).held) == 1


@pytest.mark.parametrize("nodes", [4, 5, 16, 63, 64])
def test_a_healthy_world_takes_a_second_round_in_which_each_node_links_across(nodes: int) -> None:
    first, second = check_world(whole(nodes), nodes).held
    assert all(other == one + 1 for one, other, *_ in first.groups)
    half = nodes // 2
    assert second == ((), tuple((one, one + half) for one in range(half)))


def test_those_across_are_alike_and_new() -> None:
    small, large = NodeTruth(workers=1), NodeTruth(workers=8)
    assert check_world(World((small, large) * 4)).held[1].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert len(check_world(World((*[OLD] * 8, *whole(3).nodes))).held) == 1


def test_no_node_in_doubt_links_across_nor_is_linked_with() -> None:
    outcome = check_world(World((NodeTruth(cut=True), *whole(7).nodes)))
    assert outcome.held[1].groups == ((0, 2), (1, 3))
    assert outcome.named == {0: HealthStatus.FAULT}


@pytest.mark.parametrize(("slower", "words"), [(5.0, "is slow"), (0.0, "does not work")])
def test_what_lies_between_two_racks_is_reported_and_no_node_is_blamed(slower: float, words: str) -> None:
    racks = range(6), range(6, 12)
    outcome = check_world(World(whole(12).nodes, dict.fromkeys(itertools.product(*racks), slower)))
    assert outcome.named == {}
    notes = [note for note in outcome.diagnosis.notes if words in note]
    assert [note.partition(words)[0] for note in notes] == [
        f"the link between node{one} and node{one + 6} " for one in racks[0]
    ]


def test_of_very_many_links_between_racks_the_first_ones_are_named() -> None:
    racks = range(50), range(50, 100)
    outcome = check_world(World(whole(100).nodes, dict.fromkeys(itertools.product(*racks), 5.0)))
    assert len(outcome.diagnosis.notes) == MAX_LINK_NOTES + 1
    assert outcome.diagnosis.notes[-1].startswith("42 more links between nodes that do well with others are slow")


@pytest.mark.parametrize("nodes", [2, 3, 4, 9, EVERY_PAIR])
def test_measuring_links_every_pair_once_in_as_few_rounds_as_can_be(nodes: int) -> None:
    outcome = check_world(whole(nodes), measure_links=True)
    pairs = sorted(fact.ends for fact in outcome.check.link_facts)
    assert pairs == list(itertools.combinations(range(nodes), 2))
    assert len(outcome.held) == (nodes - 1 if nodes % 2 == 0 else nodes)


def test_measuring_many_nodes_takes_fifteen_rounds_of_the_round_robin() -> None:
    outcome = check_world(whole(40), measure_links=True)
    assert len(outcome.held) == EVERY_PAIR - 1
    assert len({fact.ends for fact in outcome.check.link_facts}) == len(outcome.check.link_facts) == 20 * 15


def test_measuring_includes_a_node_that_computed_in_its_second_try() -> None:
    outcome = check_world(World((*whole(4).nodes, CRASHES_ONCE, NodeTruth())), measure_links=True)
    assert {fact.ends for fact in outcome.check.link_facts} == set(itertools.combinations(range(6), 2))


def test_measuring_does_not_try_a_node_without_a_network_repeatedly() -> None:
    for nodes in (9, 40):
        outcome = check_world(with_nodes(whole(nodes), n3=NodeTruth(cut=True)), measure_links=True)
        assert outcome.named == {3: HealthStatus.FAULT}
        pairs = {fact.ends for fact in outcome.check.link_facts}
        assert sum(3 in pair for pair in pairs) == 3
        assert nodes > EVERY_PAIR or len(pairs) == 3 + 8 * 7 // 2


def test_measuring_leaves_out_a_node_with_three_failed_links_until_it_is_cleared() -> None:
    cut = NodeTruth(cut=True)
    # These are the first partners of node 0.
    outcome = check_world(with_nodes(whole(8), n1=cut, n2=cut, n7=cut), measure_links=True)
    assert [tasks.groups[0] for tasks in outcome.held[:3]] == [(0, 7), (0, 1), (0, 2)]
    assert outcome.held[3].groups[0][0] != 0
    assert outcome.named == dict.fromkeys((1, 2, 7), HealthStatus.FAULT)
    worked = {fact.ends for fact in outcome.check.link_facts if not fact.problem}
    assert worked == set(itertools.combinations((0, 3, 4, 5, 6), 2))


def test_two_links_that_suggest_a_faulty_node_are_tried_once_more() -> None:
    cut = NodeTruth(cut=True)
    outcome = check_world(World((cut, NodeTruth(), NodeTruth(), cut)))
    assert outcome.named == {0: HealthStatus.FAULT, 3: HealthStatus.FAULT}
    tried = Counter(fact.ends for fact in outcome.check.link_facts)
    assert {pair: tried[pair] for pair in ((0, 1), (0, 2), (1, 3), (2, 3))} == dict.fromkeys(
        ((0, 1), (0, 2), (1, 3), (2, 3)), 2
    )
    assert tried[1, 2] == 1


def _is_fit(outcome: Outcome, measured: bool) -> None:
    met: set[tuple[int, int]] = set()
    twice: set[tuple[int, int]] = set()
    quickest = max((fact.gigabytes for fact in outcome.check.link_facts), default=0.0)
    poor = {fact.ends for fact in outcome.check.link_facts if fact.gigabytes * THRESHOLD < quickest}
    most = (2 * EVERY_PAIR if measured else 0) + MAX_ROUNDS + ENOUGH_WITNESSES
    for number, tasks in enumerate(outcome.held):
        members = [node for group in tasks.groups for node in group]
        assert len(members) == len(set(members)), "a node is in two groups of one round"
        assert any(tasks)
        for group in tasks.groups:
            assert list(group) == sorted(group)
            assert len(group) - 1 <= MAX_LINKS
            pairs = set(itertools.combinations(group, 2))
            assert number < most or pairs <= met, "a link is tried for the first time when the check should be over"
            assert not pairs & met or pairs <= poor - twice, "a link that does well, or has been tried twice, is tried"
            twice |= pairs & met
            met |= pairs
        assert number < most or not tasks.compute


@settings(deadline=None)
@given(st.integers(2, 40), st.integers(0, 2**32), st.booleans())
def test_no_round_has_a_node_twice_and_no_link_that_works_is_tried_twice(
    nodes: int, truth: int, measured: bool
) -> None:
    _is_fit(check_world(draw_odd_world(random.Random(truth), nodes), truth, measure_links=measured), measured)
