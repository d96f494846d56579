"""The master or the etcd of a resolved rendezvous, with this node's credentials, as the spec of a job has it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from dlrover_run.command_line import credentials, lookup, values
from dlrover_run.command_line.rdzv_conf import RdzvConf
from dlrover_run.command_line.rendezvous_options import LOCAL_MASTER, EtcdMembers, Rendezvous
from dlrover_run.spec import EtcdSpec, MasterSpec, SpecError, TlsSpec


class BackendSpec(NamedTuple):
    """The master or the etcd of a job with this node's credentials; both None for a job without either."""

    master: MasterSpec | None
    etcd: EtcdSpec | None
    warnings: tuple[str, ...] = ()


def find_backend(rendezvous: Rendezvous, conf: RdzvConf, environ: Mapping[str, str]) -> BackendSpec:
    """The endpoint and the credentials of a resolved rendezvous, and warnings about weak ones. Raises SpecError."""
    if rendezvous.etcd is not None:
        etcd = _etcd_spec(rendezvous.etcd, conf, environ)
        unencrypted = etcd.password and not (etcd.tls or conf.protocol or rendezvous.etcd.protocol)
        warning = (
            "the password goes to etcd unencrypted: give --rdzv-conf protocol=https, or protocol=http if you mean it."
        )
        return BackendSpec(None, etcd, (warning,) if unencrypted else ())
    if rendezvous.master is None or rendezvous.master is LOCAL_MASTER:
        return BackendSpec(rendezvous.master, None)
    token = credentials.find_token(conf, environ)
    tls = credentials.read_tls(conf, credentials.MASTER_TLS)
    if conf.auth == "required" and not (token or (tls and tls.ca and tls.cert)):
        raise SpecError(
            f"--rdzv-conf auth=required, and this node has no credentials: set {credentials.TOKEN_VARIABLE} or "
            f"{credentials.TOKEN_FILE_VARIABLE}, or give --rdzv-conf token_file=PATH, or tls_ca, tls_cert and tls_key."
        )
    if conf.state_dir is not None:
        lookup.check_directory(*conf.state_dir)
    master = replace(
        rendezvous.master,
        is_host=rendezvous.master.is_host if conf.is_host is None else conf.is_host,
        bind=conf.bind,
        state_dir=os.path.abspath(conf.state_dir.text) if conf.state_dir else None,
        web=conf.web,
        token=token,
        auth_required=conf.auth == "required",
        tls=tls,
    )
    return BackendSpec(master, None, tuple(credentials.token_warnings(token, conf, environ)))


def _etcd_spec(members: EtcdMembers, conf: RdzvConf, environ: Mapping[str, str]) -> EtcdSpec:
    lookup.require_package("etcd3", "etcd", "--rdzv-backend=etcd")
    tls = _etcd_tls(members, conf)
    user, password = conf.user, credentials.find_password(conf, environ)
    set_password = f"set {credentials.PASSWORD_VARIABLE} or {credentials.PASSWORD_FILE_VARIABLE}"
    if user and not password:
        remedy = f"{set_password}, or give password_file=PATH"
        if tls and tls.cert:
            remedy += "; or leave it out, since a certificate names its user"
        raise values.invalid(*user, "requires a password", remedy)
    if password and not user:
        raise SpecError("etcd has a password and no user: give --rdzv-conf user=NAME, or leave the password out.")
    if conf.auth == "required" and not (user or (tls and tls.cert)):
        raise SpecError(
            "--rdzv-conf auth=required, and this node has no credentials for etcd: give --rdzv-conf user=NAME and "
            f"{set_password}, or give cert and key."
        )
    return EtcdSpec(
        endpoints=members.addresses,
        prefix=conf.prefix or EtcdSpec.prefix,
        user=user.text if user else "",
        password=password,
        tls=tls,
    )


def _etcd_tls(members: EtcdMembers, conf: RdzvConf) -> TlsSpec | None:
    if conf.protocol and members.protocol and conf.protocol != members.protocol:
        raise SpecError(
            f"--rdzv-conf protocol={conf.protocol} and {members.protocol}:// in {members.source} exclude each other: "
            "leave one out."
        )
    protocol = conf.protocol or members.protocol
    file = conf.cacert or conf.cert or conf.key
    if protocol == "http" and file:
        raise values.invalid(*file, "cannot be used with http", "give https, or leave it out")
    files = credentials.read_tls(conf, credentials.ETCD_TLS)
    return TlsSpec() if files is None and protocol == "https" else files
