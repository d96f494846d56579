"""What gRPC's words for a connection that failed mean, whoever was to be reached. Pure."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

_MOST_DETAILS = 300
"""Characters of somebody else's words that are worth a place in a sentence."""

REFUSED = "the connection was refused, so nobody listens there"
ENDED = "it ended the connection"
CLOSED = "it closed the connection"


class Kind(NamedTuple):
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


class Trouble(Enum):
    """Why a connection failed."""

    REFUSED = auto()
    SILENT = auto()
    OTHER_PROGRAM = auto()
    CLOSED = auto()


_WORDS = {
    "Connection refused": Trouble.REFUSED,
    "before receiving SETTINGS": Trouble.SILENT,
    "Failed parsing HTTP/2": Trouble.OTHER_PROGRAM,
    "http2 header with status": Trouble.OTHER_PROGRAM,
    # A server of gRPC, but of other calls.
    "Method not found": Trouble.OTHER_PROGRAM,
    "Socket closed": Trouble.CLOSED,
    "Connection reset": Trouble.CLOSED,
}


def find_trouble(details: str) -> Trouble | None:
    """Why the connection of a call that failed with these words did; None when they speak of something else."""
    return next((trouble for words, trouble in _WORDS.items() if words in details), None)


def say(trouble: Trouble, kind: Kind) -> str:
    """The clause for a trouble with a server of this kind."""
    clauses = {
        Trouble.REFUSED: REFUSED,
        Trouble.SILENT: kind.silent,
        Trouble.OTHER_PROGRAM: kind.missing,
        Trouble.CLOSED: CLOSED,
    }
    return clauses[trouble]


def shorten(details: str) -> str:
    """The part of a failure's own words that tells something: they begin with what everybody knows."""
    return " ".join(details.split()).rpartition("last error: ")[2][:_MOST_DETAILS]
