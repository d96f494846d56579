"""Has what this node holds copied to the next node of the round; the addresses are exchanged in torch's store."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

from dlrover_run.training import peers
from dlrover_run.training.memory_line import MemoryLine, NotHeld

logger = logging.getLogger(__name__)

_KEY = "copies/key"


class PeerCopies:
    """The copies of one node, as each of its ranks sees them. Nothing is done in a job of one node."""

    def __init__(self, line: MemoryLine, environment: Mapping[str, str] = os.environ) -> None:
        self._line = line
        self._node = int(environment.get("GROUP_RANK", "0"))
        self._nodes = int(environment.get("GROUP_WORLD_SIZE", "1"))
        self._is_first = environment.get("LOCAL_RANK") == "0"
        self._store = environment.get("MASTER_ADDR", ""), int(environment.get("MASTER_PORT") or "0")
        self._connected = False

    def offer(self) -> None:
        """Have this node take copies, and publish where. No rank waits for another one."""
        if self._nodes < 2 or not self._is_first or not peers.has_group():
            return
        try:
            address = _own_address(*self._store)
            port = self._line.listen(address, peers.first_proposal(_KEY, os.urandom(16).hex()))
        except (OSError, NotHeld) as error:
            logger.warning("This node takes no copies of checkpoints in memory: %s", error)
            return
        peers.publish(f"copies/{self._node}", f"{address} {port}")

    def connect(self) -> None:
        """Have the files of this node copied to the next one, once that has published where."""
        if self._nodes < 2 or self._connected or not peers.has_group():
            return
        try:
            found = peers.published(f"copies/{(self._node + 1) % self._nodes}")
            if found is not None:
                address, port = found.split()
                self._line.copy_to(address, int(port), peers.first_proposal(_KEY, os.urandom(16).hex()))
                self._connected = True
        except (RuntimeError, NotHeld):
            pass  # The store has ended with its rank, or nothing is held: the save itself shows it.


def _own_address(host: str, port: int) -> str:
    """The address of this machine on the way to another one."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Nothing is sent.
        probe.connect(place)
        return str(probe.getsockname()[0])
