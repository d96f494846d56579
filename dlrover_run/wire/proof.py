"""How node and master show each other that they know the job's token without saying it.

Each side sends a random text and an HMAC-SHA256 of everything that was said so far, keyed with the token. An answer is
good for one stream, one job and one direction only, so one that was overheard opens nothing. The node proves itself
first: the master's HMAC would let anyone who can connect search for a short token offline. What is said afterwards is
neither hidden nor protected by this; that takes TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets

from dlrover_run.wire.messages import Hello


def fresh_nonce() -> str:
    """A random text that was never used before."""
    return secrets.token_hex(32)


def master_mac(token: str, hello: Hello, nonce: str) -> str:
    """The master's proof; empty without a token."""
    return _mac(token, "master", hello, nonce)


def node_mac(token: str, hello: Hello, nonce: str) -> str:
    """The node's proof; empty without a token."""
    return _mac(token, "node", hello, nonce)


def same(one: str, other: str) -> bool:
    """Whether two proofs are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())


def _mac(token: str, side: str, hello: Hello, nonce: str) -> str:
    if not token:
        return ""
    # As a JSON list, so that no two different conversations give the same text.
    said = [side, hello.protocol, hello.job, hello.node_id, hello.incarnation, hello.nonce, nonce]
    return hmac.new(token.encode(), json.dumps(said).encode(), hashlib.sha256).hexdigest()
