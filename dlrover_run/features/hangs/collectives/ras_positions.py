"""From a report of NCCL RAS to the positions of the workers of this node. Pure.

NCCL numbers the ranks of each communicator from 0 and does not know those of torch. A rank is one of ours by the id of
its process and its node: other jobs may answer at an address that the user has set, and on other nodes the same ids are
used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from dlrover_run.features.hangs.collectives.positions import (
    DEFAULT_GROUP,
    MAX_GROUP,
    MAX_OPERATION,
    MAX_POSITIONS,
    Position,
    Source,
)
from dlrover_run.features.hangs.collectives.rank_sets import pack
from dlrover_run.features.hangs.collectives.ras_report import ALL_KINDS, Communicator, Launched, Place


def ras_positions(
    communicators: Sequence[Communicator],
    ranks_of: Mapping[int, int],
    world_size: int,
    is_here: Callable[[str], bool] = lambda host: True,
) -> dict[int, tuple[Position, ...]]:
    """The positions of the workers of this node. `ranks_of` has the global ranks by process id, for a worker that runs
    its script in a child by the ids of both. `is_here` says whether an address is of this node; it is asked only for
    ids that are those of workers. A worker of which the report has nothing is left out."""
    found: dict[int, list[tuple[bool, int, Position]]] = {}
    of_all = sum(one.size == world_size for one in communicators)
    for one in communicators:
        ours = _our_ranks(one.places, ranks_of, is_here)
        absent = _our_ranks(one.missing, ranks_of, is_here)
        # NCCL knows no names.
        name = DEFAULT_GROUP if one.size == world_size and of_all == 1 else ""
        members = _members(one, ours, absent, world_size)
        for operation, launched in _kinds(one):
            counts = {rank: launched.by_rank[number] for number, rank in ours.items() if number in launched.by_rank}
            counts |= _unlisted(one, launched, ranks_of, is_here)
            for rank, count in counts.items():
                position = Position(
                    one.hash[:MAX_GROUP],
                    Source.RAS,
                    _operation_name(operation),
                    entered=count,
                    number=count,
                    name=name,
                    size=min(one.size, 1_000_000),
                    members=members,
                    furthest=launched.highest,
                    ahead=min(launched.ahead_of(count), 1_000_000),
                )
                found.setdefault(rank, []).append((launched.is_even, -count, position))
    # Groups whose ranks differ first: the others only show that a rank is equally far.
    return {
        rank: tuple(position for _, _, position in sorted(own, key=lambda one: one[:2])[:MAX_POSITIONS])
        for rank, own in sorted(found.items())
    }


def _our_ranks(
    places: Mapping[int, Place], ranks_of: Mapping[int, int], is_here: Callable[[str], bool]
) -> dict[int, int]:
    return {
        number: ranks_of[place.pid] for number, place in places.items() if place.pid in ranks_of and is_here(place.host)
    }


def _kinds(one: Communicator) -> Iterable[tuple[str, Launched]]:
    """The kinds of operations to look at: those of which ranks have launched different numbers, else the one that was
    launched most."""
    uneven = [(kind, launched) for kind, launched in one.launched.items() if not launched.is_even]
    used = [each for each in one.launched.items() if each[1].highest]
    return uneven or sorted(used, key=lambda each: -each[1].highest)[:1]


def _unlisted(
    one: Communicator, launched: Launched, ranks_of: Mapping[int, int], is_here: Callable[[str], bool]
) -> dict[int, int]:
    """The workers that a report in text does not list, if all workers of this node are all ranks of the communicator,
    and those that it does not list have launched the same."""
    ranks = set(ranks_of.values())
    if len(launched.others) != 1 or one.size != len(ranks):
        return {}
    listed = _our_ranks({**one.places, **one.missing}, ranks_of, is_here)
    if len(listed) != len(launched.by_rank) + len(one.missing.keys() - launched.by_rank.keys()):
        return {}
    (count,) = launched.others
    return {rank: count for rank in ranks if rank not in set(listed.values())}


def _members(one: Communicator, ours: Mapping[int, int], absent: Mapping[int, int], world_size: int) -> str:
    """The global ranks of a communicator as far as they are all known."""
    if one.size == world_size:
        return pack(range(world_size))
    known = {*ours.values(), *absent.values()}
    return pack(known) if len(known) == one.size else ""


def _operation_name(name: str) -> str:
    """The name in torch's spelling: all_reduce for AllReduce; empty where a version counts all kinds together."""
    if name == ALL_KINDS:
        return ""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return "".join(letter if letter.isprintable() else "?" for letter in snake)[:MAX_OPERATION]
