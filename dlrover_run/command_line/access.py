"""The credentials of this node at the place of its rendezvous, from `--rdzv-conf`, variables and files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from dlrover_run.command_line import checks, credentials, values
from dlrover_run.command_line.rdzv_conf import RdzvConf
from dlrover_run.command_line.rendezvous import LOCAL_MASTER, Rendezvous
from dlrover_run.rendezvous import backends, kinds
from dlrover_run.spec import FlagValue, SpecError


def with_credentials(
    rendezvous: Rendezvous, conf: RdzvConf, environ: Mapping[str, str], warn: Callable[[str], None]
) -> kinds.Rendezvous:
    """The place of a resolved rendezvous with this node's credentials; `warn` takes sentences about weak ones. Raises
    SpecError. Called by both launchers for the resolved rendezvous, and by a command for running jobs that has found no
    agent of the job here."""
    place = rendezvous.place
    if isinstance(place, kinds.Master) and place is not LOCAL_MASTER:
        return _at_master(place, conf, environ, warn)
    if isinstance(place, kinds.Store):
        return _in_store(place, rendezvous.protocol, conf, environ, warn)
    return place


def _at_master(
    place: kinds.Master, conf: RdzvConf, environ: Mapping[str, str], warn: Callable[[str], None]
) -> kinds.Master:
    token = credentials.read_token(conf, environ)
    tls = credentials.read_tls(conf, credentials.MASTER_TLS)
    if conf.auth == "required" and not (token or (tls and tls.ca and tls.cert)):
        raise SpecError(
            f"--rdzv-conf auth=required, and this node has no credentials: set {credentials.TOKEN_VARIABLE} or "
            f"{credentials.TOKEN_FILE_VARIABLE}, or give --rdzv-conf token_file=PATH, or tls_ca, tls_cert and tls_key."
        )
    if conf.state_dir is not None:
        checks.check_directory(*conf.state_dir)
    for warning in credentials.token_warnings(token, conf, environ):
        warn(warning)
    return replace(
        place,
        is_host=place.is_host if conf.is_host is None else conf.is_host,
        bind=conf.bind,
        state_dir=os.path.abspath(conf.state_dir.text) if conf.state_dir else None,
        web=conf.web,
        token=token,
        auth_required=conf.auth == "required",
        tls=tls,
    )


def _in_store(
    place: kinds.Store, protocol: FlagValue, conf: RdzvConf, environ: Mapping[str, str], warn: Callable[[str], None]
) -> kinds.Store:
    name, package = place.backend, backends.of(place).package
    if package is not None:
        checks.require_package(*package, f"--rdzv-backend={name}")
    tls = _store_tls(protocol, conf)
    user, password = conf.user, credentials.read_password(conf, environ)
    set_password = f"set {credentials.PASSWORD_VARIABLE} or {credentials.PASSWORD_FILE_VARIABLE}"
    if user and not password:
        remedy = f"{set_password}, or give password_file=PATH"
        if tls and tls.cert:
            remedy += "; or leave it out, since a certificate names its user"
        raise values.invalid(*user, "requires a password", remedy)
    if password and not user:
        raise SpecError(f"{name} has a password and no user: give --rdzv-conf user=NAME, or leave the password out.")
    if conf.auth == "required" and not (user or (tls and tls.cert)):
        raise SpecError(
            f"--rdzv-conf auth=required, and this node has no credentials for {name}: give --rdzv-conf user=NAME and "
            f"{set_password}, or give cert and key."
        )
    if password and not (tls or conf.protocol or protocol.text):
        warn(
            f"the password goes to {name} unencrypted: give --rdzv-conf protocol=https, or protocol=http if you mean "
            "it."
        )
    prefix = conf.prefix or kinds.DEFAULT_PREFIX
    return replace(place, prefix=prefix, user=user.text if user else "", password=password, tls=tls)


def _store_tls(given: FlagValue, conf: RdzvConf) -> kinds.TlsSpec | None:
    if conf.protocol and given.text and conf.protocol != given.text:
        raise SpecError(
            f"--rdzv-conf protocol={conf.protocol} and {given.text}:// in {given.source} exclude each other: "
            "leave one out."
        )
    protocol = conf.protocol or given.text
    file = conf.cacert or conf.cert or conf.key
    if protocol == "http" and file:
        raise values.invalid(*file, "cannot be used with http", "give https, or leave it out")
    files = credentials.read_tls(conf, credentials.ETCD_TLS)
    return kinds.TlsSpec() if files is None and protocol == "https" else files
