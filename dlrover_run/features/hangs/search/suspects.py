"""What is known of one worker when a stall was found: a small record, which nodes send to each other."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from dlrover_run.coordination.records.bounds import Count, Total
from dlrover_run.features.hangs.collectives.positions import MAX_POSITIONS, Position
from dlrover_run.features.hangs.search.changes import BUSY_SHARE, SPIN_SHARE
from dlrover_run.features.hangs.search.outside import OUTSIDE_LIMIT, waits_outside
from dlrover_run.observe.records import Evidence
from dlrover_run.observe.waits import Waits, classify
from dlrover_run.stacks.stack import Frame, Stack
from dlrover_run.stacks.wait import Wait

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
    """Where the main thread of a worker is, by its stack and by what it uses.

    DEVICE: in a call of C, without the lock of the interpreter, where it spins, or sleeps in a process that has an
    accelerator open. So does a worker that waits for its device, as NCCL only enqueues a collective; one that
    computes for long in a single call looks the same.
    """

    UNKNOWN = "unknown"
    COLLECTIVE = "collective"
    DEVICE = "device"
    LOCK = "lock"
    ELSEWHERE = "elsewhere"


class DeviceUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How much a worker uses its device, as its driver says: in percent of the last second or so, by the process alone
    and by all of them, and the power of the device in watts. None is unknown."""

    own: Percent | None = None
    whole: Percent | None = None
    watts: Count | None = None


class Suspect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One worker of a stalled round.

    `state` is the letter in /proc/PID/stat, empty if unknown. `busy`: it used its processor during the stall.
    `lost_child`: it waits for a child that is stopped or dead. `unsent`: the number of its connections on which it has
    sent data that is not acknowledged. `sent_age` are the seconds since it last sent data, None if unknown. `late`: it
    has not reached the store long after the first worker. `ended`: it has exited with 0. `alone`: it has been quiet for
    longer than its own limit (`round_detectors`). `outside`: it waits for a time, a child, a server or its device, and
    not for long enough yet (`outside`). `counts`: it has counted steps, or the user has set the limit.
    `file`, `line` and `function` are the innermost call in a file of the user, empty if unknown. `positions` say where
    it is in its collectives, and `device` how much it uses its device; both are missing where nothing shows them.
    `has_device`: it has an accelerator open. `moved`: since the stall began it has run Python although it waits for its
    device, or has entered another operation. `sleeps`: it waits for a time.
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
    has_device: bool = False
    moved: bool = False
    sleeps: bool = False

    @property
    def user_line(self) -> Frame | None:
        """The call in a file of the user; None if there is none."""
        return Frame(self.file, self.line, self.function) if self.file else None


def describe_worker(
    rank: int,
    evidence: Evidence | None,
    stack: Stack | None = None,
    share: float = 0.0,
    *,
    late: bool = False,
    main_share: float | None = None,
    wait: Wait | None = None,
) -> Suspect:
    """The record of a worker that runs. For `share` of the stall it used or waited for a processor, and for
    `main_share` its main thread did, None where that is not known."""
    figures = None if evidence is None else evidence.figures
    lost = figures is not None and any(child.state in "TZ" for child in figures.children)
    frame = None if stack is None else stack.user_line
    wait = wait or Wait()
    place = _place(evidence, stack, share if main_share is None else main_share, wait)
    sleeps_on = wait.sleeps is not None and wait.sleeps > OUTSIDE_LIMIT
    return Suspect(
        rank,
        place=place,
        state="" if figures is None else figures.own.state,
        busy=share >= BUSY_SHARE,
        lost_child=lost and stack is not None and stack.in_loader,
        unsent=0 if evidence is None else evidence.traffic.unsent_peers,
        sent_age=None if evidence is None else evidence.traffic.sent_age,
        late=late,
        outside=place is Place.DEVICE or (waits_outside(evidence, stack) and not sleeps_on),
        file="" if frame is None else _printable(frame.file)[-MAX_FILE:],
        line=0 if frame is None else min(frame.line, MAX_LINE),
        function="" if frame is None else _printable(frame.function)[:MAX_FUNCTION],
        has_device=wait.has_device,
        sleeps=figures is not None and classify(figures.own.state, figures.wchan) is Waits.TIME,
    )


class Look(NamedTuple):
    """What one look at a worker showed: the digest of its variables (`stacks.stack`), and its positions."""

    variables: int
    positions: tuple[Position, ...] = ()


def has_moved(first: Look, now: Look, place: Place) -> bool:
    """Whether a worker has done something between two looks at one stall. One that waits for its device in the same
    call runs no Python; the variables of one that looks for something again and again may change and mean nothing."""
    entered = {position.counter: position.entered for position in first.positions}
    if any(position.entered > entered.get(position.counter, position.entered) for position in now.positions):
        return True
    return place is Place.DEVICE and first.variables != 0 and now.variables not in (0, first.variables)


def hold_unproven(suspects: Sequence[Suspect]) -> list[Suspect]:
    """The same workers, of which one that is neither in a collective nor on a device waits outside, if nothing but a
    worker that may compute in one call waits for it: no process has an accelerator open, and no source shows where they
    are in their collectives. One whose state, child or own
    work shows that it hangs is as it was."""
    proven = any(one.place is Place.COLLECTIVE or one.has_device or one.positions for one in suspects)
    if proven or not any(one.place is Place.DEVICE for one in suspects):
        return list(suspects)
    return [replace(one, outside=True) if _may_wait(one) else one for one in suspects]


def _may_wait(one: Suspect) -> bool:
    return one.place is Place.LOCK and one.state == "S" and not (one.busy or one.lost_child)


def _place(evidence: Evidence | None, stack: Stack | None, main_share: float, wait: Wait) -> Place:
    if stack is None or not stack.main:
        return Place.UNKNOWN
    if stack.in_collective:
        return Place.COLLECTIVE
    if stack.in_lock:
        return Place.LOCK
    if stack.holds_lock:
        return Place.ELSEWHERE
    figures = None if evidence is None else evidence.figures
    sleeps = figures is not None and classify(figures.own.state, figures.wchan) is Waits.PEERS
    # One that sleeps in the kernel does not spin, whatever its other threads do.
    runs = figures is None or figures.own.state == "R" or (figures.own.state == "S" and not figures.wchan)
    spins = runs and main_share >= SPIN_SHARE
    return Place.DEVICE if spins or (sleeps and wait.has_device) else Place.ELSEWHERE


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
