"""From the positions of all ranks to those that the others wait for. Pure: the order of the positions means nothing.

A rank waits in an operation that it has entered and that another rank of the group has not. A rank that has not entered
it may wait in an operation of another group in turn, so the ranks for which all wait in the end are those that have
left an operation out and wait in none: `Lag.final`. In doubt there is no lag.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dlrover_run.features.hangs.collectives.positions import Position, Source
from dlrover_run.features.hangs.collectives.rank_sets import unpack

SAME_SIZE = frozenset({"all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor"})
"""Operations whose data has the same size on all ranks: another size is a mismatch."""


class LagKind(enum.StrEnum):
    """What is wrong with `Lag.ranks`.

    BEHIND: they have not entered the operation. MISMATCH: they have entered another one in its place. ORDER: they wait
    in another group for ranks that wait for them. SILENT: they are in the group, and no source shows where they are.
    APART: they do, but those that wait for them do not, and these are as many or more: a rank that is cut off from the
    others shows nothing of them.
    """

    BEHIND = "behind"
    MISMATCH = "mismatch"
    ORDER = "order"
    SILENT = "silent"
    APART = "apart"


class Operation(NamedTuple):
    """One operation of a group. `name` is empty and `bytes` None if unknown; `number` is that of `Position.counter`."""

    name: str
    number: int
    bytes: int | None = None
    dtype: str = ""


@dataclass(frozen=True)
class Lag:
    """The ranks `waiting` have entered the operation `awaited` of a group, which cannot end before `ranks` enter it.

    `waiting` are those whose positions are known, and `waiting_count` is their number as far as any source shows.
    `own` is the operation in which `ranks` are instead; with `is_even` nothing says which of both sides is wrong.
    `final`: `ranks` do not wait for others in turn.
    """

    kind: LagKind
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    waiting_count: int
    source: Source
    group: str
    group_name: str
    awaited: Operation
    own: Operation | None = None
    is_even: bool = False
    final: bool = False


Table = Mapping[int, Position]
"""The positions of one counter, by rank."""


def compare(positions: Mapping[int, Iterable[Position]]) -> tuple[Lag, ...]:
    """The ranks that others wait for, by the positions of each rank: the final ones first, and of these the one for
    which most ranks wait in the end. Empty where all ranks are equally far."""
    tables: dict[tuple[str, str, str], dict[int, Position]] = defaultdict(dict)
    pairs: dict[int, dict[int, Position]] = defaultdict(dict)
    for rank, own in sorted(positions.items()):
        for position in own:
            if position.peer is None:
                tables[position.counter][rank] = position
            else:
                pairs[rank][position.peer] = position
    lags = [lag for table in tables.values() if (lag := _behind(table)) is not None]
    lags = _mismatches_of_kinds(lags, tables)
    lags += [lag for table in tables.values() for lag in _mismatches(table)]
    lags += _point_to_point(pairs)
    lags += _silent(tables, {lag.group for lag in lags})
    return _ordered(lags)


def common_operation(positions: Mapping[int, Iterable[Position]]) -> Operation | None:
    """The operation in which all ranks wait, each of which has entered it; None if there is no such one."""
    found = {
        (position.counter, position.number): Operation(
            position.operation, position.number, position.bytes, position.dtype
        )
        for own in positions.values()
        for position in own
    }
    for key, operation in found.items():
        if all(any((one.counter, one.number) == key and one.waits for one in own) for own in positions.values()):
            return operation
    return None


def _behind(table: Table) -> Lag | None:
    """The ranks that have not entered the first operation in which others wait."""
    least = min(position.entered for position in table.values())
    furthest = max(max(position.entered, position.furthest) for position in table.values())
    if least == furthest:
        return None
    first = {
        rank: max(least, position.completed or 0) + 1
        for rank, position in table.items()
        if position.entered > max(least, position.completed or 0)
    }
    number = min(first.values(), default=least + 1)
    ranks = tuple(rank for rank, position in table.items() if position.entered < number)
    waiting = tuple(rank for rank, awaited in first.items() if awaited == number)
    count = max(len(waiting), *(table[rank].ahead for rank in ranks), 0) if ranks else 0
    if not ranks or not count:
        return None
    return _lag(LagKind.BEHIND, table, ranks, waiting, number, count)


def _lag(
    kind: LagKind, table: Table, ranks: tuple[int, ...], waiting: tuple[int, ...], number: int, count: int = 0
) -> Lag:
    any_position = next(iter(table.values()))
    known = [table[rank] for rank in waiting if rank in table and table[rank].number == number]
    if known:
        awaited = _operation(known[0])
    else:
        # RAS counts one kind of operation; of the numbers of a recorder only those that ranks are in have a name.
        awaited = Operation(any_position.operation if any_position.source is Source.RAS else "", number)
    name = next((position.name for position in table.values() if position.name), "")
    return Lag(kind, ranks, waiting, max(count, len(waiting)), any_position.source, any_position.group, name, awaited)


def _operation(position: Position) -> Operation:
    return Operation(position.operation, position.number, position.bytes, position.dtype)


def _mismatches(table: Table) -> list[Lag]:
    """The ranks that are in another operation than the others, or in one of another size, at the same number."""
    sides: dict[int, dict[tuple[str, int | None], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, position in table.items():
        if position.waits:
            size = position.bytes if position.operation in SAME_SIZE else None
            sides[position.number][position.operation, size].append(rank)
    found = []
    for number, kinds in sorted(sides.items()):
        if len(kinds) < 2:
            continue
        *_, most = sorted(kinds.values(), key=lambda ranks: (len(ranks), -ranks[0]))
        fewest = min(kinds.values(), key=lambda ranks: (len(ranks), -ranks[0]))
        lag = _lag(LagKind.MISMATCH, table, tuple(fewest), tuple(most), number)
        found.append(replace(lag, own=_operation(table[fewest[0]]), is_even=len(fewest) == len(most)))
    return found


def _mismatches_of_kinds(lags: Sequence[Lag], tables: Mapping[tuple[str, str, str], Table]) -> list[Lag]:
    """The lags of sources that count each kind of operation by itself, where a rank that is behind in one kind is
    ahead in another one: it has entered that one instead."""
    found: list[Lag] = []
    swapped: set[tuple[str, str]] = set()
    for lag in lags:
        if lag.source is Source.RAS and (own := _instead(lag, tables)) is not None:
            if (lag.group, lag.awaited.name) in swapped:
                continue  # The same mismatch, seen from its other side.
            swapped.add((lag.group, own.name))
            if len(lag.ranks) > lag.waiting_count:
                ranks, waiting, awaited, own = lag.waiting, lag.ranks, own, lag.awaited
            else:
                ranks, waiting, awaited = lag.ranks, lag.waiting, lag.awaited
            even = len(ranks) == len(waiting) == lag.waiting_count
            lag = replace(
                lag,
                kind=LagKind.MISMATCH,
                ranks=ranks,
                waiting=waiting,
                waiting_count=max(len(waiting), lag.waiting_count if waiting == lag.waiting else 0),
                awaited=awaited,
                own=own,
                is_even=even,
            )
        found.append(lag)
    return found


def _instead(lag: Lag, tables: Mapping[tuple[str, str, str], Table]) -> Operation | None:
    for (source, group, kind), table in tables.items():
        if (source, group) != (lag.source, lag.group) or kind == lag.awaited.name or not lag.waiting:
            continue
        if not all(rank in table for rank in (*lag.ranks, *lag.waiting)):
            continue
        here = min(table[rank].entered for rank in lag.ranks)
        if here > max(table[rank].entered for rank in lag.waiting):
            return Operation(kind, here)
    return None


def _point_to_point(pairs: Mapping[int, Mapping[int, Position]]) -> list[Lag]:
    """The ranks to or from which others send or receive, and which do not do their part. `pairs` are the positions of
    each rank by the other one. Numbers are those of a group, so that they can be compared in a group of two."""
    waiting: dict[int, dict[int, Position]] = defaultdict(dict)
    found = []
    for rank, others in pairs.items():
        for peer, position in others.items():
            other = pairs.get(peer, {}).get(rank)
            comparable = position.size == 2
            done = other is not None and comparable and (other.completed or 0) >= position.number
            if done or not position.waits:
                continue
            if other is None or not other.waits or (comparable and other.entered < position.number):
                waiting[peer][rank] = position
            elif comparable and _same(other, position) and rank < peer:
                lag = _lag(LagKind.MISMATCH, {rank: position, peer: other}, (peer,), (rank,), position.number)
                found.append(replace(lag, own=_operation(other), is_even=True))
    for peer, table in waiting.items():
        number = min(position.number for position in table.values())
        found.append(_lag(LagKind.BEHIND, table, (peer,), tuple(table), number))
    return found


def _same(one: Position, other: Position) -> bool:
    return (one.operation, one.number) == (other.operation, other.number)


def _silent(tables: Mapping[tuple[str, str, str], Table], explained: set[str]) -> list[Lag]:
    """The ranks of a group of which nothing is known, where all others of it are equally far and may wait."""
    heard: dict[str, set[int]] = defaultdict(set)
    for (_, group, _), table in tables.items():
        heard[group].update(table)
    shown = frozenset().union(*heard.values())
    found: dict[str, Lag] = {}
    for (_, group, _), table in tables.items():
        members = frozenset().union(*(unpack(text) for text in {position.members for position in table.values()}))
        missing = tuple(sorted(members - heard[group]))
        waits = all(position.waits is not False for position in table.values())
        if not missing or not waits or group in explained:
            continue
        number = max(position.number for position in table.values())
        lag = _lag(LagKind.SILENT, table, missing, tuple(table), number)
        # A recorder knows nothing of a rank that has not entered any operation of a group.
        if lag.source is Source.RAS and shown.isdisjoint(missing) and len(missing) >= len(heard[group]):
            even = len(missing) == len(heard[group])
            operation = lag.awaited
            lag = _lag(LagKind.APART, table, tuple(sorted(heard[group])), missing, number)
            lag = replace(lag, awaited=operation, is_even=even)
        if group in found:
            # Several kinds are counted, and which of them comes last is not.
            lag = replace(lag, awaited=Operation("", 0))
        found[group] = lag
    return list(found.values())


def _ordered(lags: Sequence[Lag]) -> tuple[Lag, ...]:
    """The lags with `final` set, in the order of `compare`."""
    waits_in: dict[int, list[int]] = defaultdict(list)
    for number, lag in enumerate(lags):
        for rank in lag.waiting:
            waits_in[rank].append(number)
    final: dict[int, Lag] = {}
    after: dict[int, set[int]] = {}
    """For each lag that is not final: those in which its ranks wait."""
    for number, lag in enumerate(lags):
        # Both sides of a mismatch wait for each other.
        free = tuple(rank for rank in lag.ranks if not waits_in[rank])
        if lag.kind is LagKind.MISMATCH:
            final[number] = replace(lag, final=True)
        elif free:
            final[number] = replace(lag, ranks=free, final=True)
        else:
            after[number] = {other for rank in lag.ranks for other in waits_in[rank] if other != number}
    before: dict[int, set[int]] = defaultdict(set)
    for number, others in after.items():
        for other in others:
            before[other].add(number)
    leads_to = {number: _reached(number, before) for number in final}
    resolved = set(final).union(*leads_to.values())
    for number in sorted(after.keys() - resolved):
        # No lag at the end of these waits is final: the ranks wait for each other.
        theirs = lags[min(after[number], default=number)].awaited
        leads_to[number] = _reached(number, before)
        final[number] = replace(lags[number], kind=LagKind.ORDER, own=theirs, is_even=True, final=True)

    def weight(number: int) -> tuple[int, bool, int]:
        behind = set(lags[number].waiting).union(*(lags[other].waiting for other in leads_to[number]))
        # Of two sources for the same lag the recorder knows the sizes too.
        return (-max(len(behind), lags[number].waiting_count), lags[number].source is Source.RAS, number)

    rest = [lags[number] for number in sorted(after.keys() - final.keys())]
    return (*(final[number] for number in sorted(final, key=weight)), *rest)


def _reached(number: int, before: Mapping[int, set[int]]) -> set[int]:
    """The lags whose ranks wait, at once or in the end, for those of this one."""
    found: set[int] = set()
    left = [number]
    while left:
        for other in before.get(left.pop(), ()):
            if other not in found:
                found.add(other)
                left.append(other)
    return found
