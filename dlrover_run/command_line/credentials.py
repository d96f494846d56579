"""The credentials of a node at a master or etcd: token, password and TLS files, read and checked.

A secret is never part of a message: messages name its file or its variable.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import cast

from dlrover_run.command_line import checks, values
from dlrover_run.command_line.rdzv_conf import RdzvConf
from dlrover_run.rendezvous import kinds
from dlrover_run.spec import FlagValue, SpecError

TOKEN_VARIABLE = "DLROVER_RDZV_TOKEN"
TOKEN_FILE_VARIABLE = "DLROVER_RDZV_TOKEN_FILE"
PASSWORD_VARIABLE = "DLROVER_ETCD_PASSWORD"
PASSWORD_FILE_VARIABLE = "DLROVER_ETCD_PASSWORD_FILE"
VARIABLES = (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, PASSWORD_VARIABLE, PASSWORD_FILE_VARIABLE)
"""The variables that hold a secret or name its file. No child process of the launcher inherits them."""

MASTER_TLS = ("tls_ca", "tls_cert", "tls_key")
ETCD_TLS = ("cacert", "cert", "key")
"""The keys of `--rdzv-conf` with the files of the authority, of the certificate of this node and of its private key."""

MAX_SECRET_LENGTH = 4096
"""Characters of a token or a password."""

MIN_TOKEN_LENGTH = 16
"""Characters of a token below which there is a warning: a shorter token can be found by trying."""

_MAX_SECRET_BYTES = 4 * MAX_SECRET_LENGTH
_MAX_PEM_BYTES = 1024 * 1024
"""The part of a file that is searched for a PEM header: larger than any bundle of certificates in use."""


def scrub_environment() -> None:
    """Remove the secrets from this process's environment, and overwrite the values with which it was started.

    Removing a variable is not enough: the kernel goes on showing the first environment of a process in
    `/proc/PID/environ`, and the agent is forked from this process and would keep the secret in its memory. If the
    kernel does not permit the write, the values stay readable for this user and root. Called as soon as the credentials
    have been read: by the launchers, by torchrun's handler, by a master, and by a command for running jobs.
    """
    held = [os.fsencode(name) for name in VARIABLES if os.environ.pop(name, None) is not None]
    if held:
        with contextlib.suppress(OSError, ValueError, IndexError):
            _overwrite(held)


def _overwrite(names: Sequence[bytes]) -> None:
    with open("/proc/self/stat", "rb") as stat:
        text = stat.read()
    # The second field is the name in parentheses and may hold any byte. Of the fields after it the first is number 3
    # of proc(5), and number 50 is the address at which the environment begins.
    position = int(text[text.rindex(b")") + 2 :].split()[50 - 3])
    with open("/proc/self/environ", "rb") as environment:
        entries = environment.read().split(b"\0")
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for entry in entries:
            name, equals, value = entry.partition(b"=")
            if equals and name in names:
                memory.seek(position + len(name) + len(equals))
                memory.write(b"*" * len(value))
            position += len(entry) + 1


def read_token(conf: RdzvConf, environ: Mapping[str, str]) -> str:
    """The job's token, empty if none is given: from the file of `--rdzv-conf`, else from the variable, else from the
    file that a variable names. Called for a rendezvous at a master, and by a master that got no token from its
    launcher."""
    return _read_secret("token", conf.token_file, TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, environ)


def token_warnings(token: str, conf: RdzvConf, environ: Mapping[str, str]) -> list[str]:
    """A warning if others could guess or read the token that `read_token` returned.

    The file is not read again: it may be a pipe. Called after `read_token`, by both of its callers.
    """
    if not token:
        return []
    file = _secret_file(conf.token_file, TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, environ)
    found = []
    if len(token) < MIN_TOKEN_LENGTH:
        found.append(f"has fewer than {MIN_TOKEN_LENGTH} characters and can be guessed (`openssl rand -hex 32`)")
    with contextlib.suppress(OSError):
        if file is not None and os.stat(file.text).st_mode & 0o044:
            found.append(
                f"can be read by other users (`chmod 600 {file.text}`; `defaultMode: 0400` for a Secret of Kubernetes)"
            )
    where = TOKEN_VARIABLE if file is None else f"{file.source} {file.text!r}"
    return [f"the token of {where} {' and '.join(found)}."] if found else []


def read_password(conf: RdzvConf, environ: Mapping[str, str]) -> str:
    """The password for etcd, from the same three places as a token."""
    return _read_secret("password", conf.password_file, PASSWORD_VARIABLE, PASSWORD_FILE_VARIABLE, environ)


def _read_secret(
    kind: str, setting: FlagValue | None, variable: str, file_variable: str, environ: Mapping[str, str]
) -> str:
    file = _secret_file(setting, variable, file_variable, environ)
    if file is None:
        return _checked(kind, variable, environ[variable]) if variable in environ else ""
    content = checks.read_file(*file, _MAX_SECRET_BYTES + 2)
    try:
        return _checked(kind, f"{file.source} {file.text!r}", content.decode())
    except UnicodeDecodeError:
        raise SpecError(f"{file.source} {file.text!r} is not text: a {kind} must be UTF-8.") from None


def _secret_file(
    setting: FlagValue | None, variable: str, file_variable: str, environ: Mapping[str, str]
) -> FlagValue | None:
    """The file that holds a secret; None if a variable holds it, or if there is none."""
    if setting is not None or variable in environ:
        return setting
    return FlagValue(file_variable, environ[file_variable]) if environ.get(file_variable) else None


def _checked(kind: str, where: str, text: str) -> str:
    secret = text.rstrip("\r\n")
    if not secret:
        raise SpecError(f"{where} contains an empty {kind}: put a secret text into it, or leave it out.")
    if len(secret) > MAX_SECRET_LENGTH:
        raise SpecError(f"{where} contains a {kind} of more than {MAX_SECRET_LENGTH} characters: make it shorter.")
    try:
        secret.encode()
    except UnicodeEncodeError:
        raise SpecError(f"{where} is not text: a {kind} must be UTF-8.") from None
    return secret


def read_tls(conf: RdzvConf, names: tuple[str, str, str]) -> kinds.TlsSpec | None:
    """The TLS files that the keys of these names give (`MASTER_TLS`, `ETCD_TLS`), by their absolute paths; None if none
    is given. Called for a rendezvous at a master or in etcd, and by a master."""
    ca, cert, key = files = [cast("FlagValue | None", getattr(conf, name)) for name in names]
    if not any(files):
        return None
    if bool(cert) != bool(key):
        alone, missing = (cert, names[2]) if cert else (key, names[1])
        assert alone is not None
        raise values.invalid(*alone, f"requires a {missing}", f"give {missing} too")
    return kinds.TlsSpec(
        ca=ca and _pem(ca, b"CERTIFICATE-----", "a certificate"),
        cert=cert and _pem(cert, b"CERTIFICATE-----", "a certificate"),
        key=key and _pem(key, b"PRIVATE KEY-----", "a private key"),
    )


def _pem(file: FlagValue, mark: bytes, what: str) -> str:
    if mark not in checks.read_file(*file, _MAX_PEM_BYTES):
        raise values.invalid(*file, f"is not {what} in PEM format", "name another file")
    return os.path.abspath(file.text)
