"""How a node spaces its attempts to reach the place of its job's records, a master or etcd, how long it goes on, and
when silence means that a master is gone.

Pure: whoever owns these tells them what happened and at which time of one monotonic clock, in seconds.


What a node does about records that live elsewhere, wherever that is: it looks for the place, takes part while it has
it, looks again when it has lost it, and gives up when there is no use in that.

The place may die, be silent and come back. Workers never notice; what the coordinator wants is what it said last.
"""

from __future__ import annotations

import abc
import asyncio
import random
from collections.abc import Callable

import msgspec

from dlrover_run.coordination.bounds import MAX_WHAT
from dlrover_run.coordination.records import OVER, Assignment, NodePhase, NodeReport, Waiting
from dlrover_run.nursery import wait_until
from dlrover_run.rendezvous.client import AssignmentTracker, OnChange
from dlrover_run.spec import JobSpec

BACKOFF_FIRST = 0.2
"""Seconds that a pause between the first attempt to reach the place and the second one can last at most."""

BACKOFF_MAX = 3.0
"""Seconds that no pause between two attempts is longer than. A coordinator's RETURN_GRACE is twice that."""

ID_IN_USE_TIMEOUT = 30.0
"""Seconds for which a refusal that may pass is met with another attempt; then the node gives up with its reason.

A node id is refused while another process with that id is alive, which may be this node's dying predecessor.
"""

LATENESS = 0.5
"""Seconds by which a timer is late on a busy machine at times. By more, and this process was stopped or starved."""

_IDLE = frozenset({NodePhase.WAITING, NodePhase.SUCCEEDED, NodePhase.FAILED})


class ReconnectBackoff:
    """One node's search for that place: when to try again, and whether there is any use in that.

    It goes on for ever while workers run. A node without any gives up when the place has stayed away for `join_timeout`
    seconds, or has refused it for `refusal_patience` seconds. `chance` returns a random number from 0 to 1.
    """

    def __init__(
        self,
        join_timeout: float,
        now: float,
        chance: Callable[[], float],
        refusal_patience: float = ID_IN_USE_TIMEOUT,
    ) -> None:
        self.join_timeout = join_timeout
        self.refusal_patience = refusal_patience
        self._chance = chance
        self._failures = 0
        self._connected_at = now
        self._away_since: float | None = now
        self._idle_since: float | None = now
        self._refused_since: float | None = None

    def see(self, phase: NodePhase, now: float) -> None:
        """What the node is doing now."""
        if phase not in _IDLE:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    def connected(self, now: float) -> None:
        """The node has been taken in."""
        self._connected_at = now
        self._away_since = None
        self._refused_since = None

    def lost(self, now: float) -> None:
        """The connection has ended."""
        self._away_since = now
        self._refused_since = None
        # Else a master that ends every stream at once would be called without a pause.
        self._failures = 0 if now - self._connected_at >= BACKOFF_MAX else self._failures + 1

    def failed(self) -> None:
        """An attempt has failed because nobody answered."""
        self._failures += 1
        self._refused_since = None

    def refused(self, now: float) -> bool:
        """The node is refused, which may pass; whether it has been for too long."""
        self._failures += 1
        if self._away_since is None:
            self._away_since = now
        if self._refused_since is None:
            self._refused_since = now
        return now - self._refused_since >= self.refusal_patience

    def invited(self) -> None:
        """What the refusal was about has gone, so the next attempt need not wait."""
        self._failures = 0

    def pause(self) -> float:
        """Seconds until the next attempt, other ones each time, so that a thousand nodes do not call at once.

        With n failures so far: none for n = 0, else up to the least of BACKOFF_MAX and BACKOFF_FIRST * 2**n.
        """
        if not self._failures:
            return 0.0
        return self._chance() * min(BACKOFF_MAX, BACKOFF_FIRST * 2.0 ** min(self._failures, 16))

    def left(self, now: float) -> float | None:
        """Seconds after which the node gives up; None while it is taken in or has workers that run."""
        if self._away_since is None or self._idle_since is None:
            return None
        return max(0.0, max(self._away_since, self._idle_since) + self.join_timeout - now)


class Silence:
    """How long a master has not been heard, less the time in which this process itself could not have heard it.

    Whoever owns this looks at the times that he sets himself; how late a look is shows how long we were not running.
    """

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self.deadline = now + limit

    def hear(self, now: float) -> None:
        """The master has said something."""
        self.deadline = max(self.deadline, now + self._limit)

    def too_long(self, due: float, now: float) -> bool:
        """Whether the master has been silent for too long, at a look that was due at `due`."""
        late = now - due
        if late > LATENESS:
            # What the master said meanwhile is still to be read, so it has a whole limit once more.
            self.deadline = max(self.deadline + late, now + self._limit)
        return now >= self.deadline


CLOSE_TIMEOUT = 2.0
"""Seconds that a node which leaves gives its last status to be stored; then the others find it lost instead."""


