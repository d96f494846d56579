"""How somebody on this machine tells a running job that he wants more or fewer processes: one line in, one line out.

The agent listens on an abstract unix socket that is named for the user and the job. Such a name has no owner in the
file system, so each side asks the kernel who the other one is, and talks to nobody but its own user.
"""

from __future__ import annotations

import hashlib
import socket
import struct

import msgspec

from dlrover_run.coordination.cluster.records import Order, Targets
from dlrover_run.coordination.cluster.rules import ClusterRules
from dlrover_run.coordination.words import counted

NOT_KNOWN = Targets()
"""How many processes a job has, for somebody who does not know."""

MOST_BYTES = 4096
"""The longest line that either side reads."""

_LONGEST_NAME = 107
"""Bytes of a unix socket's name after the first."""

_CREDENTIALS = struct.Struct("3i")


class Reply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent answers, once the coordinator knows of the wish or it is certain that it never will.

    `text` says what follows, or why nothing does.
    """

    heard: bool
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


def wish_line(wish: Targets) -> bytes:
    """The line in which a wish is told."""
    return msgspec.json.encode(wish) + b"\n"


def read_wish(line: bytes) -> Targets:
    """The wish of a line. Raises msgspec.DecodeError for what is none."""
    return msgspec.json.decode(line, type=Targets)


def reply_line(reply: Reply) -> bytes:
    """The line that answers."""
    return msgspec.json.encode(reply) + b"\n"


def read_reply(line: bytes) -> Reply:
    """The answer of a line. Raises msgspec.DecodeError for what is none."""
    return msgspec.json.decode(line, type=Reply)


def why_not(wish: Targets, rules: ClusterRules) -> str | None:
    """A clause about a wish that a job with these rules cannot fulfil, else None."""
    for flag, wanted, least, most in (
        ("--ps", wish.ps, rules.least_ps, rules.most_ps),
        ("--workers", wish.workers, rules.least_workers, rules.most_workers),
    ):
        if wanted is not None and not least <= wanted <= most:
            began = f"{flag}={least}" if least == most else f"{flag}={least}:{most}"
            remedy = f"start it with {flag}=MIN:MAX" if least == most else f"give {least} to {most}"
            return f"the job was started with {began}, so it cannot have {wanted}: {remedy}"
    return None


def present_in(order: Order | None) -> Targets:
    """How many processes there are by an order; what is not known, or about to change, is None."""
    if order is None or not order.servers:
        return NOT_KNOWN
    changing = order.pause or bool(order.next_servers) or any(task.version > order.version for task in order.tasks)
    return Targets(ps=None if changing else len(order.servers), workers=len(order.workers))


def what_follows(wish: Targets, present: Targets = NOT_KNOWN) -> str:
    """A clause that says what the job does once it has heard of a wish, when it has as many as `present` says."""
    parts = []
    if wish.ps is not None:
        servers = counted(wish.ps, "parameter server")
        parts.append(
            f"{servers} {_are(wish.ps)} there already"
            if wish.ps == present.ps
            else f"{servers}: a new set is started while training goes on; then the workers pause, the chief "
            "saves, and all go on with the new set"
        )
    if wish.workers is not None:
        workers = counted(wish.workers, "worker")
        there = wish.workers == present.workers
        parts.append(
            f"{workers} {_are(wish.workers)} there already" if there else f"{workers}: nobody else pauses for that"
        )
    return "; ".join(parts)


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
