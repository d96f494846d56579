"""Waiting for gRPC calls, and translating gRPC's error details into sentences for the user."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from enum import Enum
from typing import NamedTuple, TypeVar

from dlrover_run.background import TimeLimit, beside

_MAX_DETAILS = 300
"""Characters of a foreign error text that are worth quoting."""

ENDED = "it ended the connection"

Answer = TypeVar("Answer")


class ServerKind(NamedTuple):
    """The kind of server that was called: the `program`, what one `process` of it is called, and the options of
    --rdzv-conf that switch TLS on and hold the CA file, the certificate and the key."""

    program: str
    process: str
    tls: str
    ca: str
    cert: str
    key: str


class ConnectionProblem(Enum):
    """Why a connection failed: the value is the clause for the user, with fields of the `ServerKind`."""

    REFUSED = "the connection was refused, so nothing listens there"
    SILENT = "the program that listens there does not answer: another program, or a {server.process} that is stopped"
    OTHER_PROGRAM = "another program listens there, which is not {server.program}"
    UNTRUSTED = "its certificate is not signed by {server.ca}, or is not valid now"
    OTHER_NAME = "its certificate is for another name than the endpoint's"
    NO_TLS = "it does not use TLS, and this node does"
    TLS = "it uses TLS, and this node does not: {server.tls} is missing"
    REJECTED = "it demands a certificate of this node: {server.cert} is missing, or not accepted"
    BAD_TLS_FILES = "{server.cert} and {server.key} do not belong together, or {server.ca} is damaged"
    CLOSED = "it closed the connection, as {server.program} with TLS does to a node without {server.tls}"


_CLOSED_WITH_TLS = (
    "it closed the connection, as {server.program} does if it does not use TLS, does not trust {server.cert}, or "
    "demands a certificate"
)
"""The clause for CLOSED where this node uses TLS."""

_DETAILS = {
    "CERTIFICATE_VERIFY_FAILED": ConnectionProblem.UNTRUSTED,
    "Hostname Verification": ConnectionProblem.OTHER_NAME,
    "WRONG_VERSION_NUMBER": ConnectionProblem.NO_TLS,
    # With TLS 1.3 a server checks the client's certificate after the handshake, and sends an alert.
    "ALERT_BAD_CERTIFICATE": ConnectionProblem.REJECTED,
    "ALERT_CERTIFICATE_REQUIRED": ConnectionProblem.REJECTED,
    "ALERT_UNKNOWN_CA": ConnectionProblem.REJECTED,
    "Connection refused": ConnectionProblem.REFUSED,
    "before receiving SETTINGS": ConnectionProblem.SILENT,
    "Failed parsing HTTP/2": ConnectionProblem.OTHER_PROGRAM,
    "http2 header with status": ConnectionProblem.OTHER_PROGRAM,
    # A gRPC server, but with other methods.
    "Method not found": ConnectionProblem.OTHER_PROGRAM,
    "Socket closed": ConnectionProblem.CLOSED,
    "Connection reset": ConnectionProblem.CLOSED,
    "security handshaker": ConnectionProblem.BAD_TLS_FILES,
}
"""Fragments of gRPC's error details; the first one that occurs decides."""


def classify(details: str) -> ConnectionProblem | None:
    """Why the connection of a failed call failed; None if the details are about something else."""
    return next((problem for fragment, problem in _DETAILS.items() if fragment in details), None)


def describe(problem: ConnectionProblem, server: ServerKind, encrypted: bool) -> str:
    """The clause for a problem with a server of this kind; `encrypted` if this node uses TLS."""
    closed_with_tls = problem is ConnectionProblem.CLOSED and encrypted
    return (_CLOSED_WITH_TLS if closed_with_tls else problem.value).format(server=server)


def last_error(details: str) -> str:
    """The informative part of gRPC's details, on one line. Called where an error of gRPC is shown to a user."""
    return " ".join(details.split()).rpartition("last error: ")[2][:_MAX_DETAILS]


class CallCancelled(Exception):
    """The channel was closed during a call; the message is a clause."""

    def __init__(self) -> None:
        super().__init__("the connection was closed on this side")


class CallTimeout(Exception):
    """A call exceeded its time limit; the message is a clause."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it did not answer within {seconds:g} s")


async def wait_for_call(work: Awaitable[Answer], timeout: float | None = None) -> Answer:
    """Wait for work that uses a channel, for at most `timeout` seconds; None waits as long as the channel lives.

    Raises CallCancelled, CallTimeout, and what the work raises.
    """
    # gRPC raises CancelledError for a call whose channel was closed, as if this task had been cancelled. A task of its
    # own for the work shows which of the two has happened.
    async with beside(work) as working:
        with contextlib.suppress(TimeoutError):
            async with TimeLimit(timeout):
                await asyncio.wait([working])
        if not working.done():
            assert timeout is not None, "without a timeout the work is waited for"
            raise CallTimeout(timeout)
        if working.cancelled():
            raise CallCancelled
        return working.result()
