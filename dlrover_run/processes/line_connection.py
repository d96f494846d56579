"""One connection of a process to its agent: lines in both directions, which can neither block nor fill the agent.

The socket is read by hand, so that the last messages of a process are read even when nothing can be written to it any
more: a stream of asyncio drops them together with the connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

from dlrover_run.processes.unix_sockets import peer_of

MAX_UNREAD = 128
"""Answers that may wait for a process that does not read. With more, its connection is closed."""

MAX_FINAL_BYTES = 1024 * 1024
"""Bytes that are read of a process that has ended: several times what a socket holds. There is more only if a child of
it writes on."""


class LineConnection:
    """A connection that was accepted. `on_line` is called with each line, without its newline; `on_end` is called once,
    when no more lines will follow, also after `close`. Nothing is called from within this constructor.

    A line with its newline has at most `max_line` bytes. In one turn of the loop no more than that is read, so that no
    process keeps the others waiting.
    """

    def __init__(
        self,
        accepted: socket.socket,
        max_line: int,
        on_line: Callable[[LineConnection, bytes], None],
        on_end: Callable[[LineConnection], None],
    ) -> None:
        self._socket = accepted
        self._max_line = max_line
        self._on_line = on_line
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._closed = False
        self._latest: bytes | None = None
        self._answers: deque[bytes] = deque()
        self._sending = memoryview(b"")
        self.pid, self.uid = peer_of(accepted)
        accepted.setblocking(False)
        self._loop.add_reader(accepted.fileno(), self.read)

    @property
    def other_user(self) -> bool:
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

    def read(self) -> int:
        """Read what has arrived, without waiting, and return the number of bytes."""
        try:
            data = self._socket.recv(self._max_line)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            # It ended without reading what was sent.
            data = b""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if len(line) >= self._max_line:
                self.close()
            if self._closed:
                return 0
            self._on_line(self, line)
        # What has no newline by now is not a line, and what follows the last newline was cut off.
        if not data or len(self._buffer) >= self._max_line:
            self.close()
        return len(data)

    def finish(self) -> None:
        """Read all that was sent up to now, and close: the process has ended."""
        read = 0
        while not self._closed and read < MAX_FINAL_BYTES and (found := self.read()):
            read += found
        self.close()

    def close(self) -> None:
        """Close the connection; what was not read is dropped."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._latest = None
        self._answers.clear()
        self._on_end(self)

    def _send(self) -> None:
        while not self._closed:
            if not self._sending:
                if self._latest is not None:
                    line, self._latest = self._latest, None
                elif self._answers:
                    line = self._answers.popleft()
                else:
                    self._loop.remove_writer(self._socket.fileno())
                    return
                self._sending = memoryview(line)
            try:
                self._sending = self._sending[self._socket.send(self._sending) :]
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._socket.fileno(), self._send)
                return
            except OSError:
                # It has ended, which is noticed once all that it sent was read.
                self._sending = memoryview(b"")
