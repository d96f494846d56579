"""This node's part in the job, kept up by a thread of its own: torchrun's has to wait, sleep and look after workers.

The thread runs a loop with the board; torchrun's thread reads what the loop saw last and tells it what the workers do.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field

from dlrover_run.agent.node_state import NodeState
from dlrover_run.coordination.records import Assignment, Failure, NodePhase, RankAssignment, RoundKey
from dlrover_run.process_tree import signals
from dlrover_run.rendezvous.backends import open_client
from dlrover_run.spec import JobSpec, SpecError
from dlrover_run.supervisor.ports import HeldPort

LEAVE_TIMEOUT = 5.0
"""Seconds for the thread to say that this node has left and to end, which the board does in 2; after that the process
ends without it, and the others find this node lost."""

PORT_TIMEOUT = 10.0
"""Seconds for the loop to hand over a port, which takes it none; later it is taken for dead."""


@dataclass(frozen=True)
class NodeSnapshot:
    """What is wanted of this node: the latest word of the coordinator, the seat that the node has taken, and why it can
    take no further part, if so."""

    wanted: Assignment = field(default_factory=Assignment)
    seat: RankAssignment | None = None
    problem: str | None = None

    @property
    def round(self) -> RoundKey | None:
        """The round in which this node has a seat."""
        return None if self.seat is None else self.seat.key


@dataclass(frozen=True)
class _WorkerState:
    """What torchrun's thread said last of the workers of one round."""

    round: RoundKey | None = None
    phase: NodePhase = NodePhase.WAITING
    failure: Failure | None = None


class NodeThread:
    """One node of a job. `say` takes a line for the person at the console, from another thread.

    All methods are for torchrun's thread; none but `wait`, `take_port` and `leave` ever waits.
    """

    def __init__(self, spec: JobSpec, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._say = say
        self._changed = threading.Condition()
        self._word = _WorkerState()
        self._leaving = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._standing: NodeState | None = None
        self.view = NodeSnapshot()

    def join(self) -> None:
        """Take part from now on; harmless when repeated."""
        if self._thread is not None:
            return
        # Where torchrun is stopped by a signal it does not shut the rendezvous down, and the others would have to find
        # out.
        atexit.register(self.leave)
        # A daemon, so that no end of torchrun's can leave the process hanging on it.
        self._thread = threading.Thread(target=self._run, name="dlrover-rendezvous", daemon=True)
        with signals.blocked_in_new_threads():
            self._thread.start()

    def tell(self, phase: NodePhase, key: RoundKey, failure: Failure | None = None) -> None:
        """Say what the workers of a round do. It counts for as long as this node has its seat in that round."""
        self._word = _WorkerState(key, phase, failure)
        self._wake_loop()

    def wait(self, until: Callable[[NodeSnapshot], bool], timeout: float | None = None) -> bool:
        """Wait until that holds of the view; whether it does. `nudge` makes this look again."""
        with self._changed:
            return self._changed.wait_for(lambda: until(self.view), timeout)

    def nudge(self) -> None:
        """Have `wait` look again: something that it depends on is no part of the view."""
        with self._changed:
            self._changed.notify_all()

    def take_port(self, key: RoundKey) -> HeldPort | None:
        """The port of that round's store, held; None when this node has no seat in that round any more.

        Raises OSError or SpecError when it cannot be had.
        """

        async def take() -> HeldPort | None:
            standing = self._standing
            return standing.take_port() if standing is not None and standing.round == key else None

        with self._changed:
            if self._loop is None:
                return None
            taking = asyncio.run_coroutine_threadsafe(take(), self._loop)
        try:
            return taking.result(PORT_TIMEOUT)
        except futures.TimeoutError:
            raise OSError(f"the port was not handed over within {PORT_TIMEOUT:g} s") from None

    def leave(self, failure: Failure | None = None) -> None:
        """Say that this node takes no part any more, with the reason if it was not asked to go, and end the thread.

        Whose workers have all succeeded leaves with that word.
        """
        atexit.unregister(self.leave)
        if self._thread is None or self._leaving:
            return
        if self._word.phase is not NodePhase.SUCCEEDED or self._word.round != self.view.round:
            self._word = _WorkerState(self.view.round, NodePhase.LEFT, failure)
        self._leaving = True
        self._wake_loop()
        self._thread.join(LEAVE_TIMEOUT)

    def _wake_loop(self) -> None:
        with self._changed, contextlib.suppress(RuntimeError):
            # A loop that has just ended takes nothing more.
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._wake.set)

    def _run(self) -> None:
        problem = "this node has left the job"
        try:
            asyncio.run(self._take_part())
        except SpecError as mistake:
            # What is installed is not enough for the backend.
            problem = str(mistake)
        except Exception as error:
            problem = f"internal error in the rendezvous: {error!r}; please report it"
        with self._changed:
            self._loop = self._standing = None
            if self.view.problem is None:
                self.view = NodeSnapshot(self.view.wanted, self.view.seat, problem)
            self._changed.notify_all()

    async def _take_part(self) -> None:
        board = open_client(self._spec, self._wake.set, self._say)
        try:
            standing = NodeState(self._spec)
            with self._changed:
                self._loop, self._standing = asyncio.get_running_loop(), standing
            try:
                while True:
                    self._wake.clear()
                    if self._leaving:
                        board.report(standing.report(self._word.phase, self._word.failure))
                        return
                    word = self._word
                    standing.accept(board.assignment)
                    is_of_seat = word.round is not None and word.round == standing.round
                    # The workers of an earlier round may still be ending; nobody asks for them any more.
                    phase, failure = (word.phase, word.failure) if is_of_seat else (NodePhase.WAITING, None)
                    board.report(standing.report(phase, failure, met=phase is NodePhase.SUCCEEDED))
                    self._show(
                        NodeSnapshot(board.assignment, standing.seat, board.problem or _dismissal(board.assignment))
                    )
                    await self._wake.wait()
            finally:
                standing.close()
        finally:
            await board.close()

    def _show(self, view: NodeSnapshot) -> None:
        if view != self.view:
            with self._changed:
                self.view = view
                self._changed.notify_all()


def _dismissal(wanted: Assignment) -> str | None:
    """Why a node check lets this node train no more; torchrun computes nothing when it is asked to."""
    checkup = wanted.health
    return (
        f"the node check dismissed this node: {checkup.reason}" if checkup is not None and checkup.dismissed else None
    )
