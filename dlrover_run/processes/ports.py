"""TCP ports: reserved for a process until it binds them, and observed until it listens there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Container, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT, errno.EPERM})
"""The errors of a kernel that has IPv6 compiled in but disabled, and of a sandbox that forbids it."""


BACKLOG = 4096
"""Connections that wait to be accepted: those of all workers of a large job, which connect at the same moment."""

_RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class HeldPort:
    """A TCP port that is bound but not listened on.

    Both this socket and a store's have SO_REUSEADDR, and Linux lets two such sockets share a port as long as neither
    listens. So the worker can bind and listen while this socket holds the port. The kernel does not assign a held port
    to a process that requests a free one, neither by `bind(0)` nor for an outgoing connection. A connection before
    the worker listens is refused, and store clients retry.
    """

    def __init__(self, port: int = 0) -> None:
        """Hold `port`, or any free one for 0. Raises OSError when a process listens on it."""
        self._socket = bind_everywhere(port)
        self.number: int = self._socket.getsockname()[1]
        self._listens = False

    def listen(self) -> socket.socket:
        """Listen at the port until `release`, and return the socket, for a process that accepts. Raises OSError when
        another process listens there."""
        self._socket.listen(BACKLOG)
        self._listens = True
        return self._socket

    def release(self) -> None:
        """Release the port. Idempotent."""
        if self._listens:
            # The process that has the socket too may end later, and the port has to be free now.
            self._listens = False
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class PortPool(Generic[Key]):
    """The ports of tasks: one for each key, which a replacement takes over, because the other tasks look for it at the
    old address. Every port is held until `close`, so no other process gets it between the end of one task and the start
    of the next."""

    def __init__(self) -> None:
        self._held: dict[Key, list[HeldPort]] = {}

    def take(self, key: Key, in_use: Container[int]) -> int:
        """The first port of this key that is not in use, or a new one if all are, as for the server of the next version
        beside that of the present one. Raises OSError if no port is free."""
        ports = self._held.setdefault(key, [])
        for port in ports:
            if port.number not in in_use:
                return port.number
        ports.append(HeldPort())
        return ports[-1].number

    def close(self) -> None:
        """Release all ports."""
        for ports in self._held.values():
            for port in ports:
                port.release()
        self._held.clear()


async def until_listens(family: socket.AddressFamily, address: tuple[str, int], interval: float) -> None:
    """Wait until a process listens at the address, with an attempt to connect every `interval` seconds: no kernel tells
    when another process, or another machine, begins to listen."""
    loop = asyncio.get_running_loop()
    while True:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            # It leaves nothing in the kernel's table, which is where clients of a store are counted.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
            await loop.sock_connect(probe, address)
            return
        await asyncio.sleep(interval)


def bind_everywhere(port: int) -> socket.socket:
    """A socket at `port` of all addresses of this machine, of both families, or at any free one for 0. Raises
    OSError."""
    # The store listens on [::] for both families, so that is what must be held; a kernel without IPv6 has 0.0.0.0 only.
    if socket.has_ipv6:
        try:
            return _bind(socket.AF_INET6, "::", port)
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
    return _bind(socket.AF_INET, "0.0.0.0", port)


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind((address, port))
    except OSError:
        held.close()
        raise
    return held
