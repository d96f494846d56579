"""How nodes and servers authenticate each other: the proof of the job's token, and the files of TLS.

For the token each side sends a random text and an HMAC-SHA256 of everything that was said so far, keyed with it. An
answer is good for one stream, one job and one direction only, so one that was overheard opens nothing. The node proves
itself first: the master's HMAC would let anyone who can connect search for a short token offline. What is said
afterwards is neither hidden nor protected by this; that takes TLS."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import ssl
from pathlib import Path
from typing import NamedTuple

from dlrover_run.spec import TlsSpec
from dlrover_run.transport.messages import Hello


def new_nonce() -> str:
    """A random text that was never used before."""
    return secrets.token_hex(32)


def master_mac(token: str, hello: Hello, nonce: str) -> str:
    """The master's proof; empty without a token."""
    return _mac(token, "master", hello, nonce)


def node_mac(token: str, hello: Hello, nonce: str) -> str:
    """The node's proof; empty without a token."""
    return _mac(token, "node", hello, nonce)


def macs_equal(one: str, other: str) -> bool:
    """Whether two proofs are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())


def _mac(token: str, side: str, hello: Hello, nonce: str) -> str:
    if not token:
        return ""
    # As a JSON list, so that no two different conversations give the same text.
    said = [side, hello.protocol, hello.job, hello.node_id, hello.incarnation, hello.nonce, nonce]
    return hmac.new(token.encode(), json.dumps(said).encode(), hashlib.sha256).hexdigest()


_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""Where distributions keep the authorities that they trust in one file (as in Go's crypto/x509)."""


class TlsFileError(Exception):
    """A file that cannot be read now; the message is a clause. One that is being renewed may be there again soon."""


class TlsFiles(NamedTuple):
    """What `grpc.ssl_channel_credentials` takes, in its order."""

    root_certificates: bytes | None
    private_key: bytes | None
    certificate_chain: bytes | None


def read_tls_files(tls: TlsSpec) -> TlsFiles:
    """What is in the files. Raises TlsFileError."""
    return TlsFiles(*map(_read, (find_ca_file(tls), tls.key, tls.cert)))


def find_ca_file(tls: TlsSpec) -> str | None:
    """The file with the certificates of those who may sign a server's; None where the system has none.

    Without one gRPC trusts a list of its own, which does not know an authority that an administrator has added.
    """
    if tls.ca is not None:
        return tls.ca
    return ssl.get_default_verify_paths().cafile or next(filter(os.path.isfile, _BUNDLES), None)


def _read(path: str | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise TlsFileError(f"a file of TLS cannot be read ({error.strerror}): {path}") from None
