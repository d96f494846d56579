"""Where an etcd cluster is, and how this node gets in: its members, TLS, and the login.

What an `--rdzv-endpoint` of etcd says is more than that of a master does: several members, and `http://` or `https://`
before them, as `etcdctl --endpoints` takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dlrover_run.command_line import credentials, flags, lookup
from dlrover_run.command_line.rendezvous_conf import RendezvousConf
from dlrover_run.spec import EtcdSpec, SpecError, TlsSpec

PORT = 2379
"""The port of an etcd when nobody names one: etcd's own default, and torchrun's."""

PACKAGE = "etcd3"
EXTRA = "etcd"

_SCHEMES = ("http", "https")


class Members(NamedTuple):
    """The members of an etcd cluster, (host, port) each, and the place where they were named.

    `protocol` is what stands before them, `http` or `https`, and empty where nothing does.
    """

    addresses: tuple[tuple[str, int], ...]
    protocol: str
    place: str


def find_members(place: str, text: str) -> Members:
    """The members that an endpoint names, in its order; SpecError when one of them cannot be one."""
    # Before anything else is said of the text, since a sentence about what is wrong with it quotes it.
    if "@" in text:
        raise SpecError(
            f"{place} has a login in it, where every list of processes shows it: give --rdzv-conf user=NAME and set "
            f"{credentials.PASSWORD_VARIABLE} or {credentials.PASSWORD_FILE_VARIABLE}."
        )
    addresses: list[tuple[str, int]] = []
    protocols: set[str] = set()
    for entry in (part.strip() for part in text.split(",")):
        scheme, separator, written = entry.rpartition("://")
        if separator:
            if scheme.lower() not in _SCHEMES:
                remedy = "give HOST:PORT, http://HOST:PORT or https://HOST:PORT"
                raise flags.wrong(place, entry, "does not begin as the address of an etcd", remedy)
            protocols.add(scheme.lower())
        written = written.removesuffix("/")
        if not written:
            raise flags.wrong(place, text, "has an empty entry in it", "give HOST:PORT,HOST:PORT")
        host, port = flags.endpoint(place, written, PORT)
        if port == 0:
            raise flags.wrong(place, written, "has port 0, where no etcd is", "give a port from 1 to 65535")
        if (host.lower(), port) in ((name.lower(), number) for name, number in addresses):
            raise flags.wrong(place, text, f"names {written} twice", "name each member once")
        addresses.append((host, port))
    if len(protocols) > 1:
        raise flags.wrong(place, text, "has both http:// and https:// in it", "leave one out, for all members")
    return Members(tuple(addresses), "".join(protocols), place)


def find_etcd(members: Members, conf: RendezvousConf, environ: Mapping[str, str]) -> EtcdSpec:
    """The cluster, and with what this node proves to it who it is. Raises SpecError."""
    lookup.find_package(PACKAGE, EXTRA, "--rdzv-backend=etcd")
    tls = _find_tls(members, conf)
    user, password = conf.user, credentials.find_password(conf, environ)
    if user and not password:
        remedy = (
            f"set {credentials.PASSWORD_VARIABLE} or {credentials.PASSWORD_FILE_VARIABLE}, or give password_file=PATH"
        )
        if tls and tls.cert:
            remedy += "; or leave it out, since a certificate names its user"
        raise flags.wrong(*user, "is of no use without a password", remedy)
    if password and not user:
        raise SpecError(
            "There is a password for etcd and no user: give --rdzv-conf user=NAME, or leave the password out."
        )
    if conf.auth == "required" and not (user or (tls and tls.cert)):
        raise SpecError(
            "--rdzv-conf auth=required, and this node has nothing to prove itself to etcd with: give --rdzv-conf "
            f"user=NAME and set {credentials.PASSWORD_VARIABLE} or {credentials.PASSWORD_FILE_VARIABLE}, or give cert "
            "and key."
        )
    return EtcdSpec(
        endpoints=members.addresses,
        prefix=conf.prefix or EtcdSpec.prefix,
        user=user.text if user else "",
        password=password,
        tls=tls,
    )


def _find_tls(members: Members, conf: RendezvousConf) -> TlsSpec | None:
    if conf.protocol and members.protocol and conf.protocol != members.protocol:
        raise SpecError(
            f"--rdzv-conf protocol={conf.protocol} and {members.protocol}:// in {members.place} exclude each other: "
            "leave one out."
        )
    protocol = conf.protocol or members.protocol
    file = conf.cacert or conf.cert or conf.key
    if protocol == "http" and file:
        raise flags.wrong(*file, "is of no use with http", "say https, or leave it out")
    files = credentials.find_etcd_tls(conf)
    return TlsSpec() if files is None and protocol == "https" else files


def in_the_open(members: Members, conf: RendezvousConf, etcd: EtcdSpec) -> list[str]:
    """A sentence when a password goes over the network as it is, and nobody has said that it may."""
    if not etcd.password or etcd.tls or conf.protocol or members.protocol:
        return []
    return [
        "the password goes to etcd unencrypted: give --rdzv-conf protocol=https, or protocol=http if that is meant."
    ]
