"""Waits for calls over a channel of gRPC, and what gRPC's words for one that failed mean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from enum import Enum, auto
from typing import NamedTuple, TypeVar

_MOST_DETAILS = 300
"""Characters of somebody else's words that are worth a place in a sentence."""

REFUSED = "the connection was refused, so nobody listens there"
ENDED = "it ended the connection"
CLOSED = "it closed the connection"


class ServerKind(NamedTuple):
    """What was to be reached: the `program` that should listen there, and what one process of it is called."""

    program: str
    process: str

    @property
    def missing(self) -> str:
        """The clause for a place where something else listens."""
        return f"another program listens there, which is no {self.program}"

    @property
    def silent(self) -> str:
        """The clause for a place where somebody listens and says nothing."""
        return f"whoever listens there says nothing: another program, or a {self.process} that is stopped"


class ConnectionProblem(Enum):
    """Why a connection failed."""

    REFUSED = auto()
    SILENT = auto()
    OTHER_PROGRAM = auto()
    CLOSED = auto()


_WORDS = {
    "Connection refused": ConnectionProblem.REFUSED,
    "before receiving SETTINGS": ConnectionProblem.SILENT,
    "Failed parsing HTTP/2": ConnectionProblem.OTHER_PROGRAM,
    "http2 header with status": ConnectionProblem.OTHER_PROGRAM,
    # A server of gRPC, but of other calls.
    "Method not found": ConnectionProblem.OTHER_PROGRAM,
    "Socket closed": ConnectionProblem.CLOSED,
    "Connection reset": ConnectionProblem.CLOSED,
}


def classify(details: str) -> ConnectionProblem | None:
    """Why the connection of a call that failed with these words did; None when they speak of something else."""
    return next((trouble for words, trouble in _WORDS.items() if words in details), None)


def describe(trouble: ConnectionProblem, kind: ServerKind) -> str:
    """The clause for a trouble with a server of this kind."""
    clauses = {
        ConnectionProblem.REFUSED: REFUSED,
        ConnectionProblem.SILENT: kind.silent,
        ConnectionProblem.OTHER_PROGRAM: kind.missing,
        ConnectionProblem.CLOSED: CLOSED,
    }
    return clauses[trouble]


def last_error(details: str) -> str:
    """The part of a failure's own words that tells something: they begin with what everybody knows."""
    return " ".join(details.split()).rpartition("last error: ")[2][:_MOST_DETAILS]


Answer = TypeVar("Answer")


class CallCancelled(Exception):
    """The channel was closed while something was done over it; the message is a clause."""

    def __init__(self) -> None:
        super().__init__("the connection was broken off")


class CallTimeout(Exception):
    """What was done took longer than it may; the message is a clause."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it did not answer within {seconds:g} s")


async def wait_for_call(work: Awaitable[Answer], timeout: float | None = None) -> Answer:
    """What comes of work that uses a channel, within `timeout` seconds; None waits for as long as the channel lives.

    Raises CallCancelled, CallTimeout, and what the work raises.
    """
    # gRPC raises CancelledError for a call that was broken off, as if this task had been cancelled; so another task
    # does the work, and it is seen which of the two is meant.
    working = asyncio.ensure_future(work)
    working.add_done_callback(_take_notice)
    try:
        await asyncio.wait([working], timeout=timeout)
        if not working.done():
            assert timeout is not None, "without one the work is waited for"
            raise CallTimeout(timeout)
    finally:
        working.cancel()
    if working.cancelled():
        raise CallCancelled
    return working.result()


def _take_notice(working: asyncio.Future[Answer]) -> None:
    # Nobody asks any more how it ended when this node was cancelled or has waited too long, and asyncio prints a
    # traceback into the person's terminal for a failure that nobody has asked for.
    if not working.cancelled():
        working.exception()
