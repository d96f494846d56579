"""How somebody on this machine tells a running job that he wants more or fewer processes: one line in, one line out.

The agent listens on an abstract unix socket that is named for the user and the job. Such a name has no owner in the
file system, so each side asks the kernel who the other one is, and talks to nobody but its own user.
"""

from __future__ import annotations

import hashlib
import socket
import struct

import msgspec

from dlrover_run.policies.parameter_servers.model import DesiredReplicas

MAX_BYTES = 4096
"""The longest line that either side reads."""

_LONGEST_NAME = 107
"""Bytes of a unix socket's name after the first."""

_CREDENTIALS = struct.Struct("3i")


class Reply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent answers, once the coordinator has decided on the wish or it is certain that it never will.

    `text` is the coordinator's: what follows, or why nothing does.
    """

    granted: bool
    text: str = ""


def socket_prefix(uid: int) -> str:
    """How the names of the sockets of all jobs of one user begin, without the byte that makes them abstract."""
    return f"tf-ps-run-{uid}-"


def socket_name(uid: int, run_id: str) -> str:
    """The name of the socket of one job; a long one holds the job's name in a shortened form."""
    name = socket_prefix(uid) + run_id
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(run_id.encode()).hexdigest()
    return f"{socket_prefix(uid)}sha256:{digest}"


def socket_address(uid: int, run_id: str) -> bytes:
    """The address to bind or to connect to."""
    return b"\0" + socket_name(uid, run_id).encode()


def peer_uid(connection: socket.socket) -> int:
    """The user whose process is at the other end, as the kernel knows it."""
    _, uid, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size),
    )
    return int(uid)


def request_line(wish: DesiredReplicas) -> bytes:
    """The line in which a wish is told."""
    return msgspec.json.encode(wish) + b"\n"


def read_request(line: bytes) -> DesiredReplicas:
    """The wish of a line. Raises msgspec.DecodeError for what is none."""
    return msgspec.json.decode(line, type=DesiredReplicas)


def reply_line(reply: Reply) -> bytes:
    """The line that answers."""
    return msgspec.json.encode(reply) + b"\n"


def read_reply(line: bytes) -> Reply:
    """The answer of a line. Raises msgspec.DecodeError for what is none."""
    return msgspec.json.decode(line, type=Reply)
