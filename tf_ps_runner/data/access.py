"""The connection of a process to the data queues on another node: authentication, and when it counts as broken.

The agent of a process derives the process's token from the job's secrets and sends it to the process over their unix
socket; the agent with the queues derives the same. The token is valid for one task in one version of one job, and is
never sent between nodes: each side sends a random text, and an HMAC-SHA256 of both. The process proves itself first.
As with a master without TLS, what follows is neither hidden nor protected.

Standard library only, Python 3.9 and later.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
from typing import Any

PROTOCOL = 3
"""Raised when two versions of this program could not understand each other."""

DEAD_AFTER_MS = 10_000
"""Milliseconds after which a connection is broken whose other end's machine no longer answers."""


def task_token(job_token: str, key: str, job: str, version: int, role: str, number: int) -> str:
    """The token of the task `role`-`number`.

    `key` is drawn by the chief's node, and the coordinator sends it to all nodes of the job. Both secrets count: the
    key is sent over a network that may be overheard, which the job's token never is, and with etcd there is no token.
    """
    # A JSON list, so that no two different tasks give the same text.
    return _mac(_mac(job_token, f"queues {key}"), json.dumps([job, version, role, number]))


def prove(token: str, side: str, process: str, queues: str) -> str:
    """The proof of one side, "process" or "queues", over the random texts of the process and of the queues' node."""
    return _mac(token, json.dumps([side, process, queues]))


def _mac(secret: str, text: str) -> str:
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def break_when_dead(connection: Any) -> None:
    """Have the kernel break a TCP connection when the other machine is gone, which TCP otherwise detects after a
    quarter of an hour, or never. `connection` is a socket, or asyncio's view of one."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_MS)
