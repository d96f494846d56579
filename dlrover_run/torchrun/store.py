"""The store of one round: on a fresh port, hosted by the torchrun with node rank 0, with a barrier before any worker
starts.

Torchrun's agents exchange ranks through it in blocking calls, and their workers use it too. So no node continues before
all nodes of the round are connected: a node that waits for the ranks of a dead one blocks until torchrun gives up.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is public, only not marked as such.

from dlrover_run.coordination.records.plan import OVER
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.round import RankAssignment
from dlrover_run.processes import signals
from dlrover_run.torchrun.node_thread import NodeSnapshot, NodeThread

STORE_TIMEOUT = 60.0
"""Seconds that torchrun's agent waits for a key of the store before it gives up (torchrun's read_timeout)."""

CONNECT_TIMEOUT = 5.0
"""Seconds for one attempt to connect to the host of the store."""

FIRST_RETRY_PAUSE = 0.02
"""Seconds between the first two attempts to connect; each further pause is twice as long."""

MAX_RETRY_PAUSE = 0.5
"""Maximum seconds of a pause. The host may give its previous workers half a minute to end."""

StoreFailure = RuntimeError
"""The exception of a store in every version of torch."""

_ARRIVED = "dlrover/arrived"
_DECISION = "dlrover/decision"
_GO = "go"
_ABANDONED = "abandoned"

_BARRIER = "torchelastic/agent/terminal_state"
"""The key of the barrier at which torch's SimpleElasticAgent waits once its workers have all succeeded."""


def is_superseded(ranks: RankAssignment, view: NodeSnapshot) -> bool:
    """Whether this node has other ranks now, or none."""
    return view.round != ranks.key or view.assignment.phase in OVER or view.problem is not None


def wait_for_host(ranks: RankAssignment, node: NodeThread, deadline: float) -> bool:
    """Wait until the store's host listens; False if the round is superseded, or after `deadline`.

    The store's own client would block where neither a newer round nor a signal can interrupt it, and print messages.
    """
    pause = FIRST_RETRY_PAUSE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection((ranks.store_address, ranks.store_port), CONNECT_TIMEOUT).close()
            return True
        if node.wait(partial(is_superseded, ranks), pause):
            return False
        pause = min(2 * pause, MAX_RETRY_PAUSE)
    return False


class RoundStore(TCPStore):
    """The host or a client of the store of a round. Torchrun drops the store of the last round when it has the next.

    The barrier at the end shows from outside that torchrun's workers have succeeded. Torchrun would wait there for five
    minutes if another node fails for good; this store ends the wait as soon as no other node can arrive any more.
    """

    def __init__(self, ranks: RankAssignment, node: NodeThread) -> None:
        super().__init__(
            ranks.store_address,
            ranks.store_port,
            is_master=ranks.node_rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_TIMEOUT),
        )
        self.set_timeout(timedelta(seconds=STORE_TIMEOUT))
        self._ranks = ranks
        self._node = node

    def wait_for_all(self, deadline: float) -> bool:
        """Wait until every node of the round is connected; return whether the round starts, on which all nodes agree.

        False if a node has detected a newer round before, or after `deadline`. Raises StoreFailure if the host is gone.
        """
        if self._ranks.nodes == 1:
            return True
        if self.add(_ARRIVED, 1) == self._ranks.nodes:
            self.compare_set(_DECISION, "", _GO)
        decision = _KeyWatch(self._ranks, _DECISION, deadline - time.monotonic(), self._node.recheck)
        self._node.wait(lambda view: decision.done or is_superseded(self._ranks, view))
        # The first value counts: otherwise the last node could continue alone while another one gives up.
        agreed = self.compare_set(_DECISION, "", _ABANDONED)
        decision.join()
        return bool(agreed == _GO.encode())

    def add(self, key: str, amount: int) -> int:
        """Like TCPStore.add; the barrier starts with it."""
        if key.startswith(_BARRIER):
            self._node.report(NodePhase.SUCCEEDED, self._ranks.key)
        return int(super().add(key, amount))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Like TCPStore.wait, but a wait in the barrier ends with the round."""
        timeout = timeout or self.timeout  # type: ignore[attr-defined]  # torch's stub does not have it.
        if not keys[0].startswith(_BARRIER):
            super().wait(keys, timeout)
            return
        with contextlib.suppress(StoreFailure):
            # If the host is gone, no other node waits either.
            last = _KeyWatch(self._ranks, keys[0], timeout.total_seconds(), self._node.recheck)
            self._node.wait(lambda view: last.done or (view.problem is None and is_superseded(self._ranks, view)))
            # Ends the wait of the other nodes, and of the thread.
            self.set(keys[0], "")
            last.join()


class _KeyWatch:
    """Waits for a key of a round's store in a thread with its own connection: a wait of a store cannot be cancelled. To
    end it early, set the key."""

    def __init__(self, ranks: RankAssignment, key: str, timeout: float, on_end: Callable[[], None]) -> None:
        self._store = TCPStore(
            ranks.store_address,
            ranks.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_TIMEOUT),
        )
        self.done = False
        self._thread = threading.Thread(
            target=self._wait, args=(key, timeout, on_end), name=f"await {key}", daemon=True
        )
        with signals.blocked_in_new_threads():
            self._thread.start()

    def join(self) -> None:
        """Wait for the thread after the key was set: the process must not end while it is in the store's code."""
        self._thread.join(CONNECT_TIMEOUT)

    def _wait(self, key: str, timeout: float, on_end: Callable[[], None]) -> None:
        with contextlib.suppress(StoreFailure):
            self._store.wait([key], timedelta(seconds=max(timeout, 0.0)))
        self.done = True
        on_end()
