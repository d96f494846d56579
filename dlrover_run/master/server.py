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

from dlrover_run import linux
from dlrover_run.background import TimeLimit
from dlrover_run.coordination.rounds.quorum import LostMaster
from dlrover_run.master.jobs import Jobs
from dlrover_run.master.session import NodeSession
from dlrover_run.transport.connection import GrpcServerConnection
from dlrover_run.transport.grpc_setup import SERVER_OPTIONS, load_grpc
from dlrover_run.transport.messages import METHOD, Refused
from dlrover_run.words.text import counted

MAX_UNAUTHENTICATED = 4096
"""Connections, and streams, of clients that have not joined yet. More than a large job opens at once."""

RESERVED_DESCRIPTORS = 64
"""Descriptors that are not given to connections; a quarter of all if there are fewer than four times as many."""

CHECK_DELAY = 0.05
"""Seconds from a new connection until all connections are counted."""

Peer = tuple[str, int]


def max_connections() -> int:
    """The maximum connections of this process, by its limit on descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(limit, 1 << 20) if limit > 0 else 1 << 20
    return limit - min(RESERVED_DESCRIPTORS, limit // 4)


class ConnectionLimiter:
    """Limits the unauthenticated connections to one listening port of this process, given the limit for all
    connections."""

    def __init__(self, limit: int) -> None:
        self._limit = min(MAX_UNAUTHENTICATED, limit // 2)
        self._joined: Counter[Peer] = Counter()
        # In the order in which they were first seen.
        self._unauthenticated: dict[Peer, None] = {}
        self._port = 0
        self._poll: select.epoll | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, port: int) -> None:
        """Limit the connections to that port, on which this process listens, from now on."""
        self._port = port
        # Edge-triggered: the kernel reports each new connection, and gRPC accepts it.
        self._poll = select.epoll()
        for fd, sock in _sockets():
            if sock.getsockname()[1] == port and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                self._poll.register(fd, select.EPOLLIN | select.EPOLLET)
        asyncio.get_running_loop().add_reader(self._poll.fileno(), self._on_connection)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._poll is not None:
            asyncio.get_running_loop().remove_reader(self._poll.fileno())
            self._poll.close()
            self._poll = None

    def joined(self, peer: str) -> None:
        """Record that a stream of that peer, by gRPC's name, has joined a job."""
        self._joined[_parse_peer(peer)] += 1

    def left(self, peer: str) -> None:
        """Record that a stream that had joined has ended."""
        # Not by subtracting a Counter, which would copy all of it for each of thousands of nodes that leave.
        key = _parse_peer(peer)
        self._joined[key] -= 1
        if self._joined[key] <= 0:
            del self._joined[key]

    def _on_connection(self) -> None:
        assert self._poll is not None, "it is read while it is watched"
        self._poll.poll(0)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_DELAY, self._check)

    def _check(self) -> None:
        self._timer = None
        if len(linux.open_descriptors()) - len(self._joined) <= self._limit // 2:
            return
        current = dict.fromkeys(peer for _, peer in self._connections() if peer not in self._joined)
        known = [peer for peer in self._unauthenticated if peer in current]
        self._unauthenticated = dict.fromkeys([*known, *current])
        excess = set(list(self._unauthenticated)[: max(0, len(current) - self._limit)])
        for sock, peer in self._connections() if excess else ():
            if peer in excess:
                del self._unauthenticated[peer]
                excess.remove(peer)
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _connections(self) -> Iterator[tuple[socket.socket, Peer]]:
        for _, sock in _sockets():
            with contextlib.suppress(OSError):
                if sock.getsockname()[1] == self._port:
                    host, port, *_ = sock.getpeername()
                    yield sock, (_plain_address(host), port)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Each network socket of this process with its descriptor: a duplicate, because gRPC may close the descriptor
    meanwhile. It is open until the next one is yielded."""
    for fd in linux.open_descriptors():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6):
                        yield fd, sock


def _parse_peer(name: str) -> Peer:
    """The address in gRPC's name of a peer: `ipv4:1.2.3.4:5` or `ipv6:%5B::1%5D:5`."""
    host, _, port = unquote(name).partition(":")[2].rpartition(":")
    return _plain_address(host.strip("[]")), int(port) if port.isdecimal() else 0


def _plain_address(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)


SHUTDOWN_TIMEOUT = 5.0
"""Seconds without a node after which a master that got a signal exits. Nodes that only lost their connections
reconnect within `rendezvous.reconnect.BACKOFF_MAX`, and their workers may still run."""


