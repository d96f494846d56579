"""The names of the sockets by which agents answer, and whom they belong to.

Such a socket is abstract: the kernel forgets its name with the last process that holds it, so nothing is left of an
agent that was killed, and no file has to be owned. The name is no secret and has no owner either: each side asks the
kernel for the user of the other, and accepts only its own.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

MAX_REQUEST = 4096
"""The longest line that an agent reads."""

_CREDENTIALS = struct.Struct("3i")


def socket_prefix(uid: int) -> str:
    """How the socket names of all agents of one user begin, without the byte that makes them abstract."""
    return f"dlrover-run-{uid}-"


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


def peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other end, as the kernel knows it."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(peer)[1])
