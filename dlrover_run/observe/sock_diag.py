"""The byte counters of all TCP connections, from the kernel's `sock_diag`.

The text files in /proc/net have no counters, and `ss` would be a process for each sample. No rights are needed. The
kernel shows the connections of this process's network namespace only.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

NETLINK_SOCK_DIAG = 4

SOCK_DIAG_BY_FAMILY = 20
TCPDIAG_GETSOCK = 18
"""The legacy request, which alone covers both address families. For each request the kernel walks through a table whose
size follows from the memory of the machine, which takes most of the time: 2 ms with 24 GiB."""

RECEIVE_TIMEOUT = 1.0
"""Seconds after which a request to the kernel fails. The answer is there when the request has been sent."""

RECEIVE_BYTES = 256 * 1024
"""The kernel fills at most 32 KiB of a larger buffer in one message; the buffer never truncates it."""

MAX_SOCKETS = 20_000
"""Connections of one dump; a machine with more is not sampled, for the cost (`TooManySockets`)."""

_NLM_F_REQUEST_DUMP = 0x1 | 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_INET_DIAG_INFO = 2
_INFO_EXTENSION = 1 << (_INET_DIAG_INFO - 1)

# Established, and half closed: a peer that has left a collective has closed its end.
_STATES = sum(1 << state for state in (1, 4, 5, 8))

_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_LEGACY_REQUEST = struct.Struct("=3xB48xI4x")
_PORTS = struct.Struct(">HH")
# From `idiag_rqueue`: bytes to read, bytes to send, user, inode.
_QUEUES = struct.Struct("=IIII")
_MESSAGE_BYTES = 72
_ATTRIBUTE = struct.Struct("=HH")
# In struct tcp_info, which only grows at its end: milliseconds since data was last sent and last received.
_INFO_AGES = struct.Struct("=I4xI")
_INFO_COUNTERS = struct.Struct("=QQ")
_INFO_BYTES = 136


class TooManySockets(OSError):
    """The machine has more than MAX_SOCKETS connections."""


class SocketCounters(NamedTuple):
    """One connection. `acked` and `received` are bytes since it was opened: those that the peer has acknowledged, and
    those that have arrived here. `sent_age` and `received_age` are the seconds since data was last sent and received.
    `unread` bytes wait here for the process, `unsent` bytes for the peer's acknowledgement."""

    inode: int
    local_port: int
    remote_port: int
    acked: int
    received: int
    sent_age: float
    received_age: float
    unread: int
    unsent: int


class SockDiag:
    """A netlink socket to the kernel. Raises OSError where the kernel has no sock_diag."""

    def __init__(self) -> None:
        self._socket = _open()
        self._sequence = 0
        self._requests = [(TCPDIAG_GETSOCK, _LEGACY_REQUEST.pack(_INFO_EXTENSION, _STATES))]

    def dump(self) -> list[SocketCounters]:
        """All connections that a process holds. Raises OSError, and TooManySockets as soon as there are more."""
        try:
            return self._dump_all()
        except TooManySockets:
            # What remains of the answer must not be read as that of the next request.
            self._socket.close()
            self._socket = _open()
            raise
        except OSError:
            if len(self._requests) > 1:
                raise
        self._requests = [
            (SOCK_DIAG_BY_FAMILY, _REQUEST.pack(family, socket.IPPROTO_TCP, _INFO_EXTENSION, _STATES))
            for family in (socket.AF_INET, socket.AF_INET6)
        ]
        return self._dump_all()

    def _dump_all(self) -> list[SocketCounters]:
        found: list[SocketCounters] = []
        for kind, body in self._requests:
            for counters in self._dump(kind, body):
                found.append(counters)
                if len(found) > MAX_SOCKETS:
                    raise TooManySockets(errno.E2BIG, f"more than {MAX_SOCKETS} connections")
        return found

    def close(self) -> None:
        self._socket.close()

    def _dump(self, request: int, body: bytes) -> Iterator[SocketCounters]:
        self._sequence += 1
        header = _HEADER.pack(_HEADER.size + len(body), request, _NLM_F_REQUEST_DUMP, self._sequence & 0xFFFFFFFF, 0)
        self._socket.send(header + body)
        while True:
            data = self._socket.recv(RECEIVE_BYTES)
            position = 0
            while position + _HEADER.size <= len(data):
                length, kind, _, sequence, _ = _HEADER.unpack_from(data, position)
                if length < _HEADER.size:
                    raise OSError(errno.EBADMSG, "sock_diag sent a message without a length")
                if sequence == self._sequence & 0xFFFFFFFF:
                    if kind == _NLMSG_DONE:
                        return
                    if kind == _NLMSG_ERROR:
                        code = -struct.unpack_from("=i", data, position + _HEADER.size)[0]
                        if code == errno.ENOENT:
                            return  # A kernel without this address family.
                        raise OSError(code, "sock_diag")
                    counters = parse(data[position + _HEADER.size : position + length])
                    if counters is not None:
                        yield counters
                position += (length + 3) & ~3


def _open() -> socket.socket:
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG)
    opened.settimeout(RECEIVE_TIMEOUT)
    return opened


def parse(message: bytes) -> SocketCounters | None:
    """One connection of a dump; None for one without counters or without a process that holds it."""
    if len(message) < _MESSAGE_BYTES:
        return None
    local, remote = _PORTS.unpack_from(message, 4)
    unread, unsent, _, inode = _QUEUES.unpack_from(message, 56)
    position = _MESSAGE_BYTES
    while inode and position + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, position)
        if length < _ATTRIBUTE.size:
            return None
        if kind == _INET_DIAG_INFO and length - _ATTRIBUTE.size >= _INFO_BYTES:
            info = position + _ATTRIBUTE.size
            sent, received = _INFO_AGES.unpack_from(message, info + 44)
            acked_bytes, received_bytes = _INFO_COUNTERS.unpack_from(message, info + 120)
            return SocketCounters(
                inode, local, remote, acked_bytes, received_bytes, sent / 1000, received / 1000, unread, unsent
            )
        position += (length + 3) & ~3
    return None
