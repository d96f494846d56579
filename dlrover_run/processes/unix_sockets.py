"""The sockets between processes of one machine: the names by which they are found, the process at the other end, and
the messages that have arrived.

The socket by which an agent answers is abstract: the kernel forgets its name with the last process that holds it, so
nothing is left of an agent that was killed, and no file has to be owned. The name is no secret and has no owner either:
each side asks the kernel for the user of the other, and accepts only its own.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ACCEPT_PAUSE = 0.2
"""Seconds until `accept` tries again. A listener stays readable meanwhile, so the kernel cannot tell."""

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EPROTO)

_CREDENTIALS = struct.Struct("3i")


PREFIX = "dlrover-run-"
"""How the socket names of the agents of all users begin."""


def socket_prefix(uid: int) -> str:
    """How the socket names of all agents of one user begin, without the byte that makes them abstract."""
    return f"{PREFIX}{uid}-"


def new_socket_name() -> str:
    """The name of the socket of this agent. Containers may share names and process ids, so it is random too."""
    return f"{socket_prefix(os.geteuid())}{os.getpid()}-{os.urandom(8).hex()}"


def socket_names(prefix: str, proc: Path = Path("/proc")) -> set[str]:
    """The rests of all names of abstract sockets that begin so, in the network namespace of this process."""
    mark = f"@{prefix}"
    # The eighth column is the socket's name, which may contain spaces; `@` stands for the byte that makes it abstract.
    columns = (line.split(None, 7) for line in (proc / "net" / "unix").read_text(errors="replace").splitlines())
    names = {fields[7].removeprefix(mark) for fields in columns if len(fields) == 8 and fields[7].startswith(mark)}
    # Any user can choose such a name, which must not control a terminal.
    return {name for name in names if name.isprintable()}


class Peer(NamedTuple):
    """The process at the other end of a connection and its user."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """The process at the other end, as the kernel knows it: no process can fake that. Called for each new
    connection, before its first message is read."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid)


def accept(listener: socket.socket) -> socket.socket:
    """The next connection. Where the process or the machine has no descriptor or memory left, which passes, it waits
    until there is one: a server that ends for that loses what it holds."""
    while True:
        try:
            return listener.accept()[0]
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            time.sleep(ACCEPT_PAUSE)


def messages(control: socket.socket, max_bytes: int) -> Iterator[bytes]:
    """The messages that have arrived on a socket of packets, which never blocks and whose reader the event loop calls.
    Once the process at the other end has ended, the loop calls it no more."""
    while True:
        try:
            message = control.recv(max_bytes)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            asyncio.get_running_loop().remove_reader(control.fileno())
            return
        yield message
