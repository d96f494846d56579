"""What is known of one worker when a stall was found: a small record, which nodes send to each other."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.bounds import Count, Total
from dlrover_run.features.hangs.collectives.positions import MAX_POSITIONS, Position
from dlrover_run.features.hangs.search.changes import BUSY_SHARE
from dlrover_run.features.hangs.search.outside import waits_outside
from dlrover_run.observe.records import Evidence
from dlrover_run.stacks.stack import Frame, Stack

MAX_FILE = 140
"""Characters of the path of the user's file that are kept, at its end."""

MAX_FUNCTION = 60
"""Characters of the name of a function that are kept."""

MAX_LINE = 1_000_000

# Without control characters: other nodes print them.
File = Annotated[str, Meta(max_length=MAX_FILE, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
Function = Annotated[str, Meta(max_length=MAX_FUNCTION, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
StateLetter = Annotated[str, Meta(pattern=r"\A[A-Za-z]?\Z")]
Seconds = Annotated[float, Meta(ge=-1e9, le=1e9)]
Percent = Annotated[int, Meta(ge=0, le=100)]


class Place(enum.StrEnum):
    """Where the main thread of a worker is, by its stack."""

    UNKNOWN = "unknown"
    COLLECTIVE = "collective"
    LOCK = "lock"
    ELSEWHERE = "elsewhere"


class DeviceUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How much a worker uses its device, as its driver says: in percent of the last second or so, by the process alone
    and by all of them; `watts` of at most `max_watts`. None is unknown."""

    own: Percent | None = None
    whole: Percent | None = None
    watts: Count | None = None
    max_watts: Count | None = None


class Suspect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One worker of a stalled round.

    `state` is the letter in /proc/PID/stat, empty if unknown. `busy`: it used its processor during the stall.
    `lost_child`: it waits for a child that is stopped or dead. `unsent`: the number of its connections on which it has
    sent data that is not acknowledged. `sent_age` are the seconds since it last sent data, None if unknown. `late`: it
    has not reached the store long after the first worker. `ended`: it has exited with 0. `alone`: it has been quiet for
    longer than its own limit (`round_detectors`). `outside`: it waits for a time, a child or a server, and not for long
    enough yet (`outside`). `counts`: it has counted steps, or the user has set the limit.
    `file`, `line` and `function` are the innermost call in a file of the user, empty if unknown. `positions` say where
    it is in its collectives, and `device` how much it uses its device; both are missing where nothing shows them.
    """

    rank: Total
    place: Place = Place.UNKNOWN
    state: StateLetter = ""
    busy: bool = False
    lost_child: bool = False
    unsent: Count = 0
    sent_age: Seconds | None = None
    late: bool = False
    ended: bool = False
    alone: bool = False
    outside: bool = False
    counts: bool = False
    file: File = ""
    line: Count = 0
    function: Function = ""
    positions: Annotated[tuple[Position, ...], Meta(max_length=MAX_POSITIONS)] = ()
    device: DeviceUse | None = None

    @property
    def user_line(self) -> Frame | None:
        """The call in a file of the user; None if there is none."""
        return Frame(self.file, self.line, self.function) if self.file else None


def describe_worker(
    rank: int, evidence: Evidence | None, stack: Stack | None = None, share: float = 0.0, *, late: bool = False
) -> Suspect:
    """The record of a worker that runs. For `share` of the stall it used or waited for a processor."""
    figures = None if evidence is None else evidence.figures
    lost = figures is not None and any(child.state in "TZ" for child in figures.children)
    frame = None if stack is None else stack.user_line
    return Suspect(
        rank,
        place=_place(stack),
        state="" if figures is None else figures.own.state,
        busy=share >= BUSY_SHARE,
        lost_child=lost and stack is not None and stack.in_loader,
        unsent=0 if evidence is None else evidence.traffic.unsent_peers,
        sent_age=None if evidence is None else evidence.traffic.sent_age,
        late=late,
        outside=waits_outside(evidence, stack),
        file="" if frame is None else _printable(frame.file)[-MAX_FILE:],
        line=0 if frame is None else min(frame.line, MAX_LINE),
        function="" if frame is None else _printable(frame.function)[:MAX_FUNCTION],
    )


def _place(stack: Stack | None) -> Place:
    if stack is None or not stack.main:
        return Place.UNKNOWN
    if stack.in_collective:
        return Place.COLLECTIVE
    return Place.LOCK if stack.in_lock else Place.ELSEWHERE


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
