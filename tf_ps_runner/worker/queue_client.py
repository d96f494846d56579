"""Sends the requests of this process for data: to its agent or, if the chief is on another node, to the queues there.

The agent knows where the queues are, so requests are sent to it until it answers with an address. From then on they are
sent there directly. After a connection breaks, the agent is asked for the address again, and each request without an
answer is sent again under its number, so that it is carried out once.

Standard library only, Python 3.9 and later.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

from tf_ps_runner.data.access import PROTOCOL, break_when_dead, prove
from tf_ps_runner.worker.agent_connection import MAX_MESSAGE, agent, note
from tf_ps_runner.worker.shards import Requests

CONNECT_TIMEOUT = 10.0
"""Seconds to connect, and for each line of the handshake."""

BACKOFF_FIRST = 0.05
"""The longest first pause between two attempts, in seconds; it doubles with each attempt."""

BACKOFF_MAX = 1.0
"""The longest of these pauses, in seconds."""

WARN_AFTER = 5
"""Failed attempts in a row until a warning: the chief's node may receive a new version a moment later."""


class Unreachable(Exception):
    """The queues cannot be reached now; the message is a clause."""


class _QueueConnection:
    """An authenticated connection. `closed` is set under the client's condition."""

    def __init__(self, line: socket.socket, lines: Any) -> None:
        self.line = line
        self.lines = lines
        self.sending = threading.Lock()
        self.closed = False


class QueueClient:
    """Sends the requests of one process. All threads share one connection."""

    def __init__(self, own_agent: Requests) -> None:
        self._agent = own_agent
        self._session = secrets.token_hex(32)
        self._changed = threading.Condition()
        self._connecting = threading.Lock()
        self._connection: _QueueConnection | None = None
        self._number = 0
        # None while the answer to a request is awaited.
        self._answers: dict[int, Mapping[str, Any] | None] = {}
        self._warned = ""

    def request(self, what: str, **fields: Any) -> Mapping[str, Any]:
        """The answer to a request, which is sent as often as necessary. Raises ConnectionError when the agent is
        gone."""
        with self._changed:
            self._number += 1
            number = self._number
            self._answers[number] = None
        failures = 0
        try:
            while True:
                connection, pause = self._connection, BACKOFF_FIRST
                if connection is None:
                    answer = self._agent.request(what, **fields)
                    access = answer.get("queue")
                    if not access:
                        return answer
                    try:
                        connection = self._connect(access)
                        failures = 0
                    except Unreachable as error:
                        failures += 1
                        self._warn(access["endpoint"], str(error), failures)
                        pause = min(BACKOFF_MAX, BACKOFF_FIRST * 2.0 ** min(failures, 8))
                if connection is not None:
                    found = self._send(connection, number, {"type": what, **fields})
                    if found is not None:
                        return found
                # Random, so that a thousand processes do not connect at once.
                threading.Event().wait(random.random() * pause)
        finally:
            with self._changed:
                del self._answers[number]

    def leave_to_parent(self) -> None:
        """In a forked child: close its copy of the connection, so that the end of the parent closes the connection."""
        if self._connection is not None:
            os.close(self._connection.line.detach())

    def _connect(self, access: Mapping[str, Any]) -> _QueueConnection:
        """The connection to the queues; the first thread that comes here opens it. Raises Unreachable."""
        with self._connecting:
            if self._connection is not None:
                return self._connection
            host, _, port = access["endpoint"].rpartition(":")
            try:
                line = socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT)
            except OSError as error:
                raise Unreachable(error.strerror or str(error)) from None
            lines = line.makefile("rb")
            try:
                break_when_dead(line)
                self._authenticate(line, lines, access)
                line.settimeout(None)
            except BaseException as error:
                lines.close()
                _abort(line)
                if isinstance(error, (OSError, ValueError, LookupError, TypeError)):
                    raise Unreachable(f"no agent of this job answers there ({error})") from None
                raise
            self._warned = ""
            self._connection = connection = _QueueConnection(line, lines)
        threading.Thread(target=self._receive, args=(connection,), name="tf-ps-run: queues", daemon=True).start()
        return connection

    def _authenticate(self, line: socket.socket, lines: Any, access: Mapping[str, Any]) -> None:
        nonce = secrets.token_hex(32)
        own = {name: access[name] for name in ("job", "version", "role", "id")}
        line.sendall(_packed({"type": "queue", "protocol": PROTOCOL, **own, "session": self._session, "nonce": nonce}))
        challenge = _read_handshake(lines, "challenge")["nonce"]
        line.sendall(_packed({"type": "proof", "mac": prove(access["token"], "process", nonce, challenge)}))
        mac = _read_handshake(lines, "welcome")["mac"]
        if not secrets.compare_digest(mac, prove(access["token"], "queues", nonce, challenge)):
            raise Unreachable("the process that answers there has another token than this job's, or is another node")

    def _send(self, connection: _QueueConnection, number: int, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Send a request over this connection, and wait for the answer; None once the connection is closed."""
        try:
            with connection.sending:
                with self._changed:
                    oldest = min(self._answers)
                connection.line.sendall(_packed({"request": number, "oldest": oldest, **message}))
        except OSError:
            # The thread that reads detects this as well, perhaps after it has read the answer.
            self._close(connection)
        with self._changed:
            self._changed.wait_for(lambda: self._answers[number] is not None or connection.closed)
            return self._answers[number]

    def _receive(self, connection: _QueueConnection) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (text := connection.lines.readline(MAX_MESSAGE)).endswith(b"\n"):
                message = json.loads(text)
                with self._changed:
                    if message.get("answer") in self._answers:
                        self._answers[message["answer"]] = message
                    self._changed.notify_all()
        self._close(connection)
        connection.lines.close()

    def _close(self, connection: _QueueConnection) -> None:
        with self._changed:
            if self._connection is connection:
                self._connection = None
            if not connection.closed:
                connection.closed = True
                _abort(connection.line)
            self._changed.notify_all()

    def _warn(self, endpoint: str, clause: str, failures: int) -> None:
        """Print once why this process cannot get its data."""
        if failures >= WARN_AFTER and clause != self._warned:
            self._warned = clause
            note(f"warning: the data queues at {endpoint}, on the chief's node, cannot be reached: {clause}")


def _read_handshake(lines: Any, expected: str) -> Mapping[str, Any]:
    """A line of the handshake. Raises Unreachable for a refusal, and OSError or ValueError for any other line."""
    text = lines.readline(MAX_MESSAGE)
    if not text:
        raise Unreachable("the connection was closed")
    message: Mapping[str, Any] = json.loads(text)
    if message["type"] == "refused":
        raise Unreachable(str(message["reason"])[:500])
    if message["type"] != expected:
        raise ValueError(f"{expected} was expected")
    return message


def _abort(line: socket.socket) -> None:
    """Close a connection so that its other end does not take this for the end of the process."""
    with contextlib.suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):
        # Wakes the thread that reads, which `close` alone does not; nothing is sent by it.
        line.shutdown(socket.SHUT_RD)
    line.close()


def _packed(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


_client: QueueClient | None = None
_creating = threading.Lock()


def queue_client() -> QueueClient:
    global _client
    with _creating:
        if _client is None:
            _client = QueueClient(agent())
        return _client


def _reset_in_child() -> None:
    """A forked child is not the task: it has no agent, and requests nothing."""
    global _client, _creating
    _creating = threading.Lock()
    if _client is not None:
        _client.leave_to_parent()
        _client = None


os.register_at_fork(after_in_child=_reset_in_child)
