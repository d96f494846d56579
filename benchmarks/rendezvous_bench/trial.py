"""One trial: a fresh meeting place, a number of nodes, and the figures that come of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from comparison.lost import Late

from dlrover_run.coordination.rules import KEEP_ALIVE_INTERVAL
from rendezvous_bench.gathering import Gathering
from rendezvous_bench.meeting_place import MeetingPlace

NANOSECOND = 1e-9

STEADY_INTERVALS = 2
"""Keep-alive intervals over which the processor time of a job at work is taken, and for which it settles before."""

Figure = Literal["last-joiner", "at-once", "death", "memory", "cpu", "steady"]


@dataclass(frozen=True)
class Rival:
    """A rendezvous. `server` is the command of the meeting place, `nodes` the module that plays nodes of it.

    `shrinks` says that a node's death leads to a new world without any worker having to fail first.
    """

    name: str
    server: tuple[str, ...]
    nodes: str
    shrinks: bool


@dataclass(frozen=True)
class Reading:
    """One figure of one trial. Where `ended` is false it is how long the driver waited, and the true one is greater."""

    value: float
    ended: bool = True


OURS = Rival(
    "dlrover-run",
    (sys.executable, "-m", "dlrover_run.master", "--listen", "127.0.0.1:0", "--ready-fd"),
    "rendezvous_bench.dlrover_nodes",
    shrinks=True,
)
C10D = Rival(
    "c10d",
    (sys.executable, "-m", "rendezvous_bench.torch_store"),
    "rendezvous_bench.torch_nodes",
    shrinks=False,
)


def join_at_once(rival: Rival, nodes: int, limit: float) -> dict[Figure, Reading]:
    """All nodes join in the same moment. Raises Lost."""
    with _gather(rival, nodes) as (_, crowds):
        crowds.join(crowds.everyone)
        began = crowds.first("joining", limit, crowds.everyone)
        try:
            seated = crowds.wait("seated", limit, crowds.everyone, nodes)
        except Late:
            return {"at-once": Reading(limit, ended=False)}
    return {"at-once": Reading((seated - began) * NANOSECOND)}


def join_last(rival: Rival, nodes: int, limit: float, pause: float) -> dict[Figure, Reading]:
    """All but one wait; `pause` seconds later the last one joins; the job is at work for a while; the last one dies.

    Raises Lost.
    """
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
        if rival.shrinks:
            killed = crowds.kill_last()
            try:
                seated = crowds.wait("seated", limit, crowds.others, nodes - 1)
                figures["death"] = Reading((seated - killed) * NANOSECOND)
            except Late:
                figures["death"] = Reading(limit, ended=False)
    return figures


@contextmanager
def _gather(rival: Rival, nodes: int) -> Iterator[tuple[MeetingPlace, Gathering]]:
    # torch's nodes would go on without the last one, were the gathering of the others to take longer than a last call.
    least = max(1, nodes - 1) if rival.shrinks else nodes
    with (
        MeetingPlace(rival.server) as place,
        Gathering(rival.nodes, place.address, "bench", nodes, least) as crowds,
    ):
        yield place, crowds
