"""The connection between a TensorFlow process and its agent: orders come in; reports and requests go out.

JSON, one message a line, over the unix stream socket that `TF_PS_AGENT` names. A daemon thread reads, so the latest
order is known whatever the script does. Nothing is read, opened or started before the first use, so that a template
with this module in it stays safe to fork. Only the process that used it first has the connection: a child that it forks
is not a task of the cluster.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tf_ps_runner.worker.patching import missing_patches

AGENT = "TF_PS_AGENT"
TOKEN = "TF_PS_TASK_TOKEN"

MAX_MESSAGE = 65_536
"""Bytes of one message with its newline; a longer one is not sent, and closes the connection where it is received."""

MAX_TEXT = 4_000
"""Characters of one sentence in a message; the rest is cut off."""


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


def note(text: str) -> None:
    """Print one line for the user, on this process's standard error."""
    print(f"{time.strftime('%H:%M:%S')} tf-ps-run: {text}", file=sys.stderr, flush=True)


class AgentConnection:
    """The connection of this process. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._heard = threading.Condition()
        self._sending = threading.Lock()
        self._line: socket.socket | None = None
        self._tried = False
        self._gone = False
        self._order = TaskOrder()
        self._answers: dict[int, dict[str, Any] | None] = {}
        self._asked = 0
        self._said: set[str] = set()

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
        return self._line is None or self._gone

    def wait_for(self, wanted: Callable[[TaskOrder], bool], timeout: float | None = None) -> bool:
        """Wait until an order satisfies `wanted`; False once the agent is gone, or after `timeout` seconds."""
        self._open()
        with self._heard:
            self._heard.wait_for(lambda: wanted(self._order) or self._line is None or self._gone, timeout)
            return wanted(self._order)

    def report(self, what: str, **fields: Any) -> None:
        """Send an event to the agent; does nothing without an agent."""
        self._send({"say": what, **fields})

    def report_once(self, what: str) -> None:
        """Send an event to the agent the first time only."""
        with self._heard:
            first = what not in self._said
            self._said.add(what)
        if first:
            self.report(what)

    def report_missing_patches(self) -> None:
        """Report which patches this TensorFlow does not allow. Each is reported once, here or with the next message;
        nothing is sent if all were applied."""
        self._open()
        if self._line is None or self._gone or not self.active:
            return
        for sentence in missing_patches():
            self._send({"say": "note", "text": sentence})

    def request(self, what: str, timeout: float | None = None, **fields: Any) -> dict[str, Any]:
        """Send a request to the agent and return its answer.

        Raises AgentGone without an agent, and TimeoutError after `timeout` seconds, None for never.
        """
        with self._heard:
            self._asked += 1
            number = self._asked
            self._answers[number] = None
        try:
            if not self._send({"ask": number, "what": what, **fields}):
                raise AgentGone("the agent of this process has gone")
            with self._heard:
                self._heard.wait_for(lambda: self._answers[number] is not None or self._gone, timeout)
                answer = self._answers[number]
                if answer is not None:
                    return answer
                if self._gone:
                    raise AgentGone("the agent of this process has gone")
                raise TimeoutError(f"the agent of this process did not answer {what} within {timeout:g} seconds")
        finally:
            with self._heard:
                del self._answers[number]

    def _open(self) -> None:
        """Connect to the agent, once; if that fails, a line says so and the script goes on without it."""
        if self._tried or not self.active:
            return
        with self._heard:
            if self._tried:
                return
            self._pid = os.getpid()
            path = os.environ[AGENT]
            line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                line.connect("\0" + path[1:] if path.startswith("@") else path)
                line.sendall(_packed({"say": "hello", "token": os.environ.get(TOKEN, ""), "pid": os.getpid()}))
                self._line = line
            except OSError as error:
                line.close()
                note(f"this process has no agent at {path} ({error}); it goes on as under plain TensorFlow")
                return
            finally:
                # Last of all: another thread that finds this set uses the connection at once.
                self._tried = True
        threading.Thread(target=self._listen, args=(line,), name="tf-ps-run", daemon=True).start()

    def _send(self, message: dict[str, Any]) -> bool:
        self._open()
        line = self._line
        if line is None or self._gone or not self.active:
            return False
        self.report_missing_patches()
        packed = _packed(message)
        if len(packed) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(packed)} bytes is more than the agent takes, which is {MAX_MESSAGE}")
        try:
            with self._sending:
                line.sendall(packed)
        except OSError:
            self._end()
            return False
        return True

    def _listen(self, line: socket.socket) -> None:
        try:
            with line.makefile("rb") as lines:
                while True:
                    text = lines.readline(MAX_MESSAGE)
                    if not text.endswith(b"\n"):
                        break
                    self._hear(json.loads(text))
        except (OSError, ValueError):
            pass
        self._end()

    def _hear(self, message: Any) -> None:
        if not isinstance(message, dict):
            return
        with self._heard:
            if message.get("tell") == "order":
                names = [field.name for field in dataclasses.fields(TaskOrder)]
                self._order = TaskOrder(**{name: message[name] for name in names if name in message})
            elif message.get("answer") in self._answers:
                self._answers[message["answer"]] = message
            self._heard.notify_all()

    def _end(self) -> None:
        with self._heard:
            self._gone = True
            self._heard.notify_all()


def _packed(message: dict[str, Any]) -> bytes:
    short = {
        name: [_cut(entry) for entry in value] if isinstance(value, list) else _cut(value)
        for name, value in message.items()
    }
    return json.dumps(short).encode() + b"\n"


def _cut(value: Any) -> Any:
    return value[:MAX_TEXT] if isinstance(value, str) else value


_agent = AgentConnection()


def agent() -> AgentConnection:
    """The connection of this process to its agent."""
    return _agent


def _renew_in_child() -> None:
    """A forked child starts without what its parent's threads held; its own pid shows that it has no connection."""
    _agent._begin()


os.register_at_fork(after_in_child=_renew_in_child)
