"""The store of one round: fresh, on a fresh port, hosted by the torchrun with node rank 0, and met at before any worker
starts.

Torchrun's agents exchange ranks through it without looking up, and their workers use it too. So no node goes on before
all of the round are here: one that waited there for a node which has died would wait until torchrun gives the job up.
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

from dlrover_run.coordination.records import OVER, NodePhase, RankAssignment
from dlrover_run.process_tree import signals
from dlrover_run.torchrun.node_thread import NodeSnapshot, NodeThread

STORE_TIMEOUT = 60.0
"""Seconds that torchrun's agent waits for a key of the store before it gives the job up (as torchrun's
read_timeout)."""

CONNECT_TIMEOUT = 5.0
"""Seconds for one attempt to connect to the host of the store; then comes the next one."""

FIRST_RETRY_PAUSE = 0.02
"""Seconds from the first failed attempt to the second one; each further pause is twice as long."""

MAX_RETRY_PAUSE = 0.5
"""Seconds that no pause is longer than. The host may be giving its last workers half a minute to end."""

StoreFailure = RuntimeError
"""What the failures of a store are in every version of torch."""

_ARRIVED = "dlrover/arrived"
_VERDICT = "dlrover/verdict"
_GO = "go"
_GIVEN_UP = "given up"

_BARRIER = "torchelastic/agent/terminal_state"
"""How torch's SimpleElasticAgent calls the barrier at which agents wait whose workers have all succeeded."""


def is_superseded(seat: RankAssignment, view: NodeSnapshot) -> bool:
    """Whether this node shall have another place than that one, or none."""
    return view.round != seat.key or view.wanted.phase in OVER or view.problem is not None


def wait_for_host(seat: RankAssignment, membership: NodeThread, deadline: float) -> bool:
    """Wait until the store's host listens; False when the seat is not wanted any more, or after `deadline`.

    A store's own client would wait where neither a newer round nor a signal reaches it, and print that it waits.
    """
    pause = FIRST_RETRY_PAUSE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection((seat.store_address, seat.store_port), CONNECT_TIMEOUT).close()
            return True
        if membership.wait(partial(is_superseded, seat), pause):
            return False
        pause = min(2 * pause, MAX_RETRY_PAUSE)
    return False


class RoundStore(TCPStore):
    """Hosts the store of a round, or is a client of it. Torchrun drops the last round's when it has the next one.

    The barrier at the end is where one can tell from outside that torchrun's workers have succeeded. Torchrun would
    stay there for five minutes when another node fails for good; here it leaves as soon as nobody will come any more.
    """

    def __init__(self, seat: RankAssignment, membership: NodeThread) -> None:
        super().__init__(
            seat.store_address,
            seat.store_port,
            is_master=seat.node_rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_TIMEOUT),
        )
        self.set_timeout(timedelta(seconds=STORE_TIMEOUT))
        self._seat = seat
        self._membership = membership

    def meet(self, deadline: float) -> bool:
        """Wait until every node of the round is here; whether they all go on with it, on which all agree.

        Not so when one of them has heard of a newer round first, or after `deadline`. Raises StoreFailure when the host
        has gone.
        """
        if self._seat.nodes == 1:
            return True
        if self.add(_ARRIVED, 1) == self._seat.nodes:
            self.compare_set(_VERDICT, "", _GO)
        verdict = _KeyWatch(self._seat, _VERDICT, deadline - time.monotonic(), self._membership.nudge)
        self._membership.wait(lambda view: verdict.done or is_superseded(self._seat, view))
        # The first word holds: none goes on alone because it was the last to arrive while another turned away.
        agreed = self.compare_set(_VERDICT, "", _GIVEN_UP)
        verdict.join()
        return bool(agreed == _GO.encode())

    def add(self, key: str, amount: int) -> int:
        """As every store's; the barrier begins with it."""
        if key.startswith(_BARRIER):
            self._membership.tell(NodePhase.SUCCEEDED, self._seat.key)
        return int(super().add(key, amount))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """As every store's, but that the wait in the barrier ends with the round."""
        timeout = timeout or self.timeout  # type: ignore[attr-defined]  # torch's stub does not have it.
        if not keys[0].startswith(_BARRIER):
            super().wait(keys, timeout)
            return
        with contextlib.suppress(StoreFailure):
            # A host that has gone waits for nobody either.
            last = _KeyWatch(self._seat, keys[0], timeout.total_seconds(), self._membership.nudge)
            self._membership.wait(lambda view: last.done or (view.problem is None and is_superseded(self._seat, view)))
            # Lets the other nodes go, and the thread that still waits.
            self.set(keys[0], "")
            last.join()


class _KeyWatch:
    """A key of a round's store that a thread waits for, over a connection of its own: a wait of a store cannot be
    broken off. Whoever waits no longer sets the key."""

    def __init__(self, seat: RankAssignment, key: str, timeout: float, on_end: Callable[[], None]) -> None:
        self._store = TCPStore(
            seat.store_address,
            seat.store_port,
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
        """Let the thread see that the key is set. At the end of the process it must not be in the middle of that."""
        self._thread.join(CONNECT_TIMEOUT)

    def _wait(self, key: str, timeout: float, on_end: Callable[[], None]) -> None:
        with contextlib.suppress(StoreFailure):
            self._store.wait([key], timedelta(seconds=max(timeout, 0.0)))
        self.done = True
        on_end()
