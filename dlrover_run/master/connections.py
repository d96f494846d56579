"""Bounds the connections of peers that have not joined a job, so that they keep out nobody who can.

gRPC takes every connection, and a peer that says nothing holds a descriptor until it times out. So the oldest of too
many such connections are closed: a node that comes joins within two round trips, long before its turn. A part of the
descriptors is never given to connections, so that the master can always write its journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import resource
import select
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from urllib.parse import unquote

MAX_STRANGERS = 4096
"""Connections, and streams, of peers that have not joined yet. More than a large job opens at once."""

RESERVE = 64
"""Descriptors that no connection is given; a quarter of them where there are fewer than four times as many."""

LOOK_PAUSE = 0.05
"""Seconds from a new connection until the connections are counted, with all that come meanwhile."""

Peer = tuple[str, int]


def most_connections() -> int:
    """How many connections this process may have at a time, by its limit of descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(limit, 1 << 20) if limit > 0 else 1 << 20
    return limit - min(RESERVE, limit // 4)


class Connections:
    """The connections to one listening port of this process. `most` is how many there may be."""

    def __init__(self, most: int) -> None:
        self._most_strangers = min(MAX_STRANGERS, most // 2)
        self._joined: Counter[Peer] = Counter()
        self._strangers: dict[Peer, None] = {}
        self._port = 0
        self._poll: select.epoll | None = None
        self._look_at: asyncio.TimerHandle | None = None

    def watch(self, port: int) -> None:
        """Bound the connections to that port, on which this process listens, from now on."""
        self._port = port
        # Edge-triggered: the kernel tells of each new connection, and gRPC takes it.
        self._poll = select.epoll()
        for fd, sock in _sockets():
            if _port_of(sock) == port and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                self._poll.register(fd, select.EPOLLIN | select.EPOLLET)
        asyncio.get_running_loop().add_reader(self._poll.fileno(), self._note_arrival)

    def close(self) -> None:
        """Watch no longer."""
        if self._look_at is not None:
            self._look_at.cancel()
        if self._poll is not None:
            asyncio.get_running_loop().remove_reader(self._poll.fileno())
            self._poll.close()
            self._poll = None

    def joined(self, peer: str) -> None:
        """A stream of that peer, as gRPC names it, has joined a job."""
        self._joined[_peer(peer)] += 1

    def left(self, peer: str) -> None:
        """A stream that had joined has ended."""
        found = _peer(peer)
        self._joined[found] -= 1
        if self._joined[found] <= 0:
            del self._joined[found]

    def _note_arrival(self) -> None:
        assert self._poll is not None, "it is read while it is watched"
        self._poll.poll(0)
        if self._look_at is None:
            self._look_at = asyncio.get_running_loop().call_later(LOOK_PAUSE, self._look)

    def _look(self) -> None:
        self._look_at = None
        if len(os.listdir("/proc/self/fd")) - len(self._joined) <= self._most_strangers // 2:
            return
        here = dict.fromkeys(peer for _, peer in self._connected() if peer not in self._joined)
        # In the order in which they were first seen.
        known = [peer for peer in self._strangers if peer in here]
        self._strangers = dict.fromkeys([*known, *here])
        too_many = set(list(self._strangers)[: max(0, len(here) - self._most_strangers)])
        for sock, peer in self._connected() if too_many else ():
            if peer in too_many:
                del self._strangers[peer]
                too_many.remove(peer)
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _connected(self) -> Iterator[tuple[socket.socket, Peer]]:
        for _, sock in _sockets():
            with contextlib.suppress(OSError):
                if _port_of(sock) != self._port:
                    continue
                host, port, *_ = sock.getpeername()
                yield sock, (_plain(host), port)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Each socket of this process that speaks over a network, with its descriptor: a copy, so that it stays the same
    though gRPC may close the descriptor meanwhile. It is open until the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6):
                        yield int(name), sock


def _port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def _peer(name: str) -> Peer:
    """What gRPC calls `ipv4:1.2.3.4:5` or `ipv6:%5B::1%5D:5`."""
    host, _, port = unquote(name).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port) if port.isdecimal() else 0


def _plain(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
