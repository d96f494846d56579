"""Where a node looks for the master of its job after the loss of the master's machine, and when it starts the next.

All nodes know the first nodes of the round in the order of their ranks. `Succession` is pure: what the probes of those
machines came to and a time go in, a step comes out. The rule, and why it keeps one world, is in docs/design-notes.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from dlrover_run.rendezvous import reach
from dlrover_run.rendezvous.reach import Reach

START_DELAY = 3.0
"""Seconds, after `lost_after`, for which an agent on the machine of a lost master has the time to start it again, which
takes 0.3 s. Only then the first other node starts the next master."""

CANDIDATE_DELAY = 5.0
"""Seconds from the turn of one candidate to that of the next: a master starts and is found within them."""

PROBE_TIMEOUT = 2.0
"""Seconds for the answer of a machine: TCP repeats its first packet after one second."""

RECALL_INTERVAL = 3.0
"""Seconds between two attempts of the successor to tell a master at the endpoint that the job has moved."""


Probe = Callable[[str, int], Awaitable[Reach]]


async def probe(host: str, port: int) -> Reach:
    """Whether a master listens at an address, within PROBE_TIMEOUT."""
    return await reach.probe(host, port, PROBE_TIMEOUT)


class Step(NamedTuple):
    """What a node does now: it tries the masters at `follow`, one after the other; with `starts` it starts a master
    when none of them takes it in. `ended` is how many nodes are known to have ended with the master."""

    follow: tuple[str, ...] = ()
    starts: bool = False
    ended: int = 0


class Succession:
    """The candidates for the next master, and since when the last one is lost. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self.candidates: tuple[str, ...] = ()
        """Addresses of the first nodes of the round, in the order of their ranks."""
        self.place = ""
        """The address at which this node had the last master."""
        self._lost_at: float | None = None

    def learn(self, candidates: tuple[str, ...]) -> None:
        # A coordinator that has just taken over may not know them yet.
        self.candidates = candidates or self.candidates

    def note_connected(self, place: str) -> None:
        self.place = place
        self._lost_at = None

    def note_lost(self, now: float) -> None:
        if self._lost_at is None:
            self._lost_at = now

    @property
    def others(self) -> tuple[str, ...]:
        """The machines to probe beside that of the last master."""
        return tuple(address for address in self.candidates if address != self.place)

    def step(self, own: str | None, reached: Mapping[str, Reach], lost_after: float, now: float) -> Step:
        """The next step of the node with the address `own`; `reached` has what the probes came to."""
        follow = tuple(address for address in self.others if reached.get(address) is Reach.ACCEPTS)
        if own not in self.others or self._lost_at is None or self.place == own:
            return Step(follow)
        turn = self._lost_at + lost_after + START_DELAY + self.others.index(own) * CANDIDATE_DELAY
        if now < turn:
            return Step(follow)
        if reached.get(self.place) is Reach.REFUSES:
            # The machine answers, and no agent on it has started a master: the nodes there have ended.
            return Step(follow, starts=True, ended=1)
        if reached.get(self.place) is Reach.ACCEPTS:
            return Step(follow)
        # That machine is lost, or this one is cut off from it. A node that is cut off from most of the others waits.
        here = {own, *(address for address in self.others if reached.get(address) in (Reach.ACCEPTS, Reach.REFUSES))}
        return Step(follow, starts=2 * len(here) > len(self.candidates))
