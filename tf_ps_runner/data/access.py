"""How a process and the data queues on another node authenticate each other. Pure, for both ends.

The agent that a process belongs to derives the process's token from the job's secrets and tells it to the process over
their unix socket; the agent with the queues derives the same. The token is good for one task in one version of one job,
and never travels between nodes: each side sends a random text, and an HMAC-SHA256 of both. The process proves itself
first. As with a master without TLS, what follows is neither hidden nor protected.

Standard library only, Python 3.9 and later.
"""

from __future__ import annotations

import hashlib
import hmac
import json

PROTOCOL = 2
"""Raised when two versions of this program could not understand each other."""


def task_token(job_token: str, key: str, job: str, version: int, role: str, number: int) -> str:
    """The token of the task `role`-`number`.

    `key` is drawn by the chief's node, and the coordinator sends it to all nodes of the job. Both secrets count: the
    key travels over a network that may be overheard, which the job's token never does, and with etcd there is no token.
    """
    secret = _mac(job_token, f"queues {key}")
    # As a JSON list, so that no two different tasks give the same text.
    return _mac(secret, json.dumps([job, version, role, number]))


def prove(token: str, side: str, process: str, queues: str) -> str:
    """The proof of one side, "process" or "queues", over the random texts of the process and of the queues' node."""
    return _mac(token, json.dumps([side, process, queues]))


def _mac(secret: str, text: str) -> str:
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()
