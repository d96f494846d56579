"""What the positions of all workers in their collectives say of a stall, as a finding with its sentence. Pure.

Positions are the best evidence of *who* is behind. Whether that is a hang they do not say: a rank that evaluates or
compiles is behind as well. So a worker that is behind while it may compute is still held back (`guilt.is_held_back`);
ranks that have entered different operations never come together, and are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlrover_run.features.hangs.collectives.compare import Lag, LagKind, Operation, common_operation, compare
from dlrover_run.features.hangs.collectives.positions import Position
from dlrover_run.features.hangs.search.codes import GuiltCode
from dlrover_run.features.hangs.search.suspects import Place, Suspect
from dlrover_run.words.reasons import Reason, ReasonCode, Reasons
from dlrover_run.words.text import format_bytes, format_ranks

DEFAULT_GROUP = "default_pg"
"""The name that torch gives to the group of all ranks."""

UNNAMED_OPERATION = "operation"


def first_lag(suspects: Sequence[Suspect]) -> Lag | None:
    """The ranks for which all others wait in the end, by the positions of all workers; None where they name none."""
    lags = compare(_positions(suspects))
    return lags[0] if lags and lags[0].final else None


def same_operation(suspects: Sequence[Suspect]) -> Operation | None:
    """The operation that all workers have entered and in which they wait; None if there is no such one."""
    positions = _positions(suspects)
    return common_operation(positions) if len(positions) == len(suspects) else None


def even_reasons(suspects: Sequence[Suspect]) -> Reasons:
    """That no worker is behind, and the last operation that all of them have launched, of a source that does not say
    which has ended; empty if there is no such one."""
    positions = _positions(suspects)
    if len(positions) < max(2, len(suspects)) or compare(positions):
        return ()
    first, *others = positions.values()
    for one in first:
        same = [any((it.counter, it.entered) == (one.counter, one.entered) for it in other) for other in others]
        if one.peer is None and one.entered and all(same):
            operation = one.operation or UNNAMED_OPERATION
            group = _group_text(one.name)
            return (GuiltCode.NONE_BEHIND(operation=operation, number=one.entered, group=group),)
    return ()


def guilty_ranks(lag: Lag) -> tuple[int, ...]:
    """The ranks of which a lag says that they are wrong: both sides, where nothing says which of them is."""
    return tuple(sorted({*lag.ranks, *lag.waiting})) if lag.is_even else lag.ranks


def lag_code(lag: Lag) -> GuiltCode:
    return {
        LagKind.BEHIND: GuiltCode.NEVER_ENTERED,
        LagKind.SILENT: GuiltCode.SHOWS_NOTHING,
        LagKind.APART: GuiltCode.HEAR_NOTHING if lag.is_even else GuiltCode.HEARS_NOTHING,
        LagKind.ORDER: GuiltCode.EACH_OTHER,
    }.get(lag.kind, GuiltCode.OPERATIONS_DIFFER if lag.is_even else GuiltCode.OTHER_OPERATION)


def lag_reasons(lag: Lag, suspects: Sequence[Suspect]) -> Reasons:
    """The sentence about the ranks of a lag, which continues their names."""
    code = lag_code(lag)
    operation, number = lag.awaited.name or UNNAMED_OPERATION, lag.awaited.number
    shown = {"operation": operation, "number": number, "group": _group(lag), "size": _size(lag.awaited)}
    if lag.kind is LagKind.APART:
        why = code(operation=operation, number=number, group=_group(lag), others=format_ranks(lag.waiting))
    elif code in (GuiltCode.NEVER_ENTERED, GuiltCode.SHOWS_NOTHING):
        why = code(**shown, waiting=lag.waiting_count)
    else:
        own = lag.own or Operation("", 0)
        theirs = {"own": own.name or UNNAMED_OPERATION, "own_number": own.number, "own_size": _size(own)}
        if code is GuiltCode.OTHER_OPERATION:
            why = code(**theirs, **shown, waiting=lag.waiting_count)
        else:
            # Eight parameters at most.
            del shown["size"], theirs["own_size"]
            why = code(**theirs, **shown, waiting=format_ranks(lag.waiting), ranks=format_ranks(lag.ranks))
    return (why, *_what_it_does(lag.ranks, suspects, alone=guilty_ranks(lag) == lag.ranks))


def awaited_reason(lag: Lag) -> Reason:
    """In which operation others wait for the ranks of a lag; it continues why these were named."""
    awaited = lag.awaited
    return GuiltCode.AWAITED(
        operation=awaited.name or UNNAMED_OPERATION,
        number=awaited.number,
        group=_group(lag),
        size=_size(awaited),
        waiting=lag.waiting_count,
    )


def same_operation_reason(operation: Operation) -> Reason:
    """That all ranks wait in this operation."""
    name = operation.name or UNNAMED_OPERATION
    return GuiltCode.SAME_OPERATION(operation=name, number=operation.number, size=_size(operation))


def _positions(suspects: Sequence[Suspect]) -> Mapping[int, Sequence[Position]]:
    return {one.rank: one.positions for one in suspects if one.positions}


def _group(lag: Lag) -> str:
    return _group_text(lag.group_name)


def _group_text(name: str) -> str:
    if name == DEFAULT_GROUP:
        return "the default group"
    return f"group {name}" if name else "their group"


def _size(operation: Operation) -> str:
    return f" ({format_bytes(operation.bytes)})" if operation.bytes else ""


def _what_it_does(ranks: Sequence[int], suspects: Sequence[Suspect], alone: bool) -> Reasons:
    """What the first of these ranks does whose line is known, and where. `alone`: no other rank is named."""
    known = {one.rank: one for one in suspects}
    one = next((known[rank] for rank in ranks if rank in known and known[rank].user_line is not None), None)
    if one is None or one.user_line is None:
        return ()
    who = "it" if len(ranks) == 1 and alone else f"rank {one.rank}"
    return (_doing(one)(who=who), GuiltCode.SPOT(**one.user_line._asdict()))


def _doing(one: Suspect) -> ReasonCode:
    if one.state == "T":
        return GuiltCode.DOES_STOPPED
    if one.state == "D":
        return GuiltCode.DOES_BLOCKED
    if one.lost_child:
        return GuiltCode.DOES_CHILD_LOST
    if one.sleeps:
        return GuiltCode.DOES_SLEEP
    places = {
        Place.LOCK: GuiltCode.DOES_LOCK,
        Place.DEVICE: GuiltCode.DOES_DEVICE,
        Place.COLLECTIVE: GuiltCode.DOES_COLLECTIVE,
    }
    return places.get(one.place, GuiltCode.DOES_SPIN if one.busy else GuiltCode.DOES)