class RemoteClient(abc.ABC):
    """Keeps in touch with the place of the records, in a task of its own on the running loop.

    `place` names it in sentences. The address that this node advertises is filled in here: who reaches the place knows
    from which of his addresses. So is what a node of a job with parameter servers has to repeat.
    """

    def __init__(
        self,
        spec: JobSpec,
        place: str,
        listener: OnChange,
        say: Callable[[str], None],
        chance: Callable[[], float] = random.random,
        refusal_patience: float = ID_IN_USE_TIMEOUT,
    ) -> None:
        self._spec = spec
        self._place = place
        self._listener = listener
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._search = ReconnectBackoff(spec.rules.join_timeout, self._loop.time(), chance, refusal_patience)
        self._status: NodeReport | None = None
        self._changed = asyncio.Event()
        self._own_address = spec.local_addr
        self._orders = AssignmentTracker()
        self._met = False
        self._connected = False
        self._told_lost = False
        self._closing = False
        self._told: set[str] = set()
        self.problem: str | None = None
        self.is_user_error = False
        self._task = asyncio.ensure_future(self._take_part())
        self._task.add_done_callback(self._note_defect)

    @property
    def assignment(self) -> Assignment:
        """The latest that counts."""
        return self._orders.assignment

    @property
    def pids(self) -> set[int]:
        """Processes that the board has started and that outlive this agent on purpose."""
        return set()

    def report(self, status: NodeReport) -> None:
        """Put this node's latest status on the board; one that has not changed costs nothing."""
        if status != self._status:
            self._status = status
            self._search.see(status.phase, self._loop.time())
            self._changed.set()

    async def close(self) -> None:
        """Let the last status be stored, if the place can be reached now, and let go of the connection."""
        self._closing = True
        self._changed.set()
        if self._connected:
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT)
        self._task.cancel()
        await asyncio.wait([self._task])

    @abc.abstractmethod
    async def _attempt(self) -> None:
        """Find the place and stay until that ends, or until `close` has been carried out. What goes wrong becomes one
        of the `_note_...` of this class; only defects are raised."""

    async def _take_part(self) -> None:
        await self._changed.wait()
        while not self._is_done:
            await asyncio.sleep(self._search.pause())
            await self._attempt()

    @property
    def _is_done(self) -> bool:
        return self._closing or self.problem is not None or self.assignment.phase in OVER

    def _take(self, wanted: Assignment) -> None:
        before = self._orders.memory
        if self._orders.take(wanted):
            if self._orders.memory != before:
                # It stands in the status, of which the agent knows nothing new.
                self._changed.set()
            self._listener()

    def _note_connected(self) -> None:
        self._search.connected(self._loop.time())
        self._met = self._connected = True
        if self._told_lost:
            self._told_lost = False
            self._say(f"{self._place} is back")

    def _note_end(self, reason: str, shown: bool = False) -> None:
        """The connection has ended, or an attempt has failed. `shown` puts the reason into the line about a loss."""
        now = self._loop.time()
        if self._connected:
            self._connected = False
            self._search.lost(now)
        else:
            self._search.failed()
        if self._is_done or self._leaves:
            # The same signal may have ended the place of the records, and this node has no use for it any more.
            return
        if self._met and not self._told_lost:
            self._told_lost = True
            then = "the workers train on" if self._trains else "this node goes on looking for it"
            because = f" ({reason})" if shown else ""
            self._say(f"lost {self._place}{because}; {then}")
        left = self._search.left(now)
        if left == 0:
            self._give_up(self._why_away(reason))
        elif not self._met:
            self._wait_for(f"{self._place} ({self._why_not_yet(reason)})", left)

    def _note_refusal(self, reason: str, retry: bool) -> None:
        """The node is let in no more; `retry` says that this may pass, for which a visitor does not wait."""
        if self._visits or self._search.refused(self._loop.time()) or not retry:
            self._give_up(reason)
        else:
            self._wait_for(reason, None)

    def _why_away(self, reason: str) -> str:
        for_seconds = f"{self._search.join_timeout:g} s (--rdzv-conf join_timeout)"
        if self._met:
            return f"{self._place} has been away for {for_seconds}: {reason}"
        return f"{self._place} was not found within {for_seconds}: {reason}"

    def _why_not_yet(self, reason: str) -> str:
        return reason

    def _wait_for(self, what: str, seconds: float | None) -> None:
        """Show what the node waits for, while no coordinator says so."""
        if self._orders.wait(Waiting(what[:MAX_WHAT], seconds)):
            self._listener()

    def _give_up(self, problem: str, is_user_error: bool = False) -> None:
        self.problem = problem
        self.is_user_error = is_user_error
        self._listener()

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._say(sentence)

    @property
    def _visits(self) -> bool:
        """Whether this node only says what somebody wishes: it begins no job, and nobody may depend on it."""
        hosting = None if self._status is None else self._status.cluster
        return hosting is not None and hosting.is_client

    @property
    def _leaves(self) -> bool:
        return self._status is not None and self._status.phase in (NodePhase.LEAVING, NodePhase.LEFT)

    @property
    def _trains(self) -> bool:
        return self._status is not None and self._status.phase is NodePhase.RUNNING

    def _own_status(self) -> NodeReport:
        assert self._status is not None, "nothing is done before the first status"
        status = self._status
        if self._own_address is not None:
            status = msgspec.structs.replace(status, address=self._own_address)
        if status.cluster is not None:
            status = msgspec.structs.replace(status, cluster=self._orders.memory.add_to(status.cluster))
        return status

    async def _wait_for_change(self, due: float | None = None) -> None:
        """Return when there is another status, or `close` was called, or at that time."""
        self._changed.clear()
        await wait_until(self._changed, None if due is None else due - self._loop.time())

    def _note_defect(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._give_up(f"internal error with {self._place}: {error!r}; please report it")