class IdleShutdown:
    """Calls `on_idle` with the reason when no node was connected for `timeout` seconds; None is for ever."""

    def __init__(self, timeout: float | None, on_idle: Callable[[str], None]) -> None:
        self._timeout = timeout
        self._on_idle = on_idle
        self._timer: asyncio.TimerHandle | None = None
        self._requested = ""

    def request(self, reason: str) -> None:
        """Shut down soon after the last node, for `reason`. An `update` follows."""
        self._requested = self._requested or reason
        self._stop_timer()

    def follow(self, jobs: Jobs) -> None:
        """Take what the jobs are now; call it at each change."""
        self.update(jobs.connected, jobs.empty and jobs.last_one_over, jobs.keeps_result)

    def update(self, nodes: int, all_over: bool, keeps_result: bool = False) -> None:
        """Take the number of connected nodes, whether all jobs have ended and were deleted, and whether a job is over
        whose result is kept."""
        if self._timeout is None and not self._requested:
            return
        if nodes or (keeps_result and not self._requested):
            # With a journal the next master would begin to keep the result anew, and refuse newcomers for as long.
            self._stop_timer()
        elif all_over:
            self._on_idle(self._requested or "every job is over")
        elif self._timer is None:
            limits = (self._timeout, SHUTDOWN_TIMEOUT if self._requested else None)
            timeout = min(limit for limit in limits if limit is not None)
            reason = self._requested or f"no node was connected for {timeout:g} s"
            self._timer = asyncio.get_running_loop().call_later(timeout, self._on_idle, reason)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


MAX_CONNECTIONS_OPTION = "grpc.max_allowed_incoming_connections"
"""Beyond that many connections gRPC closes a new one at once."""

STOP_TIMEOUT = 3.0
"""Seconds that streams and connections get to end when the master stops; the rest is cut."""

REFUSALS_INTERVAL = 10.0
"""Minimum seconds between two lines about refused connections, so that unauthenticated clients cannot fill a log."""


class MasterServer:
    """Serves the one method of the master. For the parameters see `Jobs`."""

    def __init__(
        self,
        token: str,
        state_dir: Path | None,
        log: Callable[[str], None],
        on_change: Callable[[], None] = lambda: None,
        log_to_launcher: Callable[[str], None] = lambda line: None,
        names_successors: bool = False,
        lost: LostMaster | None = None,
    ) -> None:
        self._token = token
        self._log = log
        self.grpc = load_grpc()
        self.jobs = Jobs(state_dir, int(time.time() * 1000), log, on_change, log_to_launcher, names_successors, lost)
        self._sessions: set[NodeSession] = set()
        self._unauthenticated: set[NodeSession] = set()
        self._refusals = 0
        self._refusals_logged_at = -math.inf
        limit = max_connections()
        self._connections = ConnectionLimiter(limit)
        self._server = self.grpc.aio.server(options=[*SERVER_OPTIONS, (MAX_CONNECTIONS_OPTION, limit)])
        service, _, method = METHOD.strip("/").partition("/")
        handler = self.grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers((self.grpc.method_handlers_generic_handler(service, {method: handler}),))

    async def start(self, address: str, tls: Any = None) -> int:
        """Listen on HOST:PORT, with gRPC's server credentials for TLS; return the port. Raises OSError."""
        server = self._server
        try:
            port = int(server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls))
        except RuntimeError as error:
            raise OSError(str(error)) from None
        await self._server.start()
        self._connections.watch(port)
        return port

    async def stop(self, reason: str) -> None:
        """End every stream with this reason, and stop listening, within STOP_TIMEOUT seconds."""
        self._connections.close()
        self.jobs.close(reason)
        for session in list(self._sessions):
            session.end(Refused(reason, retry=True))
        with contextlib.suppress(TimeoutError):
            async with TimeLimit(STOP_TIMEOUT):
                await self._server.stop(STOP_TIMEOUT / 2)

    def _log_refusal(self, peer: str, reason: str) -> None:
        """Log that a stream was refused; of many in a short time log only their number."""
        self._refusals += 1
        now = asyncio.get_running_loop().time()
        if now < self._refusals_logged_at + REFUSALS_INTERVAL:
            return
        others = f" ({counted(self._refusals - 1, 'other')} before it)" if self._refusals > 1 else ""
        self._refusals, self._refusals_logged_at = 0, now
        self._log(f"refused {peer}: {reason}{others}")

    async def _serve(self, _requests: Any, stream: Any) -> None:
        session = NodeSession(GrpcServerConnection(stream, self.grpc), self.jobs, self._token)
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            session.end(Refused("too many nodes are in their handshake with this master", retry=True))
        self._sessions.add(session)
        self._unauthenticated.add(session)
        peer = stream.peer()

        def on_joined() -> None:
            self._unauthenticated.discard(session)
            self._connections.joined(peer)

        try:
            await session.run(on_joined, lambda reason: self._log_refusal(peer, reason))
        finally:
            self._sessions.discard(session)
            if session not in self._unauthenticated:
                self._connections.left(peer)
            self._unauthenticated.discard(session)
