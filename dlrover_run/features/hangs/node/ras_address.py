"""The address at which the RAS threads of NCCL in the workers of this node answer.

NCCL's default is one address for all jobs of a machine, where any of them may answer. So a node reserves one of its
own, unless the user has set one. All workers of the node listen there, as NCCL sets SO_REUSEPORT.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

VARIABLE = "NCCL_RAS_ADDR"
ENABLED = "NCCL_RAS_ENABLE"


class RasAddress:
    """The address for all rounds of a job: workers that survive a round keep the one with which they were started. The
    port is held by a socket that does not listen, so that no other program gets it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._given = environ.get(VARIABLE)
        self._is_enabled = environ.get(ENABLED) != "0"
        self._socket: socket.socket | None = None
        self._tried = False

    @property
    def address(self) -> str | None:
        """HOST:PORT; None if there is none. The first call reserves it."""
        if not self._is_enabled:
            return None
        if self._given is None and not self._tried:
            self._tried = True
            self._socket = _reserve()
        if self._socket is not None:
            return f"127.0.0.1:{self._socket.getsockname()[1]}"
        return self._given

    @property
    def variables(self) -> dict[str, str]:
        """What a worker needs in its environment."""
        return {} if self._given is not None or self.address is None else {VARIABLE: self.address}

    def close(self) -> None:
        """Give the port back. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _reserve() -> socket.socket | None:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # As NCCL does: only sockets that all have both options share an address.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
    except OSError:
        held.close()
        return None
    return held
