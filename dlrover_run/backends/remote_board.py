"""What a node does about records that live elsewhere, wherever that is: it looks for the place, takes part while it has
it, looks again when it has lost it, and gives up when there is no use in that.

The place may die, be silent and come back. Workers never notice; what the coordinator wants is what it said last.
"""

from __future__ import annotations

import abc
import asyncio
import random
from collections.abc import Callable

import msgspec

from dlrover_run.backends.board import Listener
from dlrover_run.backends.orders import Orders
from dlrover_run.backends.patience import ID_IN_USE_PATIENCE, Search
from dlrover_run.coordination.bounds import MAX_WHAT
from dlrover_run.coordination.records import OVER, Assignment, NodePhase, NodeStatus, Waiting
from dlrover_run.nursery import wait_until
from dlrover_run.spec import JobSpec

CLOSE_TIMEOUT = 2.0
"""Seconds that a node which leaves gives its last status to be stored; then the others find it lost instead."""


class RemoteBoard(abc.ABC):
    """Keeps in touch with the place of the records, in a task of its own on the running loop.

    `place` names it in sentences. The address that this node advertises is filled in here: who reaches the place knows
    from which of his addresses. So is what a node of a job with parameter servers has to repeat.
    """

    def __init__(
        self,
        spec: JobSpec,
        place: str,
        listener: Listener,
        say: Callable[[str], None],
        chance: Callable[[], float] = random.random,
        refusal_patience: float = ID_IN_USE_PATIENCE,
    ) -> None:
        self._spec = spec
        self._place = place
        self._listener = listener
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._search = Search(spec.rules.join_timeout, self._loop.time(), chance, refusal_patience)
        self._status: NodeStatus | None = None
        self._changed = asyncio.Event()
        self._own_address = spec.local_addr
        self._orders = Orders()
        self._met = False
        self._connected = False
        self._told_lost = False
        self._closing = False
        self._told: set[str] = set()
        self.problem: str | None = None
        self.mistaken = False
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

    def publish(self, status: NodeStatus) -> None:
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

    def _give_up(self, problem: str, mistaken: bool = False) -> None:
        self.problem = problem
        self.mistaken = mistaken
        self._listener()

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._say(sentence)

    @property
    def _visits(self) -> bool:
        """Whether this node only says what somebody wishes: it begins no job, and nobody may depend on it."""
        hosting = None if self._status is None else self._status.cluster
        return hosting is not None and hosting.visits

    @property
    def _leaves(self) -> bool:
        return self._status is not None and self._status.phase in (NodePhase.LEAVING, NodePhase.LEFT)

    @property
    def _trains(self) -> bool:
        return self._status is not None and self._status.phase is NodePhase.RUNNING

    def _own_status(self) -> NodeStatus:
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
