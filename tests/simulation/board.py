"""A node's end of the stream to a master: a model of `MasterBoard`, with its pure parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlrover_run.coordination.records import OVER, Assignment, NodePhase, NodeReport
from dlrover_run.coordination.rules import JobRules
from dlrover_run.rendezvous.client import AssignmentTracker
from dlrover_run.rendezvous.master_client import HANDSHAKE_TIMEOUT
from dlrover_run.rendezvous.reconnect import CLOSE_TIMEOUT, ReconnectBackoff, Silence
from dlrover_run.transport.messages import Assigned, Join, Refused, Report, Welcome, encode_rules
from simulation.masters import Masters
from simulation.network import END, TO_MASTER, TO_NODE, Stream
from simulation.timeline import Process


class Board:
    """Keeps one stream up, publishes the latest status, and holds the latest assignment."""

    def __init__(self, node: Any, rules: JobRules, masters: Masters, listener: Callable[[], None]) -> None:
        self._node = node
        self._process: Process = node
        self._rules = rules
        self._masters = masters
        self._listener = listener
        self._search = ReconnectBackoff(rules.join_timeout, node.time(), node.timeline.random.random)
        self._silence = Silence(rules.heartbeat_timeout, node.time())
        self._status: NodeReport | None = None
        self._stream: Stream | None = None
        self._joined = False
        self._connected = False
        self._orders = AssignmentTracker()
        self._closing = False
        self._on_closed: Callable[[], None] = lambda: None
        self._attempt = 0
        self.problem: str | None = None

    @property
    def assignment(self) -> Assignment:
        return self._orders.assignment

    def report(self, status: NodeReport) -> None:
        if status == self._status:
            return
        first = self._status is None
        self._status = status
        self._search.see(status.phase, self._process.time())
        if first:
            self._seek()
        elif self._joined:
            self._send(Report(status))

    def close(self, on_closed: Callable[[], None]) -> None:
        self._closing = True
        self._on_closed = on_closed
        if not self._joined:
            self._finish()
            return
        self._process.call_later(CLOSE_TIMEOUT, self._finish)
        # All that was said before is read before the end is.
        assert self._stream is not None
        self._stream.close(TO_MASTER)
        self._process.call_later(self._process.timeline.random.uniform(0, CLOSE_TIMEOUT), self._finish)

    def break_off(self, silent: bool) -> None:
        """The process is gone; its kernel ends the connection, unless the machine is gone too."""
        if self._stream is not None:
            self._stream.close(TO_MASTER, silent=silent, reset=self._process.timeline.random.random() < 0.3)

    def cut(self) -> None:
        """The connection breaks, for both ends."""
        if self._stream is not None:
            self._stream.cut()

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.close(TO_MASTER)
        self._on_closed()

    def _seek(self) -> None:
        self._process.call_later(self._search.pause(), self._open)

    def _open(self) -> None:
        if self._closing or self.problem or self.assignment.phase in OVER:
            return
        master = self._masters.find()
        self._attempt += 1
        attempt = self._attempt
        if master is None:
            self._process.call_later(0.002, self._note_end)
            return
        stream = self._stream = Stream(self._process.timeline, self._node.link, self._node.place.weather)
        stream.listen(TO_NODE, self._process, lambda message: self._hear(stream, message))
        master.accept(stream)
        assert self._status is not None, "nothing is done before the first status"
        self._send(Join(self._status, encode_rules(self._rules)))
        self._process.call_later(HANDSHAKE_TIMEOUT, lambda: self._too_slow(attempt))

    def _too_slow(self, attempt: int) -> None:
        if attempt == self._attempt and not self._joined and self._stream is not None:
            self._drop()
            self._note_end()

    def _hear(self, stream: Stream, message: Any) -> None:
        if stream is not self._stream:
            return
        now = self._process.time()
        self._silence.hear(now)
        if isinstance(message, Welcome):
            self._joined = self._connected = True
            self._search.connected(now)
            self._silence = Silence(self._rules.heartbeat_timeout, now)
            # What has become of this node since it said hello.
            assert self._status is not None
            self._send(Report(self._status))
            self._keep_alive(self._attempt, now + self._rules.keep_alive_interval)
        elif isinstance(message, Assigned):
            self._take(message.assignment)
        elif isinstance(message, Refused):
            connected = self._joined
            self._drop()
            self._note_refusal(message, connected)
        elif message is END:
            self._drop()
            self._note_end()

    def _take(self, wanted: Assignment) -> None:
        if wanted.epoch >= self._orders.epoch:
            self._node.place.laws.hearing(self._node.key, wanted)
        if self._orders.take(wanted):
            self._listener()

    def _keep_alive(self, attempt: int, due: float) -> None:
        def report() -> None:
            if attempt != self._attempt or not self._joined:
                return
            now = self._process.time()
            if self._silence.too_long(due, now):
                self._drop()
                self._note_end()
                return
            assert self._status is not None
            self._send(Report(self._status))
            self._keep_alive(attempt, now + self._rules.keep_alive_interval)

        self._process.call_at(due, report)

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close(TO_MASTER)
        self._stream = None
        self._joined = False

    def _note_end(self) -> None:
        now = self._process.time()
        if self._connected:
            self._connected = False
            self._search.lost(now)
        else:
            self._search.failed()
        if self._closing:
            self._on_closed()
            return
        if self.assignment.phase in OVER:
            return
        if self._search.left(now) == 0:
            self._give_up("the master has been away for too long")
        else:
            self._seek()

    def _note_refusal(self, refusal: Refused, connected: bool) -> None:
        trains = self._status is not None and self._status.phase is NodePhase.RUNNING
        if (connected and refusal.retry) or (trains and not connected):
            self._note_end()
        elif self._search.refused(self._process.time()) or not refusal.retry:
            self._give_up(refusal.reason)
        else:
            self._seek()

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self._listener()

    def _send(self, message: Any) -> None:
        if self._stream is not None:
            self._stream.send(TO_MASTER, message)
