"""What the ways in which a request to etcd can fail mean for a node. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dlrover_run.etcd.operations import Compacted, EtcdMisconfigured, LeaseExpired, RequestRejected
from dlrover_run.spec import EtcdSpec
from dlrover_run.transport import grpc_errors

ETCD = grpc_errors.ServerKind("etcd", "member")

_CLAUSES = {
    "no leader": "its cluster has no leader now, as when most members are away",
    "leader changed": "its cluster has just changed its leader",
    "request timed out": "the members of its cluster did not agree in time",
    "database space exceeded": "its database is full: an administrator has to compact it and clear the alarm",
}
"""What is said for etcd's own words for a failure that another member, or the same one later, may not have."""

_NO_USER = (
    "etcd demands a user and none was given: add user=NAME to --rdzv-conf and put the password into "
    "DLROVER_ETCD_PASSWORD, or its file into password_file=PATH."
)


class EndpointFailed(Exception):
    """A request has failed for a reason that another member may not have; the message is a clause."""


class LoginRequired(Exception):
    """A member does not take this node for the user that it is, or does not know its token any more. `otherwise` is
    what is to be raised when a new login changes nothing, or when there is no user."""

    def __init__(self, otherwise: Exception) -> None:
        super().__init__(str(otherwise))
        self.otherwise = otherwise


class AuthNotEnabled(Exception):
    """The cluster knows no users, so nobody can log in and nobody has to."""


def error_for_status(code: str, details: str, spec: EtcdSpec) -> Exception:
    """What to raise for the status of a call, or with the code "" for the reason for which a watch was ended."""
    if "invalid auth token" in details or "revision of auth store is old" in details or code == "UNAUTHENTICATED":
        return LoginRequired(EndpointFailed("it does not take the token that it has just given"))
    if "user name is empty" in details:
        return LoginRequired(EtcdMisconfigured(_NO_USER))
    if "permission denied" in details:
        # etcd 3.5.1 says this also of a watch whose token it does not know, or that comes without one.
        return LoginRequired(EtcdMisconfigured(_not_permitted(spec)))
    if "invalid user ID or password" in details:
        return EtcdMisconfigured(_wrong_password(spec))
    if "authentication is not enabled" in details:
        return AuthNotEnabled()
    if "requested lease not found" in details:
        return LeaseExpired()
    if "has been compacted" in details:
        return Compacted()
    if code == "INVALID_ARGUMENT":
        return RequestRejected(f"etcd takes no such request: {grpc_errors.last_error(details)}.{_limit(details)}")
    if code == "UNIMPLEMENTED":
        return EndpointFailed(f"{ETCD.missing} v3")
    if trouble := grpc_errors.classify(details):
        return EndpointFailed(grpc_errors.describe(trouble, ETCD))
    own = [clause for words, clause in _CLAUSES.items() if words in details]
    return EndpointFailed(own[0] if own else grpc_errors.last_error(details or code))


def join_clauses(problems: Mapping[str, str]) -> str:
    """One clause from those of several endpoints."""
    if len(set(problems.values())) == 1:
        return next(iter(problems.values()))
    return "; ".join(f"{place}: {clause}" for place, clause in problems.items())


def _wrong_password(spec: EtcdSpec) -> str:
    if not spec.password:
        return (
            f"etcd demands a password of the user {spec.user!r}: put it into DLROVER_ETCD_PASSWORD, or its file into "
            "password_file=PATH in --rdzv-conf."
        )
    return (
        f"etcd knows no user {spec.user!r} with the password that was given: check user=NAME in --rdzv-conf, and "
        "DLROVER_ETCD_PASSWORD or password_file=PATH."
    )


def _not_permitted(spec: EtcdSpec) -> str:
    if not spec.user and not (spec.tls and spec.tls.cert):
        return _NO_USER
    who = f"The user {spec.user!r}" if spec.user else "The user that the certificate stands for"
    return (
        f"{who} may not read and write below {spec.prefix}/ in etcd: permit it a role of that user with `etcdctl role "
        f"grant-permission --prefix ROLE readwrite {spec.prefix}/`, or give another prefix=PATH in --rdzv-conf."
    )


def _limit(details: str) -> str:
    if "too large" in details:
        return " Start etcd with a greater --max-request-bytes."
    if "too many operations" in details:
        return " Start etcd with a greater --max-txn-ops."
    return ""
