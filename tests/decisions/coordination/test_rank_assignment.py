"""Which node gets which rank."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.virtual_torch import TorchJob, rules

from dlrover_run.coordination.membership import KnownNode
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodeReport
from dlrover_run.coordination.records.round import Member, RoundKey
from dlrover_run.coordination.rounds.ranks import assign_ranks, natural_order, rank_assignments


def node(name: str, arrived: float = 0.0, preferred: int | None = None, address: str = "", host: str = "") -> KnownNode:
    status = NodeReport(
        node_id=name, incarnation="1", host=host or name, address=address, port=1, workers=1, preferred_rank=preferred
    )
    return KnownNode(status, arrived, arrived)


def member(name: str) -> Member:
    return Member(name, "1", name, 1)


def ranked(before: list[str], living: list[KnownNode], size: int) -> list[str]:
    return [p.report.node_id for p in assign_ranks([member(name) for name in before], living, size)]


def named(names: str, **preferred_ranks: int) -> list[KnownNode]:
    """Return nodes that joined in this order, with the ranks that some of them prefer."""
    return [node(name, arrived, preferred_ranks.get(name)) for arrived, name in enumerate(names.split())]


HOST = [
    node("c", 3.0, address="10.0.0.10", host="vm"),
    node("a", 2.0, address="10.0.0.9", host="vm"),
    node("b", 1.0, address="10.0.0.9", host="vm"),
]

TABLE = [
    ("a first round follows the natural order of hosts", "", named("node10 node9 node2 node1"),
     "node1 node2 node9 node10"),
    ("nodes of one host follow their addresses and then their arrival", "", HOST, "b a c"),
    ("the first to come take part", "", named("b c a"), "b c"),
    ("survivors keep their ranks and a replacement takes the free one", "c b a", named("a c new"), "c new a"),
    ("a survivor without a rank of that number takes a free one", "a b c", named("a c"), "a c"),
    ("survivors come before newcomers that were here earlier", "a b", named("new a b"), "a b"),
    ("a smaller round drops the highest ranks", "d c b a", named("a b c d"), "d c"),
    ("a preferred rank is granted if it is free", "", named("a b c", a=2, c=0), "c b a"),
    ("a preferred rank of a survivor is not free", "x y", named("x new", new=0), "x new"),
    ("of two nodes that prefer one rank the first gets it", "", named("early late", late=0, early=0), "early late"),
    ("a preferred rank outside the round is ignored", "", named("a b", a=7, b=0), "b a"),
    ("a smaller round closes the gap", "a b c", named("a c", a=0, c=2), "a c"),
    ("the gap opens again for a replacement", "a c", named("a c new", a=0, c=2, new=1), "a new c"),
    ("a survivor does not leave its rank for one in use", "x y", named("x y", y=0), "x y"),
    ("a survivor leaves its rank for a free one", "z y", named("y new", y=0), "y new"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "living", "ranks"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_assigned_ranks(before: str, living: list[KnownNode], ranks: str) -> None:
    assert ranked(before.split(), living, len(ranks.split())) == ranks.split()


def test_another_incarnation_is_a_newcomer() -> None:
    again = KnownNode(NodeReport(node_id="a", incarnation="2", host="a", address="a", port=1, workers=1), 5.0, 5.0)
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
    nodes = [node(name, arrived, preferred) for arrived, (name, preferred) in enumerate(living)]
    chosen = ranked(before, nodes, size)
    assert len(chosen) == len(set(chosen)) == size
    preferred_ranks = dict(living)
    for rank, name in enumerate(chosen):
        if name in before and before.index(name) < size:
            assert rank in (before.index(name), preferred_ranks[name])
            assert rank == before.index(name) or before[rank:] == [] or before[rank] not in chosen
    assert ranked(before, data.draw(st.permutations(nodes)), size) == chosen


@given(st.lists(st.text(max_size=8), unique=True, max_size=5), st.randoms())
def test_any_names_can_be_put_in_order(names: list[str], random: Random) -> None:
    mixed = random.sample(names, len(names))
    assert sorted(map(natural_order, mixed)) == sorted(map(natural_order, names))


def test_global_ranks_count_the_workers_of_the_nodes_before() -> None:
    job = TorchJob(rules(3, 3))
    job.come("a", workers=3, role="trainer")
    job.come("b", workers=1, role="reader")
    job.come("c", workers=2, role="trainer")
    firsts = {name: job.ranks_of(name).first_rank for name in "abc"}
    assert firsts == {"a": 0, "b": 3, "c": 4}
    assert {job.ranks_of(name).world_size for name in "abc"} == {6}
    in_role = {name: (job.ranks_of(name).role_first_rank, job.ranks_of(name).role_world_size) for name in "abc"}
    assert in_role == {"a": (0, 5), "b": (0, 1), "c": (3, 5)}


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["x", "y"])), min_size=1, max_size=6))
def test_ranks_are_dense_in_the_world_and_in_each_role(nodes: list[tuple[int, str]]) -> None:
    members = tuple(Member(str(n), "1", "h", workers, role) for n, (workers, role) in enumerate(nodes))
    places = list(rank_assignments(Plan(phase=PlanPhase.TRAINING, key=RoundKey(1, 1), members=members)).values())
    world = [rank for assigned in places for rank in range(assigned.first_rank, assigned.first_rank + assigned.workers)]
    assert world == list(range(sum(workers for workers, _ in nodes)))
    assert all(assigned.world_size == len(world) for assigned in places)
    for role in ("x", "y"):
        own = [assigned for (_, its_role), assigned in zip(nodes, places, strict=True) if its_role == role]
        ranks = [
            rank
            for assigned in own
            for rank in range(assigned.role_first_rank, assigned.role_first_rank + assigned.workers)
        ]
        assert ranks == list(range(len(ranks)))
        assert all(assigned.role_world_size == len(ranks) for assigned in own)
