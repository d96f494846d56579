"""The sockets of a store: one thread, one epoll, no import but of the standard library."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable

from dlrover_run.workers.tcp_store import parser
from dlrover_run.workers.tcp_store.parser import CommandParser, ProtocolError
from dlrover_run.workers.tcp_store.state import CommandRefused, StoreState

READ_BYTES = 256 * 1024
"""The most bytes that are read of a connection at a time; then the others have their turn."""

MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""Bytes of answers that a client has not taken, from which on no more of its commands are read."""

ACCEPTS = 64
"""Connections that are accepted at a time."""

MAX_WARNINGS = 10
"""Clients that are named because they sent what no client of torch's sends: a scanner of ports would fill a console."""

CLIENT, NODE, WARNING = "client ", "node ", "warning "
"""How a line of this process begins: the address of the first client, the rank of a node whose workers have ended, and
a sentence for the user."""

TITLE = "dlrover-store"


class _Client:
    """A connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.parser = CommandParser()
        self.valid = False
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.events = select.EPOLLIN


class StoreServer:
    """Serves one store at a socket that listens, until the process is killed. `report` is called with a line about the
    first client that begins as one of torch's, and about those that are disconnected."""

    def __init__(self, listener: socket.socket, report: Callable[[str], None]) -> None:
        self._listener = listener
        self._report = report
        self._has_client = False
        self._warnings = 0
        self._state = StoreState()
        self._clients: dict[int, _Client] = {}
        self._poll = select.epoll()
        # Of all clients: memory of this size for each read would cost more than all else that a command does.
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._accepts = True
        listener.setblocking(False)
        self._poll.register(listener, select.EPOLLIN)

    def serve(self) -> None:
        """Serve until the process is killed."""
        while True:
            for fd, events in self._poll.poll():
                if fd == self._listener.fileno():
                    self._accept()
                elif (client := self._clients.get(fd)) is not None:
                    self._turn(client, events)

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError:
                # No descriptor or memory is left: the next connection waits until another one ends.
                self._accepts = False
                self._poll.unregister(self._listener)
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A client whose machine is gone closes nothing.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._clients[connection.fileno()] = _Client(connection)
            self._poll.register(connection, select.EPOLLIN)

    def _turn(self, client: _Client, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                self._flush(client)
            if events & ~select.EPOLLOUT:
                size = client.connection.recv_into(self._buffer)
                if not size:
                    self._close(client)
                    return
                self._take(client, client.parser.feed(bytes(self._buffer[:size])))
        except BlockingIOError:
            return
        except (OSError, ProtocolError, CommandRefused) as error:
            if not isinstance(error, OSError) and self._warnings < MAX_WARNINGS:
                self._warnings += 1
                self._report(f"{WARNING}a client of the store at {_address(client)} was disconnected: {error}")
            self._close(client)

    def _take(self, client: _Client, commands: Iterable[parser.Command]) -> None:
        for command in commands:
            if not client.valid:
                if command.code == parser.VALIDATE and command.number & ~parser.MAX_NODE_RANK == parser.NODE_ENDED:
                    self._report(f"{NODE}{command.number & parser.MAX_NODE_RANK}")
                    self._close(client)
                    return
                if command.code != parser.VALIDATE or command.number != parser.MAGIC:
                    raise ProtocolError("it did not begin as a client of torch's store")
                client.valid = True
                if not self._has_client:
                    self._has_client = True
                    self._report(f"{CLIENT}{_address(client)}")
                continue
            for receiver, reply in self._state.execute(client, command):
                assert isinstance(receiver, _Client), "the clients of this store are connections"
                if receiver is client:
                    self._send(client, reply)
                    continue
                try:
                    self._send(receiver, reply)
                except OSError:
                    self._close(receiver)

    def _send(self, client: _Client, reply: bytes) -> None:
        sent = 0
        if not client.unsent:
            with contextlib.suppress(BlockingIOError):
                sent = client.connection.send(reply)
            if sent == len(reply):
                return
        client.unsent.append(memoryview(reply)[sent:])
        client.unsent_bytes += len(reply) - sent
        self._listen_for(client)

    def _flush(self, client: _Client) -> None:
        while client.unsent:
            first = client.unsent[0]
            try:
                sent = client.connection.send(first)
            except BlockingIOError:
                break
            client.unsent_bytes -= sent
            if sent == len(first):
                client.unsent.popleft()
            else:
                client.unsent[0] = first[sent:]
        self._listen_for(client)

    def _listen_for(self, client: _Client) -> None:
        events = 0 if client.unsent_bytes > MAX_UNSENT_BYTES else select.EPOLLIN
        if client.unsent:
            events |= select.EPOLLOUT
        if events != client.events:
            client.events = events
            self._poll.modify(client.connection, events)

    def _close(self, client: _Client) -> None:
        if self._clients.pop(client.connection.fileno(), None) is None:
            return
        self._state.forget(client)
        client.connection.close()
        if not self._accepts:
            self._accepts = True
            self._poll.register(self._listener, select.EPOLLIN)


def _address(client: _Client) -> str:
    try:
        return str(client.connection.getpeername()[0]).removeprefix("::ffff:")
    except OSError:
        return "an unknown address"


def _write_line(line: str) -> None:
    # The agent reads soon, and what it does not read is not worth a wait.
    with contextlib.suppress(OSError):
        os.write(1, f"{line}\n".encode())


def run(listener: int) -> None:
    """Serve at the socket with the descriptor `listener`, until killed; called by the process that
    `workers.store_process` starts."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write(TITLE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        # Each worker has several connections.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    StoreServer(socket.socket(fileno=listener), _write_line).serve()
