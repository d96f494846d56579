"""One trial: a fresh meeting place, a number of nodes, and the figures that come of it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from comparison.lost import Late

from dlrover_run.coordination.rules import KEEP_ALIVE_ATTEMPTS, KEEP_ALIVE_INTERVAL
from rendezvous_bench.etcd_place import EtcdPlace
from rendezvous_bench.gathering import Gathering
from rendezvous_bench.meeting_place import MeetingPlace, announce

NANOSECOND = 1e-9

STEADY_INTERVALS = 2
"""Keep-alive intervals over which the processor time of a job at work is taken, and for which it settles before."""

LEASE = 5.0
"""Seconds of silence after which a node is lost, where one is killed: in etcd the life of its lease."""

RENEWAL_INTERVAL = LEASE / KEEP_ALIVE_ATTEMPTS
"""Seconds between two signs of life, or renewals of a lease, of a job in which a node is killed."""

SETTLE = 2.0
"""Seconds after the last node has its place in which the nodes tell that they have it. What they ask until then counts
as asked for that round; it is shorter than the default interval between two renewals of a lease."""

RENEWAL = "LeaseKeepAlive"
"""The requests that a job makes as time goes by and not for a round."""

Figure = Literal[
    "last-joiner",
    "at-once",
    "death",
    "elected-death",
    "first-round-requests",
    "next-round-requests",
    "memory",
    "cpu",
    "steady",
]


@dataclass(frozen=True)
class Rival:
    """A rendezvous. `open` starts its meeting place, `nodes` is the module that plays nodes of it.

    `shrinks` says that a node's death leads to a new world without any worker having to fail first; `elects` that one
    of the nodes decides for all, and that requests are counted.
    """

    name: str
    open: Callable[[], MeetingPlace]
    nodes: str
    shrinks: bool
    elects: bool = False


@dataclass(frozen=True)
class Reading:
    """One figure of one trial. Where `ended` is false it is how long the driver waited, and the true one is greater.

    `parts` are what it is made of, or what goes beside it, by name.
    """

    value: float
    ended: bool = True
    parts: Mapping[str, float] = field(default_factory=dict)


OURS = Rival(
    "dlrover-run",
    partial(announce, (sys.executable, "-m", "dlrover_run.master", "--listen", "127.0.0.1:0", "--ready-fd")),
    "rendezvous_bench.dlrover_nodes",
    shrinks=True,
)
ETCD = Rival("etcd", EtcdPlace, "rendezvous_bench.etcd_nodes", shrinks=True, elects=True)
C10D = Rival(
    "c10d",
    partial(announce, (sys.executable, "-m", "rendezvous_bench.torch_store")),
    "rendezvous_bench.torch_nodes",
    shrinks=False,
)


def join_at_once(rival: Rival, nodes: int, limit: float) -> dict[Figure, Reading]:
    """All nodes join in the same moment. Raises Lost."""
    with _gather(rival, nodes) as (place, crowds):
        asked = place.requests()
        crowds.join(crowds.everyone)
        began = crowds.first("joining", limit, crowds.everyone)
        try:
            seated = crowds.wait("seated", limit, crowds.everyone, nodes)
        except Late:
            return {"at-once": Reading(limit, ended=False)}
        figures: dict[Figure, Reading] = {"at-once": Reading((seated - began) * NANOSECOND)}
        if rival.elects:
            crowds.let_be(SETTLE)
            figures["first-round-requests"] = per_node(place.requests() - asked, nodes)
    return figures


def join_last(rival: Rival, nodes: int, limit: float, pause: float) -> dict[Figure, Reading]:
    """All but one wait; `pause` seconds later the last one joins; the job is at work for a while. Raises Lost."""
    with _gather(rival, nodes) as (place, crowds):
        used_before = place.cpu_seconds()
        crowds.join(crowds.others)
        # Should they still be at it, the last one joins all the same: what follows is then measured and not guessed.
        with suppress(Late):
            crowds.wait("heard", limit, crowds.others)
        crowds.let_be(pause)
        crowds.join(crowds.last)
        began = crowds.first("joining", limit, crowds.last)
        try:
            seated = crowds.wait("seated", limit, crowds.everyone, nodes)
        except Late:
            return {"last-joiner": Reading(limit, ended=False)}
        figures: dict[Figure, Reading] = {
            "last-joiner": Reading((seated - began) * NANOSECOND),
            "cpu": Reading(place.cpu_seconds() - used_before),
        }
        if rival.shrinks:
            place.cpu_share(KEEP_ALIVE_INTERVAL * STEADY_INTERVALS)
            figures["steady"] = Reading(place.cpu_share(KEEP_ALIVE_INTERVAL * STEADY_INTERVALS))
        figures["memory"] = Reading(place.memory())
    return figures


def lose_one(rival: Rival, nodes: int, limit: float, age: float, elected: bool) -> dict[Figure, Reading]:
    """A node of a job at work dies: the one that the others have elected, or one that decides nothing. `age` seconds
    are added to its life, so that its last sign of life is not always as old. Raises Lost."""
    name: Figure = "elected-death" if elected else "death"
    with _gather(rival, nodes, RENEWAL_INTERVAL) as (place, crowds):
        # Whoever comes first is elected.
        for crowd in (crowds.last, crowds.others) if elected else (crowds.others, crowds.last):
            crowds.join(crowd)
            crowds.wait("heard", limit, crowd)
        crowds.wait("seated", limit, crowds.everyone, nodes)
        crowds.let_be(SETTLE + age)
        asked = place.requests()
        killed = crowds.kill_last()
        try:
            seated = crowds.wait("seated", limit, crowds.others, nodes - 1)
        except Late:
            return {name: Reading(limit, ended=False)}
        figures: dict[Figure, Reading] = {name: Reading((seated - killed) * NANOSECOND)}
        if rival.elects and not elected:
            crowds.let_be(SETTLE)
            figures["next-round-requests"] = per_node(place.requests() - asked, nodes - 1)
    return figures


def per_node(asked: Counter[str], nodes: int) -> Reading:
    """Requests a node, all but renewals of leases, and the same by method, those included."""
    by_method = {method: count / nodes for method, count in sorted(asked.items())}
    return Reading(sum(count for method, count in by_method.items() if method != RENEWAL), parts=by_method)


@contextmanager
def _gather(
    rival: Rival, nodes: int, interval: float = KEEP_ALIVE_INTERVAL
) -> Iterator[tuple[MeetingPlace, Gathering]]:
    # torch's nodes would go on without the last one, were the gathering of the others to take longer than a last call.
    least = max(1, nodes - 1) if rival.shrinks else nodes
    with (
        rival.open() as place,
        Gathering(rival.nodes, place.address, "bench", nodes, least, interval) as crowds,
    ):
        yield place, crowds
