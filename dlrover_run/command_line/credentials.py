"""With what a node proves to a master or to etcd who it is: token, password and the files of TLS, read and checked.

A secret is never in a message: what is said names the file or the variable.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from dlrover_run.command_line import flags, lookup
from dlrover_run.command_line.flags import Given
from dlrover_run.command_line.rendezvous_conf import RendezvousConf
from dlrover_run.spec import SpecError, TlsSpec

TOKEN_VARIABLE = "DLROVER_RDZV_TOKEN"
TOKEN_FILE_VARIABLE = "DLROVER_RDZV_TOKEN_FILE"
PASSWORD_VARIABLE = "DLROVER_ETCD_PASSWORD"
PASSWORD_FILE_VARIABLE = "DLROVER_ETCD_PASSWORD_FILE"
VARIABLES = (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, PASSWORD_VARIABLE, PASSWORD_FILE_VARIABLE)
"""The variables that hold a secret or name its file. No child process of the launcher inherits them."""

LONGEST_SECRET = 4096
"""Characters that a token or a password may have."""

LEAST_TOKEN = 16
"""Characters of a token below which there is a warning: a shorter one can be found by trying."""

_MOST_BYTES = 4 * LONGEST_SECRET
_LONGEST_PEM = 1024 * 1024
"""Bytes in which a file has to show that it is PEM: more than any bundle of certificates that people use has."""


def scrub_environment() -> None:
    """Remove the secrets from this process's environment, so that no child process inherits them.

    The kernel goes on showing the environment with which this process was started, in `/proc/PID/environ`, to this user
    and to root. A secret that is given by a file is not shown there.
    """
    for name in VARIABLES:
        os.environ.pop(name, None)


def find_token(conf: RendezvousConf, environ: Mapping[str, str]) -> str:
    """The job's token, empty where nobody gave one: a file that `--rdzv-conf` names, else a variable, else a file that
    a variable names."""
    return _find_secret("token", conf.token_file, TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, environ)


def weaknesses_of_token(token: str, conf: RendezvousConf, environ: Mapping[str, str]) -> list[str]:
    """One sentence when others could guess or read the token that `find_token` has found; none without a token.

    The file is not read again: it may be a pipe.
    """
    if not token:
        return []
    file = _file_of(conf.token_file, TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, environ)
    found = []
    if len(token) < LEAST_TOKEN:
        found.append(f"has fewer than {LEAST_TOKEN} characters, so that it can be guessed (`openssl rand -hex 32`)")
    if file is not None and _readable_by_others(file.text):
        found.append(
            f"can be read by other users (`chmod 600 {file.text}`; `defaultMode: 0400` for a Secret of Kubernetes)"
        )
    where = TOKEN_VARIABLE if file is None else f"{file.place} {file.text!r}"
    return [f"the token of {where} {' and '.join(found)}."] if found else []


def _readable_by_others(path: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.stat(path).st_mode & 0o044)
    return False


def find_password(conf: RendezvousConf, environ: Mapping[str, str]) -> str:
    """The password for etcd, from the same three kinds of places as a token."""
    return _find_secret("password", conf.password_file, PASSWORD_VARIABLE, PASSWORD_FILE_VARIABLE, environ)


def _find_secret(
    kind: str, setting: Given | None, variable: str, file_variable: str, environ: Mapping[str, str]
) -> str:
    file = _file_of(setting, variable, file_variable, environ)
    if file is None:
        return _checked(kind, variable, environ[variable]) if variable in environ else ""
    content = lookup.read_file(*file, _MOST_BYTES + 2)
    try:
        return _checked(kind, f"{file.place} {file.text!r}", content.decode())
    except UnicodeDecodeError:
        raise SpecError(f"{file.place} {file.text!r} is not text: a {kind} is UTF-8.") from None


def _file_of(setting: Given | None, variable: str, file_variable: str, environ: Mapping[str, str]) -> Given | None:
    """The file that holds a secret; None where a variable holds it, or there is none."""
    if setting is not None or variable in environ:
        return setting
    return Given(file_variable, environ[file_variable]) if environ.get(file_variable) else None


def _checked(kind: str, where: str, text: str) -> str:
    secret = text.rstrip("\r\n")
    if not secret:
        raise SpecError(f"{where} holds an empty {kind}: put a secret text into it, or leave it out.")
    if len(secret) > LONGEST_SECRET:
        raise SpecError(f"{where} holds a {kind} of more than {LONGEST_SECRET} characters: make it shorter.")
    try:
        secret.encode()
    except UnicodeEncodeError:
        raise SpecError(f"{where} is not text: a {kind} is UTF-8.") from None
    return secret


def find_tls(conf: RendezvousConf) -> TlsSpec | None:
    """The files of TLS with a master, by their absolute paths; None where none was given."""
    return _read_tls(conf.tls_ca, conf.tls_cert, conf.tls_key, ("tls_cert", "tls_key"))


def find_etcd_tls(conf: RendezvousConf) -> TlsSpec | None:
    """The files of TLS with etcd, by their absolute paths; None where none was given."""
    return _read_tls(conf.cacert, conf.cert, conf.key, ("cert", "key"))


def _read_tls(
    ca: Given | None, cert: Given | None, key: Given | None, names_of_pair: tuple[str, str]
) -> TlsSpec | None:
    if not (ca or cert or key):
        return None
    if bool(cert) != bool(key):
        alone, missing = (cert, names_of_pair[1]) if cert else (key, names_of_pair[0])
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
    """Refuse a job at a master that wants proofs and has nothing to give one with."""
    if conf.auth != "required" or token or (tls and tls.ca and tls.cert):
        return
    raise SpecError(
        f"--rdzv-conf auth=required, and this node has nothing to prove itself with: set {TOKEN_VARIABLE} or "
        f"{TOKEN_FILE_VARIABLE}, or give --rdzv-conf token_file=PATH, or tls_ca, tls_cert and tls_key."
    )
