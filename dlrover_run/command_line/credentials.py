"""With what a node proves to a master that it belongs to the job: the token and the files of TLS, read and checked.

A secret is never in a message: what is said names the file or the variable.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlrover_run.command_line import flags, lookup
from dlrover_run.command_line.flags import Given
from dlrover_run.command_line.rendezvous_conf import RendezvousConf
from dlrover_run.spec import SpecError, TlsSpec

TOKEN_VARIABLE = "DLROVER_RDZV_TOKEN"
TOKEN_FILE_VARIABLE = "DLROVER_RDZV_TOKEN_FILE"
VARIABLES = (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE)
"""What no process but the launcher may know."""

LONGEST_TOKEN = 4096
"""Characters that a token may have."""

_MOST_BYTES = 4 * LONGEST_TOKEN
_LONGEST_PEM = 1024 * 1024
"""Bytes in which a file has to show that it is PEM: more than any bundle of certificates that people use has."""


def find_token(conf: RendezvousConf, environ: Mapping[str, str]) -> str:
    """The job's token, empty where nobody gave one: a file that `--rdzv-conf` names, else a variable, else a file that
    a variable names."""
    if conf.token_file is None and TOKEN_VARIABLE in environ:
        return _checked(TOKEN_VARIABLE, environ[TOKEN_VARIABLE])
    variable = Given(TOKEN_FILE_VARIABLE, environ[TOKEN_FILE_VARIABLE]) if environ.get(TOKEN_FILE_VARIABLE) else None
    file = conf.token_file or variable
    if file is None:
        return ""
    content = lookup.read_file(*file, _MOST_BYTES + 2)
    try:
        return _checked(f"{file.place} {file.text!r}", content.decode())
    except UnicodeDecodeError:
        raise SpecError(f"{file.place} {file.text!r} is not text: a token is UTF-8.") from None


def _checked(where: str, text: str) -> str:
    token = text.rstrip("\r\n")
    if not token:
        raise SpecError(f"{where} holds an empty token: put a secret text into it, or leave it out.")
    if len(token) > LONGEST_TOKEN:
        raise SpecError(f"{where} holds a token of more than {LONGEST_TOKEN} characters: make it shorter.")
    try:
        token.encode()
    except UnicodeEncodeError:
        raise SpecError(f"{where} is not text: a token is UTF-8.") from None
    return token


def find_tls(conf: RendezvousConf) -> TlsSpec | None:
    """The files of TLS, by their absolute paths; None where none was given."""
    ca, cert, key = conf.tls_ca, conf.tls_cert, conf.tls_key
    if not (ca or cert or key):
        return None
    if bool(cert) != bool(key):
        alone, missing = (cert, "tls_key") if cert else (key, "tls_cert")
        assert alone is not None
        raise flags.wrong(*alone, f"is of no use without a {missing}", f"give {missing} too")
    return TlsSpec(
        ca=ca and _pem(ca, b"CERTIFICATE-----", "a certificate"),
        cert=cert and _pem(cert, b"CERTIFICATE-----", "a certificate"),
        key=key and _pem(key, b"PRIVATE KEY-----", "a private key"),
    )


def _pem(file: Given, mark: bytes, what: str) -> str:
    if mark not in lookup.read_file(*file, _LONGEST_PEM):
        raise flags.wrong(*file, f"is not {what} in PEM form", "name another file")
    return lookup.absolute(file.text)


def require(conf: RendezvousConf, token: str, tls: TlsSpec | None) -> None:
    """Refuse a job that wants proofs and has nothing to give one with."""
    if conf.auth != "required" or token or (tls and tls.ca and tls.cert):
        return
    raise SpecError(
        f"--rdzv-conf auth=required, and this node has nothing to prove itself with: set {TOKEN_VARIABLE} or "
        f"{TOKEN_FILE_VARIABLE}, or give --rdzv-conf token_file=PATH, or tls_ca, tls_cert and tls_key."
    )
