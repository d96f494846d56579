"""The line between a worker that can outlive its round and its agent: orders come in, and what holds for the worker
goes out.

JSON, one message a line, over the unix stream socket that a variable names; the agent's side of each message is in
`features/survivors/line.py`. A daemon thread reads, so the latest order is known whatever the script does. Only the
standard library is needed, and nothing of the launcher is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

LINE_VARIABLE = "DLROVER_SURVIVOR_LINE"
"""The variable with the address at which the agent listens, `@` and an abstract name. A job whose workers restart has
none."""

TOKEN_VARIABLE = "DLROVER_SURVIVOR_TOKEN"
"""The variable with what the worker proves itself by."""

MAX_LINE = 512 * 1024
"""Bytes of one message with its newline: more than the handles of the largest group need."""

Round = tuple[int, int]
"""The epoch and the number of a round."""


class AgentGone(ConnectionError):
    """The agent of this worker has ended, and no round follows."""


class Order(NamedTuple):
    """What the agent asks of this worker: its place in a round, and how the process group of that round forms.

    `uuid` is None while the worker is to offer a handle. With 0 the group forms as in any script, else in place with
    these handles. A worker that forms in place connects to the store at `address` and `port`. The agent ends a worker
    that does not answer within `timeout` seconds; the worker itself gives up the others after `start_timeout`.
    """

    round: Round
    rank: int
    world_size: int
    address: str
    port: int
    timeout: float
    start_timeout: float
    uuid: int | None = None
    handles: tuple[str, ...] = ()


class AgentLine:
    """This worker's end of the line. All methods may be called from any thread; `on_order` is called in the thread that
    reads."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.on_order: Callable[[Order], None] = lambda order: None
        self._socket = connection
        self._token = token
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._order: Order | None = None
        self._gone = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> AgentLine | None:
        """The line that the environment names; None without one. Raises AgentGone if nothing listens there."""
        address = environment.get(LINE_VARIABLE)
        if not address:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect("\0" + address[1:] if address.startswith("@") else address)
        except OSError as error:
            connection.close()
            raise AgentGone(f"the agent of this worker does not answer at {address} ({error.strerror})") from None
        return cls(connection, environment.get(TOKEN_VARIABLE, ""))

    def begin(self, able: bool, version: str) -> None:
        """Say what this worker can, and begin to read."""
        self._send({"type": "hello", "token": self._token, "pid": os.getpid(), "able": able, "torch": version})
        threading.Thread(target=self._read, name="dlrover-run orders", daemon=True).start()

    @property
    def order(self) -> Order | None:
        """The latest order."""
        return self._order

    def wait(self, wanted: Callable[[Order], bool], timeout: float | None = None) -> Order | None:
        """The first latest order that is `wanted`; None after `timeout` seconds. Raises AgentGone."""
        with self._changed:
            self._changed.wait_for(lambda: self._gone or self._is_wanted(wanted), timeout)
            if self._is_wanted(wanted):
                return self._order
            if self._gone:
                raise AgentGone("the agent of this worker has ended")
            return None

    def offer(self, key: Round, handle: str) -> None:
        """Say that the worker has left its last group, with its handle for the next one."""
        self._send({"type": "offer", "round": key, "handle": handle})

    def formed(self, key: Round) -> None:
        """Say that the worker is in the group of that round."""
        self._send({"type": "formed", "round": key})

    def lost(self, key: Round) -> None:
        """Say that the group of that round has lost a member, or could not be formed."""
        self._send({"type": "lost", "round": key})

    def close(self) -> None:
        """End the line and its thread."""
        with contextlib.suppress(OSError):
            # Not if the agent has ended it.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _is_wanted(self, wanted: Callable[[Order], bool]) -> bool:
        return self._order is not None and wanted(self._order)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._end()

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                while (order := _next_order(lines)) is not None:
                    with self._changed:
                        self._order = order
                        self._changed.notify_all()
                    self.on_order(order)
        finally:
            self._end()

    def _end(self) -> None:
        with self._changed:
            self._gone = True
            self._changed.notify_all()


def _next_order(lines: BinaryIO) -> Order | None:
    """The next order; None once the agent has ended the line, or sends what is no order."""
    try:
        line = lines.readline(MAX_LINE)
        if not line.endswith(b"\n"):
            return None
        message = json.loads(line)
        epoch, number = message["round"]
        fields = {name: message[name] for name in Order._fields if name in message}
        fields |= {"round": (int(epoch), int(number)), "handles": tuple(message.get("handles", ()))}
        return Order(**fields)
    except (OSError, ValueError, TypeError, KeyError):
        return None
