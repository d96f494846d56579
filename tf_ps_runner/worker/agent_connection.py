"""The connection between a TensorFlow process and its agent: orders come in; reports and requests go out.

JSON, one message a line, over the unix stream socket that `TF_PS_AGENT` names. A daemon thread reads, so the latest
order is known whatever the script does. Nothing is read, opened or started before the first use, so that a template
with this module in it stays safe to fork. Only the process that used it first has the connection: a child that it forks
is not a task of the cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tf_ps_runner.worker.patching import missing_patches

AGENT = "TF_PS_AGENT"
TOKEN = "TF_PS_TASK_TOKEN"

MAX_MESSAGE = 65_536
"""Bytes of one message with its newline; a longer one is not sent, and closes the connection where it is received."""

MAX_TEXT = 4_000
"""Characters of one text in a message; the rest is cut off."""


class AgentGone(ConnectionError):
    """No agent can answer: it has ended, and has this process killed."""


@dataclasses.dataclass(frozen=True)
class TaskOrder:
    """The latest order of the agent to this process.

    `open` lets a worker in. `pause` has a worker leave after the current step, and `save` has the chief save and leave.
    `ending` means that the chief has succeeded. `version` is that of the set of servers, -1 before the first order.
    """

    version: int = -1
    open: bool = False
    pause: bool = False
    save: bool = False
    ending: bool = False


_ORDER_FIELDS = [field.name for field in dataclasses.fields(TaskOrder)]


def note(text: str) -> None:
    """Print one line for the user, on this process's standard error."""
    print(f"{time.strftime('%H:%M:%S')} tf-ps-run: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def noted(failure: str) -> Iterator[None]:
    """Print a line about an error in place of raising it, because the script can continue without what has failed."""
    try:
        yield
    except Exception as error:
        note(f"{failure}: {type(error).__name__}: {str(error)[:500]}")


class AgentConnection:
    """The connection of this process. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the connection and what threads of the parent held, in a forked child."""
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._socket: socket.socket | None = None
        self._opened = False
        self._connected = False
        self._order = TaskOrder()
        # None while the answer to a request is awaited.
        self._answers: dict[int, dict[str, Any] | None] = {}
        self._requests = 0
        self._reported_once: set[str] = set()

    def claim(self) -> None:
        """Make this process the one that owns the connection, without opening it yet."""
        if self._pid is None:
            self._pid = os.getpid()

    @property
    def active(self) -> bool:
        """Whether this process is a task of a cluster with an agent; cheap, and opens nothing."""
        return AGENT in os.environ and self._pid in (None, os.getpid())

    @property
    def order(self) -> TaskOrder:
        """The latest order; the first call opens the connection."""
        self._open()
        return self._order

    @property
    def gone(self) -> bool:
        """Whether there is no agent at the other end, or not any more."""
        self._open()
        return not self._connected

    def wait_for(self, wanted: Callable[[TaskOrder], bool], timeout: float | None = None) -> bool:
        """Wait until an order satisfies `wanted`; False once the agent is gone, or after `timeout` seconds."""
        self._open()
        with self._changed:
            self._changed.wait_for(lambda: wanted(self._order) or not self._connected, timeout)
            return wanted(self._order)

    def report(self, what: str, **fields: Any) -> None:
        """Send an event to the agent; does nothing without an agent."""
        self._send({"type": what, **fields})

    def report_once(self, what: str) -> None:
        """Send an event to the agent the first time only."""
        with self._changed:
            first = what not in self._reported_once
            self._reported_once.add(what)
        if first:
            self.report(what)

    def report_missing_patches(self) -> None:
        """Report which patches this TensorFlow does not allow. Each is reported once, here or with the next message."""
        self._open()
        if self._connected and self.active:
            for sentence in missing_patches():
                self._send({"type": "note", "text": sentence})

    def request(self, what: str, **fields: Any) -> dict[str, Any]:
        """Send a request to the agent and return its answer. Raises AgentGone without an agent."""
        with self._changed:
            self._requests += 1
            number = self._requests
            self._answers[number] = None
        try:
            if self._send({"request": number, "type": what, **fields}):
                with self._changed:
                    self._changed.wait_for(lambda: self._answers[number] is not None or not self._connected)
                    answer = self._answers[number]
                    if answer is not None:
                        return answer
            raise AgentGone("the agent of this process has ended")
        finally:
            with self._changed:
                del self._answers[number]

    def _open(self) -> None:
        """Connect to the agent, once. If that fails, a line reports it and the script continues without an agent."""
        if self._opened or not self.active:
            return
        with self._changed:
            if self._opened:
                return
            self.claim()
            path = os.environ[AGENT]
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._socket.connect("\0" + path[1:] if path.startswith("@") else path)
                self._socket.sendall(_packed({"type": "hello", "token": os.environ.get(TOKEN, ""), "pid": os.getpid()}))
                self._connected = True
            except OSError as error:
                self._socket.close()
                note(f"this process has no agent at {path} ({error}); it continues as under plain TensorFlow")
                return
            finally:
                # Last of all: another thread that finds this set uses the connection at once.
                self._opened = True
        threading.Thread(target=self._receive, args=(self._socket,), name="tf-ps-run", daemon=True).start()

    def _send(self, message: dict[str, Any]) -> bool:
        self._open()
        if self._socket is None or not self._connected or not self.active:
            return False
        self.report_missing_patches()
        packed = _packed(message)
        if len(packed) > MAX_MESSAGE:
            raise ValueError(f"a message has {len(packed)} bytes, and the agent accepts at most {MAX_MESSAGE}")
        try:
            with self._sending:
                self._socket.sendall(packed)
        except OSError:
            self._disconnect()
            return False
        return True

    def _receive(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as lines:
                while (line := lines.readline(MAX_MESSAGE)).endswith(b"\n"):
                    self._on_message(json.loads(line))
        except (OSError, ValueError):
            pass
        self._disconnect()

    def _on_message(self, message: Any) -> None:
        if not isinstance(message, dict):
            return
        with self._changed:
            if message.get("type") == "order":
                self._order = TaskOrder(**{name: message[name] for name in _ORDER_FIELDS if name in message})
            elif message.get("answer") in self._answers:
                self._answers[message["answer"]] = message
            self._changed.notify_all()

    def _disconnect(self) -> None:
        with self._changed:
            self._connected = False
            self._changed.notify_all()


def _packed(message: dict[str, Any]) -> bytes:
    return json.dumps({name: _shortened(value) for name, value in message.items()}).encode() + b"\n"


def _shortened(value: Any) -> Any:
    if isinstance(value, list):
        return [_shortened(entry) for entry in value]
    return value[:MAX_TEXT] if isinstance(value, str) else value


_agent = AgentConnection()


def agent() -> AgentConnection:
    return _agent


# The pid of the parent stays, by which the child knows that it has no connection.
os.register_at_fork(after_in_child=_agent.reset)
