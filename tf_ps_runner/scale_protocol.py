"""The request of `tf-ps-run scale` to a job, and its answer.

On the job's machine both are one line over an abstract unix socket that is named for the user and the job. Such a name
has no owner in the file system, so each side asks the kernel for the peer's user, and accepts only its own.
"""

from __future__ import annotations

import hashlib

import msgspec

from dlrover_run.policies.parameter_servers.model import DesiredReplicas

MAX_BYTES = 4096
"""The longest line that either side reads."""

MAX_NAME = 107
"""Bytes of a unix socket's name after the first."""


class ScaleReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer of the coordinator, or of an agent when there can be none. `text` is what the coordinator will do, or
    its reason for a refusal."""

    granted: bool
    text: str = ""


class ScaleFailed(Exception):
    """The job did not receive the request, or refuses it; the message is a sentence."""


def socket_prefix(uid: int) -> str:
    """How the socket names of all jobs of one user begin, without the byte that makes them abstract."""
    return f"tf-ps-run-{uid}-"


def socket_address(uid: int, run_id: str) -> bytes:
    """The address of one job, to bind or to connect to; a long name is replaced by its hash."""
    name = socket_prefix(uid) + run_id
    if len(name.encode()) > MAX_NAME:
        name = f"{socket_prefix(uid)}sha256:{hashlib.sha256(run_id.encode()).hexdigest()}"
    return b"\0" + name.encode()


def request_line(request: DesiredReplicas) -> bytes:
    """The line of a request."""
    return msgspec.json.encode(request) + b"\n"


def read_request(line: bytes) -> DesiredReplicas:
    """The request of a line. Raises msgspec.DecodeError for an invalid one."""
    return msgspec.json.decode(line, type=DesiredReplicas)


def reply_line(reply: ScaleReply) -> bytes:
    """The line of an answer."""
    return msgspec.json.encode(reply) + b"\n"


def read_reply(line: bytes) -> ScaleReply:
    """The answer of a line. Raises msgspec.DecodeError for an invalid one."""
    return msgspec.json.decode(line, type=ScaleReply)
