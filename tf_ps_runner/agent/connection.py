"""One connection of a process to its agent: lines in both directions, which can neither block nor fill the agent.

The socket is read by hand, so that the last messages of a process are read even when nothing can be written to it any
more: a stream of asyncio drops them together with the connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

from tf_ps_runner.agent.protocol import MAX_LINE

LINES_PER_SECOND = 2000
"""Lines that one process may send each second on average. A faster one waits, and no other process does."""

LINES_AT_ONCE = 200
"""Lines that one process may send at once, before its rate counts."""

MAX_UNREAD = 128
"""Answers that may wait for a process that does not read. With more, its connection is closed."""

MAX_FINAL_BYTES = 1024 * 1024
"""Bytes that are read of a process that has ended: several times what a socket holds. There is more only if a child of
it writes on."""

_PEER = struct.Struct("3i")


class LineConnection:
    """A connection that was accepted. `on_line` is called with each line, without its newline; `on_end` is called once,
    when no more lines will follow, also after `close`. Nothing is called from within this constructor."""

    def __init__(
        self,
        accepted: socket.socket,
        on_line: Callable[[LineConnection, bytes], None],
        ended: Callable[[LineConnection], None],
    ) -> None:
        self._socket = accepted
        self._on_line = on_line
        self._on_end = ended
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._over = False
        self._closed = False
        self._later: asyncio.TimerHandle | None = None
        self._paid_until = 0.0
        self._latest: bytes | None = None
        self._answers: deque[bytes] = deque()
        self._sending = memoryview(b"")
        self._blocked = False
        # The peer as the kernel knows it, which no process can fake.
        self.pid: int
        self.uid: int
        self.pid, self.uid, _ = _PEER.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        accepted.setblocking(False)
        self._loop.add_reader(accepted.fileno(), self._readable)

    @property
    def other_user(self) -> bool:
        """Whether the peer is a process of another user."""
        return self.uid != os.geteuid()

    def send_line(self, line: bytes) -> None:
        """Send a line in place of the last one given here that was not sent yet: only the latest counts."""
        self._latest = line
        self._send()

    def answer(self, line: bytes) -> None:
        """Send a line. A process that does not read its answers loses the connection."""
        if len(self._answers) >= MAX_UNREAD:
            self.close()
            return
        self._answers.append(line)
        self._send()

    def read_now(self) -> None:
        """Read what has arrived, without waiting for the loop."""
        if not self._closed and self._later is None:
            self._readable()

    def finish(self) -> None:
        """Read all that was sent up to now, at any rate, and close: the process has ended."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        read = 0
        self._take_lines(hurried=True)
        while not self._over and not self._closed and read < MAX_FINAL_BYTES:
            data = self._receive()
            if data is None:
                break
            read += len(data)
            self._take_lines(hurried=True)
        self.close()

    def close(self) -> None:
        """Close the connection; what was not read is dropped."""
        if self._closed:
            return
        self._closed = True
        if self._later is not None:
            self._later.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._latest = None
        self._answers.clear()
        self._on_end(self)

    def _readable(self) -> None:
        if self._receive() is not None:
            self._take_lines()

    def _receive(self) -> bytes | None:
        """What has arrived; empty at the end, None if there is nothing now."""
        try:
            data = self._socket.recv(MAX_LINE)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            # It ended without reading what was sent.
            data = b""
        self._over = not data
        self._buffer += data
        return data

    def _take_lines(self, hurried: bool = False) -> None:
        begin, data_ = 0, self._buffer
        try:
            while not self._closed:
                end = data_.find(b"\n", begin)
                if end < 0 or end - begin >= MAX_LINE or (not hurried and self._must_wait()):
                    break
                line, begin = data_[begin:end], end + 1
                self._on_line(self, line)
        finally:
            self._buffer = data_[begin:]
        if self._closed or self._later is not None:
            return
        # What has no newline by now is not a line, and what follows the last newline was cut off.
        if self._over or len(self._buffer) >= MAX_LINE:
            self.close()

    def _must_wait(self) -> bool:
        """Count one line; whether it exceeds the rate. Then reading goes on after a pause."""
        now = time.monotonic()
        self._paid_until = max(self._paid_until, now - LINES_AT_ONCE / LINES_PER_SECOND)
        if self._paid_until > now:
            self._loop.remove_reader(self._socket.fileno())
            self._later = self._loop.call_later(self._paid_until - now + LINES_AT_ONCE / LINES_PER_SECOND, self._go_on)
            return True
        self._paid_until += 1 / LINES_PER_SECOND
        return False

    def _go_on(self) -> None:
        self._later = None
        self._loop.add_reader(self._socket.fileno(), self._readable)
        self._take_lines()

    def _send(self) -> None:
        if not self._blocked:
            self._write()

    def _write(self) -> None:
        while not self._closed:
            if not self._sending:
                if self._latest is not None:
                    line, self._latest = self._latest, None
                elif self._answers:
                    line = self._answers.popleft()
                else:
                    break
                self._sending = memoryview(line)
            try:
                self._sending = self._sending[self._socket.send(self._sending) :]
            except (BlockingIOError, InterruptedError):
                self._block(True)
                return
            except OSError:
                # It has ended, which is noticed once all that it sent was read.
                self._sending = memoryview(b"")
        self._block(False)

    def _block(self, blocked: bool) -> None:
        if blocked == self._blocked or self._closed:
            return
        self._blocked = blocked
        if blocked:
            self._loop.add_writer(self._socket.fileno(), self._write)
        else:
            self._loop.remove_writer(self._socket.fileno())
