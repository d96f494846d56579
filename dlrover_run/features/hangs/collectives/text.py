"""Positions in collectives, as people read them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dlrover_run.features.hangs.collectives.positions import DEFAULT_GROUP, Position, Source
from dlrover_run.words.text import format_bytes

Names = Callable[[tuple[int, ...]], str]


def position_lines(positions: Mapping[int, Sequence[Position]], names: Names) -> list[str]:
    """One line for each worker and group: where it is. Ranks that are in the same place share a line. NCCL RAS shows no
    more than the flight recorder does, where both are known."""
    places: dict[str, list[int]] = {}
    for rank, own in sorted(positions.items()):
        by_recorder = [position for position in own if position.source is Source.FLIGHT_RECORDER]
        for position in by_recorder or own:
            places.setdefault(describe_position(position), []).append(rank)
    return [f"{names(tuple(ranks))}: {place}" for place, ranks in places.items()]


def describe_position(position: Position) -> str:
    """Where a worker is in one group."""
    size = f" ({format_bytes(position.bytes)})" if position.bytes else ""
    peer = "" if position.peer is None else f" with rank {position.peer}"
    where = f"{position.operation or 'operation'} {position.number:,}{peer} of {_group(position)}{size}"
    if position.completed is None:
        behind = f", {position.ahead} of {position.size} ranks have launched more" if position.ahead else ""
        return f"has launched {where}{behind}"
    ended = f"ended {position.completed:,}"
    return f"waits in {where}: entered {position.entered:,}, {ended}" if position.waits else f"has {ended}: {where}"


def _group(position: Position) -> str:
    if position.name == DEFAULT_GROUP:
        return "the default group"
    return f"group {position.name}" if position.name else f"a group of {position.size}"
