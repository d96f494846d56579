"""Requests of this process for data, to its agent or, if the chief is on another node, to the queues there.

The agent knows where the queues are, so each request goes to it until it answers with an address. From then on requests
go there directly. After a connection has broken, the agent is asked again, and each request that was not answered is
sent again under its number, so that it is carried out once.

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
"""Seconds that the first pause between two attempts takes at most; each one after it up to twice as long."""

BACKOFF_MAX = 1.0
"""Seconds that no such pause is longer than."""

WARN_AFTER = 5
"""Failed attempts in a row until the user is warned: the chief's node may learn of a new version a moment later."""


class Unreachable(Exception):
    """The queues cannot be reached now; the message is a clause."""


class _Connection:
    """An authenticated connection. `closed` is set by the thread that reads from it."""

    def __init__(self, line: socket.socket, lines: Any) -> None:
        self.line = line
        self.lines = lines
        self.sending = threading.Lock()
        self.closed = False


class QueueClient:
    """The requests of one process. All threads share one connection."""

    def __init__(self, own_agent: Requests) -> None:
        self._agent = own_agent
        self._session = secrets.token_hex(32)
        self._changed = threading.Condition()
        self._connecting = threading.Lock()
        self._connection: _Connection | None = None
        self._number = 0
        self._answers: dict[int, Mapping[str, Any] | None] = {}
        self._warned = ""

    def request(self, what: str, **fields: Any) -> Mapping[str, Any]:
        """The answer to a request, however often it has to be sent. Raises ConnectionError when the agent is gone."""
        with self._changed:
            self._number += 1
            number = self._number
            self._answers[number] = None
        failures = 0
        try:
            while True:
                connection = self._connection
                if connection is None:
                    answer = self._agent.request(what, **fields)
                    access = answer.get("queue")
                    if not access:
                        return answer
                    try:
                        connection = self._connect(access)
                    except Unreachable as error:
                        failures += 1
                        self._warn(access["endpoint"], str(error), failures)
                        # Random, so that a thousand processes do not connect at once.
                        pause = min(BACKOFF_MAX, BACKOFF_FIRST * 2.0 ** min(failures, 8))
                        threading.Event().wait(random.random() * pause)
                        continue
                    failures = 0
                found = self._ask(connection, number, {"what": what, **fields})
                if found is not None:
                    return found
                threading.Event().wait(random.random() * BACKOFF_FIRST)
        finally:
            with self._changed:
                del self._answers[number]

    def leave_to_parent(self) -> None:
        """In a forked child: close its copy of the connection, so that the parent's end of it is seen when it ends."""
        connection = self._connection
        if connection is not None:
            os.close(connection.line.detach())

    def _connect(self, access: Mapping[str, Any]) -> _Connection:
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
            connection = _Connection(line, lines)
            self._warned = ""
            self._connection = connection
        threading.Thread(target=self._listen, args=(connection,), name="tf-ps-run: queues", daemon=True).start()
        return connection

    def _authenticate(self, line: socket.socket, lines: Any, access: Mapping[str, Any]) -> None:
        nonce = secrets.token_hex(32)
        own = {name: access[name] for name in ("job", "version", "role", "id")}
        line.sendall(_packed({"say": "queue", "protocol": PROTOCOL, **own, "session": self._session, "nonce": nonce}))
        challenge = _told(lines, "challenge")["nonce"]
        line.sendall(_packed({"say": "proof", "mac": prove(access["token"], "process", nonce, challenge)}))
        mac = _told(lines, "welcome")["mac"]
        if not secrets.compare_digest(mac, prove(access["token"], "queues", nonce, challenge)):
            raise Unreachable("what answers there has another token than this job's, or is another node by now")

    def _ask(self, connection: _Connection, number: int, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The answer over this connection; None once it is closed."""
        try:
            with connection.sending:
                with self._changed:
                    oldest = min(self._answers)
                connection.line.sendall(_packed({"ask": number, "oldest": oldest, **message}))
        except OSError:
            # The thread that reads finds out as well, perhaps after it has read the answer.
            self._close(connection)
        with self._changed:
            self._changed.wait_for(lambda: self._answers[number] is not None or connection.closed)
            return self._answers[number]

    def _listen(self, connection: _Connection) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                text = connection.lines.readline(MAX_MESSAGE)
                if not text.endswith(b"\n"):
                    break
                message = json.loads(text)
                with self._changed:
                    if message.get("answer") in self._answers:
                        self._answers[message["answer"]] = message
                    self._changed.notify_all()
        self._close(connection)
        connection.lines.close()

    def _close(self, connection: _Connection) -> None:
        with self._changed:
            if self._connection is connection:
                self._connection = None
            if not connection.closed:
                connection.closed = True
                _abort(connection.line)
            self._changed.notify_all()

    def _warn(self, endpoint: str, clause: str, failures: int) -> None:
        """Tell the user once what keeps this process from its data."""
        if failures >= WARN_AFTER and clause != self._warned:
            self._warned = clause
            note(f"warning: the data queues at {endpoint}, with the chief, cannot be reached: {clause}")


def _told(lines: Any, expected: str) -> Mapping[str, Any]:
    """A line of the handshake. Raises Unreachable for a refusal, and OSError or ValueError for what is no such line."""
    text = lines.readline(MAX_MESSAGE)
    if not text:
        raise Unreachable("it closed the connection")
    message: Mapping[str, Any] = json.loads(text)
    if message["tell"] == "refused":
        raise Unreachable(str(message["reason"])[:500])
    if message["tell"] != expected:
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
_making = threading.Lock()


def queue_client() -> QueueClient:
    """The client of this process."""
    global _client
    with _making:
        if _client is None:
            _client = QueueClient(agent())
        return _client


def _renew_in_child() -> None:
    """A forked child is not the task: it has no agent, and nothing to ask."""
    global _client, _making
    _making = threading.Lock()
    if _client is not None:
        _client.leave_to_parent()
        _client = None


os.register_at_fork(after_in_child=_renew_in_child)
