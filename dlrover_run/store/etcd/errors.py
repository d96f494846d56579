"""Translates failures of requests to etcd into exceptions and clauses. Pure except `check_tls_files`."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from dlrover_run.rendezvous import kinds
from dlrover_run.store.operations import Compacted, LeaseExpired, RequestRejected, StoreMisconfigured
from dlrover_run.transport import grpc_errors
from dlrover_run.transport.auth import find_ca_file
from dlrover_run.transport.grpc_errors import ConnectionProblem, ServerKind

ETCD = ServerKind("etcd", "member", "protocol=https", "cacert", "cert", "key")

_CLAUSES = {
    "no leader": "its cluster has no leader now, as when most members are unreachable",
    "leader changed": "its cluster has just changed its leader",
    "request timed out": "the members of its cluster did not agree in time",
    "database space exceeded": "its database is full: an administrator has to compact it and clear the alarm",
}
"""The clauses for those of etcd's error messages that another member, or the same one later, may not return."""

_LIMITS = {
    "too large": " Start etcd with a greater --max-request-bytes.",
    "too many operations": " Start etcd with a greater --max-txn-ops.",
}

_TLS_SETTINGS = (
    ConnectionProblem.UNTRUSTED,
    ConnectionProblem.OTHER_NAME,
    ConnectionProblem.NO_TLS,
    ConnectionProblem.TLS,
    ConnectionProblem.REJECTED,
    ConnectionProblem.BAD_TLS_FILES,
)
"""Problems that only a change of settings solves."""

_NO_USER = (
    "etcd demands a user and none was given: add user=NAME to --rdzv-conf and put the password into "
    "DLROVER_ETCD_PASSWORD, or its file into password_file=PATH."
)


class EndpointFailed(Exception):
    """A request has failed for a reason that another member may not have; the message is a clause. `problem` is why the
    connection failed, if it did."""

    def __init__(self, reason: str, problem: ConnectionProblem | None = None) -> None:
        super().__init__(reason)
        self.problem = problem

    @property
    def is_user_error(self) -> bool:
        """Whether only a change of settings helps."""
        return self.problem in _TLS_SETTINGS


class LoginRequired(Exception):
    """A member does not accept this node's user, or no longer knows its token. `otherwise` is the exception to raise if
    a new login changes nothing, or if there is no user."""

    def __init__(self, otherwise: Exception) -> None:
        super().__init__(str(otherwise))
        self.otherwise = otherwise


class AuthNotEnabled(Exception):
    """The cluster has no users, so a login is neither possible nor needed."""


def error_for_status(code: str, details: str, spec: kinds.Store) -> Exception:
    """The exception for the status of a call, or with the code "" for the reason for which a watch was ended.
    Called for each call that has failed, and for each watch that etcd has ended."""
    if "invalid auth token" in details or "revision of auth store is old" in details or code == "UNAUTHENTICATED":
        return LoginRequired(EndpointFailed("it does not accept the token that it has just given"))
    if "user name is empty" in details:
        return LoginRequired(StoreMisconfigured(_NO_USER))
    if "permission denied" in details:
        # etcd 3.5.1 also returns this for a watch with an unknown token, or without one.
        return LoginRequired(StoreMisconfigured(_not_permitted(spec)))
    if "invalid user ID or password" in details and not spec.password:
        return StoreMisconfigured(
            f"etcd demands a password of the user {spec.user!r}: put it into DLROVER_ETCD_PASSWORD, or its file into "
            "password_file=PATH in --rdzv-conf."
        )
    if "invalid user ID or password" in details:
        return StoreMisconfigured(
            f"etcd knows no user {spec.user!r} with the password that was given: check user=NAME in --rdzv-conf, and "
            "DLROVER_ETCD_PASSWORD or password_file=PATH."
        )
    if "authentication is not enabled" in details:
        return AuthNotEnabled()
    if "requested lease not found" in details:
        return LeaseExpired()
    if "has been compacted" in details:
        return Compacted()
    if code == "INVALID_ARGUMENT":
        remedy = next((text for fragment, text in _LIMITS.items() if fragment in details), "")
        return RequestRejected(f"etcd rejects the request: {grpc_errors.last_error(details)}.{remedy}")
    if code == "UNIMPLEMENTED":
        return EndpointFailed(f"{ConnectionProblem.OTHER_PROGRAM.value.format(server=ETCD)} v3")
    if problem := grpc_errors.classify(details):
        return connection_failed(problem, spec)
    known = (clause for fragment, clause in _CLAUSES.items() if fragment in details)
    return EndpointFailed(next(known, grpc_errors.last_error(details or code)))


def connection_failed(problem: ConnectionProblem, spec: kinds.Store) -> EndpointFailed:
    """The failure of a connection for that reason."""
    return EndpointFailed(grpc_errors.describe(problem, ETCD, encrypted=spec.tls is not None), problem)


def join_clauses(problems: Mapping[str, EndpointFailed]) -> str:
    """One clause from those of several endpoints."""
    clauses = {place: str(problem) for place, problem in problems.items()}
    if len(set(clauses.values())) == 1:
        return next(iter(clauses.values()))
    return "; ".join(f"{place}: {clause}" for place, clause in clauses.items())


def check_tls_files(tls: kinds.TlsSpec) -> None:
    """Raise StoreMisconfigured for files with which no TLS connection can be opened: gRPC does not name them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if (ca := find_ca_file(tls)) is not None:
            context.load_verify_locations(ca)
    except OSError as error:
        raise StoreMisconfigured(
            f"cacert, {tls.ca}, cannot be used ({_reason(error)}): give a PEM file with the authority's certificate."
        ) from None
    if tls.cert is None:
        return
    try:
        # With a password here, OpenSSL does not ask for one on the terminal.
        context.load_cert_chain(tls.cert, tls.key, password="")
    except OSError as error:
        if _reason(error) == "KEY_VALUES_MISMATCH":
            raise StoreMisconfigured(
                f"cert, {tls.cert}, and key, {tls.key}, do not belong together: give the key of that certificate."
            ) from None
        raise StoreMisconfigured(
            f"cert, {tls.cert}, or key, {tls.key}, cannot be used ({_reason(error)}): give PEM files, and a key "
            "without a password."
        ) from None


def _reason(error: OSError) -> str:
    """OpenSSL's name for the error, or the system's text."""
    if isinstance(error, ssl.SSLError):
        return error.reason or "OpenSSL cannot read it"
    return error.strerror or str(error)


def _not_permitted(spec: kinds.Store) -> str:
    if not spec.user and not (spec.tls and spec.tls.cert):
        return _NO_USER
    user = f"The user {spec.user!r}" if spec.user else "The user of the certificate"
    return (
        f"{user} may not read and write below {spec.prefix}/ in etcd: grant that to a role of the user with `etcdctl "
        f"role grant-permission --prefix ROLE readwrite {spec.prefix}/`, or give another prefix=PATH in --rdzv-conf."
    )
