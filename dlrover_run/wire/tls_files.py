"""The files with which this node speaks TLS to a server."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import NamedTuple

from dlrover_run.spec import TlsSpec

_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""Where distributions keep the authorities that they trust in one file (as in Go's crypto/x509)."""


class Unreadable(Exception):
    """A file that cannot be read now; the message is a clause. One that is being renewed may be there again soon."""


class Contents(NamedTuple):
    """What `grpc.ssl_channel_credentials` takes, in its order."""

    root_certificates: bytes | None
    private_key: bytes | None
    certificate_chain: bytes | None


def read(tls: TlsSpec) -> Contents:
    """What is in the files. Raises Unreadable."""
    return Contents(*map(_read, (find_authorities(tls), tls.key, tls.cert)))


def find_authorities(tls: TlsSpec) -> str | None:
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
        raise Unreadable(f"a file of TLS cannot be read ({error.strerror}): {path}") from None
