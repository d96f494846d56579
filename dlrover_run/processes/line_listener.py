"""The agent's end of the connections to its processes: each process is authenticated, and sends and receives lines.

A process gets the address and a token of its own in its environment. The peer must be a process of this user, as the
kernel reports it, and present the token of an expected process. The first process that presents a token keeps it while
it is connected, because its children inherit its environment; when it connects again, the latest connection counts.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from dlrover_run.processes.line_connection import LineConnection

HELLO_TIMEOUT = 10.0
"""Seconds until a connection is closed that has not sent its hello; a process does that at once."""

MAX_UNAUTHENTICATED = 64
"""Connections without a hello. With one more the oldest is closed."""

ACCEPT_PAUSE = 1.0
"""Seconds until the next connection is accepted after the system had no descriptor or memory for one."""

ACCEPT_AT_ONCE = 16
"""Connections that are accepted in one turn of the loop."""

_BACKLOG = 1024
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Key = TypeVar("Key", bound=Hashable)
_K = TypeVar("_K", bound=Hashable, contravariant=True)


class LineHandler(Protocol[_K]):
    """Takes the lines of processes. For each connection `begin` always comes first and `end` always last."""

    def token_of(self, line: bytes) -> str:
        """The token in the first line of a connection; empty if that is no hello."""

    def begin(self, key: _K, connection: LineConnection, hello: bytes) -> None:
        """A process has connected."""

    def line(self, key: _K, connection: LineConnection, line: bytes) -> None:
        """A process that has connected has sent a line."""

    def end(self, key: _K, connection: LineConnection) -> None:
        """The connection of a process has ended, mostly with the process."""


@dataclass
class _Process(Generic[Key]):
    """An expected process. `latest` is the line that it has to know."""

    key: Key
    token: str
    latest: bytes = b""
    connection: LineConnection | None = None


class LineListener(Generic[Key]):
    """The connections of the processes of a node: `open`, `expect` each process before it starts, and `finish` it when
    it has ended. `name` begins the address. A line with its newline has at most `max_line` bytes. To be used in the
    thread of a running loop; no call blocks."""

    def __init__(self, name: str, max_line: int, handler: LineHandler[Key]) -> None:
        self._max_line = max_line
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._processes: dict[Key, _Process[Key]] = {}
        self._authenticated: dict[LineConnection, _Process[Key]] = {}
        self._unauthenticated: dict[LineConnection, asyncio.TimerHandle] = {}
        self._pause: asyncio.TimerHandle | None = None
        # An abstract name: reachable on this machine only, and nothing of it is left when this process ends.
        self.address = f"@{name}-{secrets.token_hex(16)}"

    def open(self) -> None:
        """Listen at `address`. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind("\0" + self.address[1:])
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Close all connections, with an `end` for each, and stop listening."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for connection in [*self._unauthenticated, *self._authenticated]:
            connection.close()
        self._processes.clear()

    def expect(self, key: Key) -> str:
        """A process is about to start; returns the token that it is to be given, which appears in no log."""
        token = secrets.token_hex(32)
        self._processes.setdefault(key, _Process(key, token)).token = token
        return token

    def send_latest(self, key: Key, line: bytes) -> None:
        """The line that a process has to know from now on: sent after its hello, and when it has changed; only the
        latest is sent to a process that does not read. For a process that is not expected this does nothing."""
        process = self._processes.get(key)
        if process is None or process.latest == line:
            return
        process.latest = line
        if process.connection is not None:
            process.connection.send_line(line)

    def finish(self, key: Key) -> None:
        """A process has ended: read its last lines, with `end` at the end, and forget it."""
        process = self._processes.get(key)
        if process is None:
            return
        if process.connection is None:
            # It may have connected, sent lines and ended since the last turn of the loop.
            self._accept(_BACKLOG)
            for stranger in list(self._unauthenticated):
                stranger.read()
        if process.connection is not None:
            process.connection.finish()
        del self._processes[key]

    def _accept(self, most: int = ACCEPT_AT_ONCE) -> None:
        if self._listener is None:
            return
        for _ in range(most):
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED and self._pause is None:
                    # Else the loop would be busy with nothing but this listener.
                    self._loop.remove_reader(self._listener.fileno())
                    self._pause = self._loop.call_later(ACCEPT_PAUSE, self._accept_again)
                return
            self._on_connect(accepted)

    def _accept_again(self) -> None:
        self._pause = None
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _on_connect(self, accepted: socket.socket) -> None:
        connection = LineConnection(accepted, self._max_line, self._on_line, self._on_end)
        if connection.other_user:
            connection.close()
            return
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            oldest = next(iter(self._unauthenticated))
            # A flood of connections may have kept its hello from being read.
            oldest.read()
            if oldest in self._unauthenticated:
                oldest.close()
        self._unauthenticated[connection] = self._loop.call_later(HELLO_TIMEOUT, connection.close)

    def _on_line(self, connection: LineConnection, line: bytes) -> None:
        process = self._authenticated.get(connection)
        if process is None:
            self._authenticate(connection, line)
        else:
            self._handler.line(process.key, connection, line)

    def _authenticate(self, connection: LineConnection, line: bytes) -> None:
        token = self._handler.token_of(line)
        process = next((each for each in self._processes.values() if each.token == token), None)
        before = process.connection if process is not None else None
        if process is None or (before is not None and before.pid != connection.pid):
            connection.close()
            return
        if before is not None:
            before.finish()
        self._unauthenticated.pop(connection).cancel()
        self._authenticated[connection] = process
        process.connection = connection
        self._handler.begin(process.key, connection, line)
        if process.latest:
            connection.send_line(process.latest)

    def _on_end(self, connection: LineConnection) -> None:
        if (timer := self._unauthenticated.pop(connection, None)) is not None:
            timer.cancel()
        if (process := self._authenticated.pop(connection, None)) is not None:
            process.connection = None
            self._handler.end(process.key, connection)
