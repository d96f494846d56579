"""Who gets which rank."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from virtual_job import VirtualJob, rules

from dlrover_run.coordination.membership import MemberState
from dlrover_run.coordination.model import Member, NodeReport, Plan, PlanPhase, RoundKey, rank_assignments
from dlrover_run.coordination.ranks import assign_ranks, natural_order


def node(name: str, arrived: float = 0.0, wish: int | None = None, address: str = "", host: str = "") -> MemberState:
    status = NodeReport(
        node_id=name, incarnation="1", host=host or name, address=address, port=1, workers=1, preferred_rank=wish
    )
    return MemberState(status, arrived, arrived)


def member(name: str) -> Member:
    return Member(name, "1", name, 1)


def seated(before: list[str], living: list[MemberState], size: int) -> list[str]:
    return [p.report.node_id for p in assign_ranks([member(name) for name in before], living, size)]


def test_a_first_round_follows_the_natural_order_of_hosts() -> None:
    living = [node(name, arrived) for arrived, name in enumerate(["node10", "node9", "node2", "node1"])]
    assert seated([], living, 4) == ["node1", "node2", "node9", "node10"]


def test_nodes_of_one_host_follow_their_addresses_and_then_their_arrival() -> None:
    places = [("c", 3.0, "10.0.0.10"), ("a", 2.0, "10.0.0.9"), ("b", 1.0, "10.0.0.9")]
    living = [node(name, arrived, address=address, host="vm") for name, arrived, address in places]
    assert seated([], living, 3) == ["b", "a", "c"]


def test_the_first_to_come_take_part_and_the_rest_are_spares() -> None:
    living = [node("a", 3), node("b", 1), node("c", 2)]
    assert seated([], living, 2) == ["b", "c"]


def test_survivors_keep_their_ranks_and_a_replacement_takes_the_free_one() -> None:
    assert seated(["c", "b", "a"], [node("a"), node("c"), node("new", 5)], 3) == ["c", "new", "a"]


def test_a_survivor_without_a_rank_of_that_number_takes_a_free_one() -> None:
    assert seated(["a", "b", "c"], [node("a"), node("c")], 2) == ["a", "c"]


def test_survivors_come_before_newcomers_who_were_here_earlier() -> None:
    assert seated(["a", "b"], [node("a", 9), node("b", 9), node("new", 0)], 2) == ["a", "b"]


def test_a_smaller_round_drops_the_highest_ranks() -> None:
    assert seated(["d", "c", "b", "a"], [node(name) for name in "abcd"], 2) == ["d", "c"]


def test_a_preferred_rank_is_granted_if_it_is_free() -> None:
    assert seated([], [node("a", wish=2), node("b"), node("c", wish=0)], 3) == ["c", "b", "a"]
    assert seated(["x", "y"], [node("x"), node("new", wish=0)], 2) == ["x", "new"]


def test_of_two_nodes_that_prefer_one_rank_the_first_gets_it() -> None:
    assert seated([], [node("late", 2, wish=0), node("early", 1, wish=0)], 2) == ["early", "late"]


def test_a_preferred_rank_outside_the_round_is_ignored() -> None:
    assert seated([], [node("a", wish=7), node("b", wish=0)], 2) == ["b", "a"]


def test_a_replacement_has_the_rank_of_the_node_that_it_replaces_also_after_a_smaller_round() -> None:
    first = [node(name, wish=rank) for rank, name in enumerate("abc")]
    assert seated([], first, 3) == ["a", "b", "c"]
    left = [first[0], first[2]]
    assert seated(["a", "b", "c"], left, 2) == ["a", "c"]
    assert seated(["a", "c"], [*left, node("new", 9, wish=1)], 3) == ["a", "new", "c"]


def test_a_survivor_leaves_its_rank_only_for_a_free_one() -> None:
    assert seated(["x", "y"], [node("x"), node("y", wish=0)], 2) == ["x", "y"]
    assert seated(["z", "y"], [node("y", wish=0), node("new")], 2) == ["y", "new"]


def test_another_incarnation_is_a_newcomer() -> None:
    again = MemberState(NodeReport(node_id="a", incarnation="2", host="a", address="a", port=1, workers=1), 5.0, 5.0)
    assert assign_ranks([member("a"), member("b")], [again, node("b")], 2)[1].report.node_id == "b"


@given(
    st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8),
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.none() | st.integers(0, 9)), unique_by=lambda one: one[0]),
    st.data(),
)
def test_ranks_are_dense_whatever_the_order_of_the_members(
    before: list[str], living: list[tuple[str, int | None]], data: st.DataObject
) -> None:
    size = data.draw(st.integers(0, len(living)))
    nodes = [node(name, arrived, wish) for arrived, (name, wish) in enumerate(living)]
    chosen = seated(before, nodes, size)
    assert len(chosen) == len(set(chosen)) == size
    wishes = dict(living)
    for rank, name in enumerate(chosen):
        if name in before and before.index(name) < size:
            assert rank in (before.index(name), wishes[name])
            assert rank == before.index(name) or before[rank:] == [] or before[rank] not in chosen
    assert seated(before, data.draw(st.permutations(nodes)), size) == chosen


@given(st.lists(st.text(max_size=8), unique=True, max_size=5), st.randoms())
def test_any_names_can_be_put_in_order(names: list[str], random: Random) -> None:
    mixed = random.sample(names, len(names))
    assert sorted(map(natural_order, mixed)) == sorted(map(natural_order, names))


def test_global_ranks_count_the_workers_of_the_nodes_before() -> None:
    job = VirtualJob(rules(3, 3))
    job.come("a", workers=3, role="trainer")
    job.come("b", workers=1, role="reader")
    job.come("c", workers=2, role="trainer")
    firsts = {name: job.seat(name).first_rank for name in "abc"}
    assert firsts == {"a": 0, "b": 3, "c": 4}
    assert {job.seat(name).world_size for name in "abc"} == {6}
    in_role = {name: (job.seat(name).role_first_rank, job.seat(name).role_world_size) for name in "abc"}
    assert in_role == {"a": (0, 5), "b": (0, 1), "c": (3, 5)}


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["x", "y"])), min_size=1, max_size=6))
def test_ranks_are_dense_in_the_world_and_in_each_role(nodes: list[tuple[int, str]]) -> None:
    members = tuple(Member(str(n), "1", "h", workers, role) for n, (workers, role) in enumerate(nodes))
    places = list(rank_assignments(Plan(phase=PlanPhase.TRAINING, key=RoundKey(1, 1), members=members)).values())
    world = [rank for seat in places for rank in range(seat.first_rank, seat.first_rank + seat.workers)]
    assert world == list(range(sum(workers for workers, _ in nodes)))
    assert all(seat.world_size == len(world) for seat in places)
    for role in ("x", "y"):
        own = [seat for (_, its_role), seat in zip(nodes, places, strict=True) if its_role == role]
        ranks = [rank for seat in own for rank in range(seat.role_first_rank, seat.role_first_rank + seat.workers)]
        assert ranks == list(range(len(ranks)))
        assert all(seat.role_world_size == len(ranks) for seat in own)
