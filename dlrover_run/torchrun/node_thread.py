"""The rendezvous client in a thread of its own: torchrun's thread blocks, sleeps and watches workers.

The thread runs an event loop with the client. Torchrun's thread reads the loop's last snapshot, and reports the state
of its workers to the loop.
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
from dlrover_run.coordination.records.assignment import Assignment
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.round import Failure, RankAssignment, RoundKey
from dlrover_run.processes import signals
from dlrover_run.processes.ports import HeldPort
from dlrover_run.rendezvous.backends import open_client
from dlrover_run.spec import JobSpec, SpecError
from dlrover_run.words.log_level import internal_error, log_frames

LEAVE_TIMEOUT = 5.0
"""Seconds for the thread to report that this node has left and to end; the client needs 2. After that the process ends
and the other nodes declare this node lost."""

PORT_TIMEOUT = 10.0
"""Seconds for the loop to hand over a port, which it does at once unless it is dead."""


@dataclass(frozen=True)
class NodeSnapshot:
    """The coordinator's latest assignment, the ranks that this node has accepted, and the reason if this node cannot
    take part any more."""

    assignment: Assignment = field(default_factory=Assignment)
    ranks: RankAssignment | None = None
    problem: str | None = None

    @property
    def round(self) -> RoundKey | None:
        """The round in which this node has ranks."""
        return None if self.ranks is None else self.ranks.key


@dataclass(frozen=True)
class _WorkerState:
    """The last report of torchrun's thread on the workers of one round."""

    round: RoundKey | None = None
    phase: NodePhase = NodePhase.WAITING
    failure: Failure | None = None


class NodeThread:
    """One node of a job. `log` is called with lines for the user, in the thread.

    All methods are for torchrun's thread; only `wait`, `take_port` and `leave` block.
    """

    def __init__(self, spec: JobSpec, log: Callable[[str], None]) -> None:
        self._spec = spec
        self._log = log
        self._changed = threading.Condition()
        self._worker_state = _WorkerState()
        self._leaving = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._node_state: NodeState | None = None
        self.view = NodeSnapshot()

    def join(self) -> None:
        """Start the thread; idempotent."""
        if self._thread is not None:
            return
        # A torchrun that is stopped by a signal does not shut the rendezvous down, and the other nodes would have to
        # detect the loss.
        atexit.register(self.leave)
        # A daemon, so that the process never waits for it, however torchrun ends.
        self._thread = threading.Thread(target=self._run, name="dlrover-rendezvous", daemon=True)
        with signals.blocked_in_new_threads():
            self._thread.start()

    def report(self, phase: NodePhase, key: RoundKey, failure: Failure | None = None) -> None:
        """Set the state of the workers of a round. It is reported as long as this node has its ranks in that round."""
        self._worker_state = _WorkerState(key, phase, failure)
        self._wake_loop()

    def wait(self, until: Callable[[NodeSnapshot], bool], timeout: float | None = None) -> bool:
        """Wait until the condition holds for the snapshot; returns whether it does. `recheck` evaluates it again."""
        with self._changed:
            return self._changed.wait_for(lambda: until(self.view), timeout)

    def recheck(self) -> None:
        """Make `wait` evaluate its condition again, because part of it is outside the snapshot."""
        with self._changed:
            self._changed.notify_all()

    def take_port(self, key: RoundKey) -> HeldPort | None:
        """The held port of that round's store; None if this node has no ranks in that round any more.

        Raises OSError or SpecError if the port cannot be held.
        """

        async def take() -> HeldPort | None:
            node_state = self._node_state
            return node_state.take_port() if node_state is not None and node_state.round == key else None

        with self._changed:
            if self._loop is None:
                return None
            taking = asyncio.run_coroutine_threadsafe(take(), self._loop)
        try:
            return taking.result(PORT_TIMEOUT)
        except futures.TimeoutError:
            raise OSError(f"the port was not handed over within {PORT_TIMEOUT:g} s") from None

    def leave(self, failure: Failure | None = None) -> None:
        """Report that this node leaves, with the failure if that is the reason, and end the thread.

        A node whose workers have all succeeded reports that instead.
        """
        atexit.unregister(self.leave)
        if self._thread is None or self._leaving:
            return
        if self._worker_state.phase is not NodePhase.SUCCEEDED or self._worker_state.round != self.view.round:
            self._worker_state = _WorkerState(self.view.round, NodePhase.LEFT, failure)
        self._leaving = True
        self._wake_loop()
        self._thread.join(LEAVE_TIMEOUT)

    def _wake_loop(self) -> None:
        with self._changed, contextlib.suppress(RuntimeError):
            # The loop may just have ended.
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._wake.set)

    def _run(self) -> None:
        problem = "this node has left the job"
        try:
            asyncio.run(self._take_part())
        except SpecError as mistake:
            # A package that the backend needs is not installed.
            problem = str(mistake)
        except Exception as error:
            problem = internal_error(error, " in the rendezvous")
            log_frames(self._log, error)
        with self._changed:
            self._loop = self._node_state = None
            if self.view.problem is None:
                self.view = NodeSnapshot(self.view.assignment, self.view.ranks, problem)
            self._changed.notify_all()

    async def _take_part(self) -> None:
        client = open_client(self._spec, self._wake.set, self._log)
        try:
            node_state = NodeState(self._spec)
            with self._changed:
                self._loop, self._node_state = asyncio.get_running_loop(), node_state
            try:
                while True:
                    self._wake.clear()
                    if self._leaving:
                        client.report(node_state.report(self._worker_state.phase, self._worker_state.failure))
                        return
                    workers = self._worker_state
                    node_state.accept(client.assignment)
                    if workers.round != node_state.round:
                        # The workers of an earlier round may still be ending; their state does not matter any more.
                        workers = _WorkerState()
                    succeeded = workers.phase is NodePhase.SUCCEEDED
                    client.report(node_state.report(workers.phase, workers.failure, progressed=succeeded))
                    dismissal, problem = client.assignment.dismissal, client.problem
                    if problem is None and dismissal is not None:
                        problem = dismissal.reason
                    view = NodeSnapshot(client.assignment, node_state.ranks, problem)
                    if view != self.view:
                        with self._changed:
                            self.view = view
                            self._changed.notify_all()
                    await self._wake.wait()
            finally:
                node_state.close()
        finally:
            await client.close()
