"""Where a node looks for the master of its job after the loss of the master's machine, and when it starts the next.

All nodes know the first nodes of the round in the order of their ranks or, before the first round, those that the
cluster lists. `Succession` is pure: what the probes of those machines came to and a time go in, a step comes out. The
rule, and why it keeps one world, is in docs/design-notes.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.quorum import LostMaster, needed_members
from dlrover_run.rendezvous import reach
from dlrover_run.rendezvous.master_client.listed_hosts import ListedHosts
from dlrover_run.rendezvous.reach import Reach

START_DELAY = 3.0
"""Seconds, after `lost_after`, for which an agent on the machine of a lost master has the time to start it again, which
takes 0.3 s. Only then the first other node starts the next master."""

FIRST_DELAY = 30.0
"""Seconds for which a node that has not met the master yet leaves the first node the time to start it. Launchers start
within seconds of each other, but one may import from a cold network disk. A first node that comes later joins."""

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


class SuccessionStep(NamedTuple):
    """What a node does now: it tries the masters at `follow`, one after the other; with `starts` it starts a master
    when none of them takes it in, which gets the one before it. `obstacle` is why it starts none though it is
    its turn, a clause."""

    follow: tuple[str, ...] = ()
    starts: LostMaster | None = None
    obstacle: str = ""


class Succession:
    """The candidates for the next master, and since when the last one is lost, or the first one not found. Times are of
    one monotonic clock."""

    def __init__(self) -> None:
        self.candidates: tuple[str, ...] = ()
        """Addresses of the first nodes of the round, in the order of their ranks; before it, of the first nodes that
        the cluster lists."""
        self.place = ""
        """The address at which this node had the last master or, before it met one, that of the first node."""
        self.own: str | None = None
        """The address of this node among those that the cluster lists."""
        self.nodes = 0
        """How many nodes the last round has; before it, how many the cluster lists."""
        self._has_met = False
        self._had_round = False
        self._lost_at: float | None = None

    def learn_listed(self, listed: ListedHosts, nodes: int) -> None:
        """Take what the cluster lists, which counts until the first round."""
        if not self._had_round:
            self.candidates, self.own, self.nodes = listed.addresses, listed.own, nodes
            self.place = self.place or listed.addresses[0]

    def learn(self, candidates: tuple[str, ...], nodes: int) -> None:
        """Take the first nodes of a round, and how many nodes it has, 0 if this node has no part in it."""
        # A coordinator that has just taken over may not know them yet, and before the first round there are none.
        if candidates:
            self.candidates, self.own, self._had_round = candidates, None, True
            # A node without a part in the round knows at least of these.
            self.nodes = nodes or max(len(candidates), self.nodes)

    def note_connected(self, place: str) -> None:
        self.place = place
        self._has_met = True
        self._lost_at = None

    def note_lost(self, now: float) -> None:
        """The connection to the master has ended, or this node begins to look for the first one."""
        if self._lost_at is None:
            self._lost_at = now

    @property
    def is_searching(self) -> bool:
        return self._lost_at is not None

    @property
    def others(self) -> tuple[str, ...]:
        """The machines to probe beside that of the last master."""
        return tuple(address for address in self.candidates if address != self.place)

    def other_places(self, own: str) -> tuple[str, ...]:
        """Where another master of the job may be when the node with that address has started one: at the place of the
        last one, and on the candidates before it. Nodes that began to look at different times may have had their turn
        at the same time; of two masters that wait the first candidate's goes on."""
        before = self.candidates[: self.candidates.index(own)] if own in self.candidates else ()
        return tuple(dict.fromkeys(address for address in (self.place, *before) if address))

    def step(self, own: str | None, reached: Mapping[str, Reach], rules: JobRules, now: float) -> SuccessionStep:
        """The next step of the node with the address `own`; `reached` has what the probes came to."""
        follow = tuple(address for address in self.others if reached.get(address) is Reach.ACCEPTS)
        if own not in self.others or self._lost_at is None or self.place == own:
            return SuccessionStep(follow)
        delay = rules.lost_after + START_DELAY if self._has_met else FIRST_DELAY
        turn = self._lost_at + delay + self.others.index(own) * CANDIDATE_DELAY
        at_place = reached.get(self.place)
        if now < turn or at_place is Reach.ACCEPTS:
            return SuccessionStep(follow)
        # Where the machine answers and no agent on it has started a master again, the nodes there have ended. Of a
        # first node that was never met it is not known: it may start its master at any time.
        ended = int(at_place is Reach.REFUSES and self._has_met)
        starts = LostMaster(self.nodes, ended)
        if ended:
            return SuccessionStep(follow, starts)
        needed = max(needed_members(self.nodes, rules.min_size, 0), rules.min_size)
        if not self._had_round and needed >= self.nodes:
            return SuccessionStep(follow, obstacle=f"all {self.nodes} nodes of the job are needed for its first round")
        # That machine is lost, or this one is cut off from it. A node that is cut off from most of the others waits.
        answers = {address for address in self.candidates if reached.get(address) in (Reach.ACCEPTS, Reach.REFUSES)}
        here, all_of_them = len({own, *answers}), len(self.candidates)
        if 2 * here > all_of_them:
            return SuccessionStep(follow, starts)
        return SuccessionStep(
            follow,
            obstacle=f"this node reaches {here} of {all_of_them} machines of the job, too few to start the next master",
        )
