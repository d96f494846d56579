"""Links to ports on loopback that fail like a network: either direction drops all data, or connections are closed."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import Literal

from support.harness import WAIT


class Link:
    """A link to a port, of which either direction can drop all data, and whose target can be changed.

    `up` and `down` are the gates of the two directions. Links may share them.
    """

    def __init__(self, port: int, links: Links | None = None) -> None:
        self.target = port
        self._links = links
        self.up = _open_gate() if links is None else links.up
        self.down = _open_gate() if links is None else links.down
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections."""
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.up.set()
        self.down.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        for end in self._open:
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                self._open |= {near, far}
                for source, sink, gate in ((near, far, self.up), (far, near, self.down)):
                    threading.Thread(target=self._carry, args=(source, sink, gate), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, gate: threading.Event) -> None:
        tail = b""
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if gate is self.up and self._links is not None:
                    tail = self._links.look(tail, data)
                gate.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Links:
    """All links of one node to the ports of a meeting place, which fail together."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.up, self.down = _open_gate(), _open_gate()
        self._trap: tuple[bytes, threading.Event, int] | None = None
        self._sprung = threading.Event()
        self._links = [Link(port, self) for port in ports]
        self.ports = tuple(link.port for link in self._links)

    def set_trap(self, words: bytes, lose: Literal["request", "answer"], skip: int = 0) -> None:
        """Once `words` were sent up `skip` times, drop the next request with them and all after it, or the answers to
        them.
        """
        self._sprung.clear()
        self._trap = (words, self.up if lose == "request" else self.down, skip)

    def until_sprung(self) -> None:
        """Wait until the trap has dropped something."""
        assert self._sprung.wait(WAIT), "the trap never saw the bytes that it waits for"

    def close(self) -> None:
        for link in self._links:
            link.close()

    def look(self, tail: bytes, data: bytes) -> bytes:
        """Handle bytes that are about to be sent after `tail`. Return the tail for the next ones; `words` may arrive in
        pieces.
        """
        if self._trap is None:
            return b""
        words, gate, skip = self._trap
        seen = tail + data
        if words in seen:
            self._trap = (words, gate, skip - 1) if skip else None
            if not skip:
                gate.clear()
                self._sprung.set()
        # Shorter than the words, so that they are not counted twice.
        return seen[-(len(words) - 1) :] if len(words) > 1 else b""


def _open_gate() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate
