"""Authentication between nodes and servers: the HMAC proof of the job's token, and the TLS files.

For the token each side sends a random nonce and an HMAC-SHA256, keyed with the token, over everything exchanged so far.
A proof is valid for one stream, one job and one direction only, so a recorded one is useless. The node proves itself
first: with the master's HMAC, anyone who can connect could search for a short token offline. The proof neither encrypts
nor protects later messages; that takes TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from pathlib import Path

from dlrover_run.rendezvous import kinds
from dlrover_run.transport.messages import Hello

_CA_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""Where distributions keep the certificate authorities that they trust, in one file (as in Go's crypto/x509)."""


def new_nonce() -> str:
    """A number that is used once. Each side of a connection calls it at its begin, so that no proof can be repeated."""
    return secrets.token_hex(32)


def master_mac(token: str, hello: Hello, nonce: str) -> str:
    """The proof that the master knows the token. The master calls it to show the proof, and the node to compare it."""
    return _mac(token, "master", hello, nonce)


def node_mac(token: str, hello: Hello, nonce: str) -> str:
    """The proof that a node knows the token. The node calls it to show the proof, and the master to compare it."""
    return _mac(token, "node", hello, nonce)


def macs_equal(one: str, other: str) -> bool:
    """Whether two proofs are equal, in constant time. The receiver of a proof calls it, before it sends anything
    else."""
    return hmac.compare_digest(one.encode(), other.encode())


def _mac(token: str, side: str, hello: Hello, nonce: str) -> str:
    if not token:
        return ""
    # A JSON list, so that no two different exchanges give the same text.
    exchange = [side, hello.protocol, hello.job, hello.node_id, hello.incarnation, hello.nonce, nonce]
    return hmac.new(token.encode(), json.dumps(exchange).encode(), hashlib.sha256).hexdigest()


class TlsFileError(Exception):
    """A TLS file that cannot be read now; the message is a clause. A file that is being renewed may be back soon."""


def read_tls_files(tls: kinds.TlsSpec) -> tuple[bytes | None, bytes | None, bytes | None]:
    """The arguments of `grpc.ssl_channel_credentials`: CA, key and certificate. Raises TlsFileError."""
    return _read(find_ca_file(tls)), _read(tls.key), _read(tls.cert)


def find_ca_file(tls: kinds.TlsSpec) -> str | None:
    """The file with the authorities that may sign a server's certificate; None where the system has none.

    Without a file gRPC trusts a list of its own, which lacks authorities that an administrator has added.
    """
    if tls.ca is not None:
        return tls.ca
    # Only a node with TLS needs it, and its import takes longer than most others.
    import ssl

    return ssl.get_default_verify_paths().cafile or next(filter(os.path.isfile, _CA_BUNDLES), None)


def _read(path: str | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise TlsFileError(f"a TLS file cannot be read ({error.strerror}): {path}") from None
