"""The connections of a process group of gloo, by the addresses at which its members listen, so that they can be closed.

gloo 2.15 has no way to interrupt a collective: `abort` and `shutdown` have no effect on one that waits for another
rank, and a rank that leaves its group keeps its connections. So a worker would wait for one that takes part in the next
group already, until the timeout of the collective. The end of a connection is what each side notices at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator

Address = tuple[str, int]


def listening() -> set[Address]:
    """The addresses at which this process listens."""
    found = (one for one in _sockets() if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return {_address(one.getsockname()) for one in found}


def close_connections(own: Collection[Address], others: Collection[Address]) -> int:
    """End the connections that were accepted at the addresses `own`, and those to the addresses `others`; return how
    many there were."""
    closed = 0
    for one in _sockets():
        with contextlib.suppress(OSError):
            there = _address(one.getpeername())
            if there in others or _address(one.getsockname()) in own:
                one.shutdown(socket.SHUT_RDWR)
                closed += 1
    return closed


def _sockets() -> Iterator[socket.socket]:
    """Copies of this process's sockets of IPv4 and IPv6. What is done to a copy is done to the same connection, though
    another thread may have closed its number meanwhile."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            continue  # It was closed meanwhile.
        try:
            one = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue  # It is no socket.
        with one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                yield one


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    """The address and the port; an address of IPv4 as such, and without a scope."""
    return name[0].partition("%")[0].removeprefix("::ffff:"), name[1]
