"""What leads from a worker, or from the agent itself, to the relay: pipes and pseudo-terminals.

The agent keeps the reading ends, so that no worker dies of SIGPIPE when the relay is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os

PIPE_BYTES = 1024 * 1024
"""The size of a worker's pipe, the maximum for an unprivileged user: 10 ms of a worker that writes 100 MB a second."""


def open_pipe() -> tuple[int, int]:
    """A pipe for a worker. Raises OSError."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # The user's limit on pipe memory is reached: a small pipe works too.
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.set_blocking(read_end, False)
    return read_end, write_end


def open_terminal(console: int) -> tuple[int, int]:
    """A raw pseudo-terminal of the console's size: bytes pass unchanged, and programs see a terminal.

    Raises OSError."""
    import termios
    import tty

    master, slave = os.openpty()
    try:
        tty.setraw(slave)
    except termios.error as error:
        os.close(master)
        os.close(slave)
        raise OSError(*error.args) from error
    with contextlib.suppress(OSError):
        fcntl.ioctl(slave, termios.TIOCSWINSZ, fcntl.ioctl(console, termios.TIOCGWINSZ, bytes(8)))
    os.set_blocking(master, False)
    return master, slave


class MessagePipe:
    """The launcher's own messages on their way to the relay. `write` never blocks: what the pipe does not take waits in
    this process, on the running event loop."""

    def __init__(self) -> None:
        self.read_end, self._write_end = open_pipe()
        os.set_blocking(self._write_end, False)
        self._waiting = bytearray()
        self.sent = asyncio.Event()
        """Set while nothing waits in this process."""
        self.sent.set()

    def write(self, data: bytes) -> None:
        """Send a message, now or as soon as the pipe takes it."""
        self._waiting += data
        if self.sent.is_set():
            self._send()

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                del self._waiting[: os.write(self._write_end, self._waiting)]
        except BlockingIOError:
            self.sent.clear()
            loop.add_writer(self._write_end, self._send)
            return
        loop.remove_writer(self._write_end)
        self.sent.set()

    def take_back(self) -> bytes:
        """What no relay has read: there will be none."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.read_end, PIPE_BYTES):
                data += part
        data += self._waiting
        self._waiting.clear()
        self._send()
        return data

    def close(self) -> None:
        """Nothing more is written. The relay reads what is in the pipe, and the end."""
        if self._write_end >= 0:
            asyncio.get_running_loop().remove_writer(self._write_end)
            os.close(self._write_end)
            os.close(self.read_end)
            self._write_end = -1
