"""The gRPC server of the master, the limit on unauthenticated connections, and the shutdown of an idle master.

gRPC accepts every connection, and a silent client holds a descriptor until it times out. So the oldest of too many
unauthenticated connections are closed. A node joins within two round trips, long before its connection is the oldest.
Some descriptors are never given to connections, so the master can always write its journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import os
import resource
import select
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from dlrover_run.master.jobs import Jobs
from dlrover_run.master.session import NodeSession
from dlrover_run.transport.connection import GrpcServerConnection
from dlrover_run.transport.grpc_setup import SERVER_OPTIONS, load_grpc
from dlrover_run.transport.messages import METHOD, Refused

MAX_UNAUTHENTICATED = 4096
"""Connections, and streams, of clients that have not joined yet. More than a large job opens at once."""

RESERVED_DESCRIPTORS = 64
"""Descriptors that are not given to connections; a quarter of all if there are fewer than four times as many."""

CHECK_DELAY = 0.05
"""Seconds from a new connection until all connections are counted."""

Peer = tuple[str, int]


def max_connections() -> int:
    """How many connections this process may have at a time, by its limit on descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(limit, 1 << 20) if limit > 0 else 1 << 20
    return limit - min(RESERVED_DESCRIPTORS, limit // 4)


class ConnectionLimiter:
    """Limits the unauthenticated connections to one listening port of this process. `most` is the limit for all."""

    def __init__(self, most: int) -> None:
        self._most_strangers = min(MAX_UNAUTHENTICATED, most // 2)
        self._joined: Counter[Peer] = Counter()
        self._strangers: dict[Peer, None] = {}
        self._port = 0
        self._poll: select.epoll | None = None
        self._look_at: asyncio.TimerHandle | None = None

    def watch(self, port: int) -> None:
        """Limit the connections to that port, on which this process listens, from now on."""
        self._port = port
        # Edge-triggered: the kernel reports each new connection, and gRPC accepts it.
        self._poll = select.epoll()
        for fd, sock in _sockets():
            if _port_of(sock) == port and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                self._poll.register(fd, select.EPOLLIN | select.EPOLLET)
        asyncio.get_running_loop().add_reader(self._poll.fileno(), self._note_arrival)

    def close(self) -> None:
        """Stop."""
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
            self._look_at = asyncio.get_running_loop().call_later(CHECK_DELAY, self._look)

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
    """Each network socket of this process with its descriptor: a duplicate, because gRPC may close the descriptor
    meanwhile. It is open until the next one is yielded."""
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


SHUTDOWN_TIMEOUT = 5.0
"""Seconds without a node after which a master that got a signal exits. Nodes that only lost their connections come
back within `rendezvous.reconnect.BACKOFF_MAX`, and may train on."""


class IdleShutdown:
    """Calls `on_idle` with the reason when no node was connected for `timeout` seconds; None is for ever."""

    def __init__(self, timeout: float | None, on_idle: Callable[[str], None]) -> None:
        self._timeout = timeout
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._asked = ""

    def ask(self, reason: str) -> None:
        """End soon after the last node, for `reason`. A `look` follows."""
        self._asked = self._asked or reason
        self._stop_timer()

    def look(self, nodes: int, all_over: bool) -> None:
        """Take how many nodes are connected, and whether all jobs have ended and were deleted."""
        if self._timeout is None and not self._asked:
            return
        if nodes:
            self._stop_timer()
        elif all_over:
            self._on_idle(self._asked or "every job is over")
        elif self._timer is None:
            timeout = min(
                math.inf if self._timeout is None else self._timeout, SHUTDOWN_TIMEOUT if self._asked else math.inf
            )
            words = self._asked or f"no node was here for {timeout:g} s"
            self._timer = self._loop.call_later(timeout, self._on_idle, words)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


MAX_CONNECTIONS_OPTION = "grpc.max_allowed_incoming_connections"
"""Beyond that many connections gRPC closes a new one at once."""

STOP_TIMEOUT = 3.0
"""Seconds that streams and connections get to end when the master does; what is left then is cut."""

REFUSALS_INTERVAL = 10.0
"""The least number of seconds between two lines about refused strangers, so that they cannot fill a log."""


class MasterServer:
    """Serves the one method of the master. `say` prints one line for the person who runs it.

    `on_change` is called when a node came or went or a job was forgotten. `report` has lines about jobs that are for
    whoever started the master.
    """

    def __init__(
        self,
        token: str,
        state_dir: Path | None,
        say: Callable[[str], None],
        on_change: Callable[[], None] = lambda: None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._token = token
        self._say = say
        self.grpc = load_grpc()
        self.jobs = Jobs(state_dir, int(time.time() * 1000), say, on_change, report)
        self._sessions: set[NodeSession] = set()
        self._strangers: set[NodeSession] = set()
        self._refusals = 0
        self._refusals_told = -REFUSALS_INTERVAL
        most = max_connections()
        self._connections = ConnectionLimiter(most)
        self._server = self.grpc.aio.server(options=[*SERVER_OPTIONS, (MAX_CONNECTIONS_OPTION, most)])
        service, _, method = METHOD.strip("/").partition("/")
        handler = self.grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers((self.grpc.method_handlers_generic_handler(service, {method: handler}),))

    async def start(self, address: str, tls: Any = None) -> int:
        """Listen on HOST:PORT, with gRPC's server credentials for TLS; returns the port. Raises OSError."""
        try:
            if tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, tls)
        except RuntimeError as error:
            raise OSError(str(error)) from None
        if not port:
            raise OSError(f"cannot listen on {address}")
        await self._server.start()
        self._connections.watch(int(port))
        return int(port)

    async def stop(self, reason: str) -> None:
        """End every stream with these words, and stop listening, within STOP_TIMEOUT seconds."""
        self._connections.close()
        self.jobs.close(reason)
        for session in list(self._sessions):
            session.end(Refused(reason, retry=True))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._server.stop(STOP_TIMEOUT / 2), STOP_TIMEOUT)

    def _note_refusal(self, peer: str, reason: str) -> None:
        """Say that a stream was refused, and of many in a short time only how many there were."""
        self._refusals += 1
        now = asyncio.get_running_loop().time()
        if now < self._refusals_told + REFUSALS_INTERVAL:
            return
        others = f" ({self._refusals - 1} others before it)" if self._refusals > 1 else ""
        self._refusals, self._refusals_told = 0, now
        self._say(f"refused {peer}: {reason}{others}")

    async def _serve(self, _requests: Any, stream: Any) -> None:
        session = NodeSession(GrpcServerConnection(stream, self.grpc), self.jobs, self._token)
        if len(self._strangers) >= MAX_UNAUTHENTICATED:
            session.end(Refused("too many nodes are in their handshake with this master", retry=True))
        self._sessions.add(session)
        self._strangers.add(session)
        peer = stream.peer()

        def note_joined() -> None:
            self._strangers.discard(session)
            self._connections.joined(peer)

        try:
            await session.run(note_joined, lambda reason: self._note_refusal(peer, reason))
        finally:
            self._sessions.discard(session)
            if session not in self._strangers:
                self._connections.left(peer)
            self._strangers.discard(session)
