"""Who has which node rank in the next round."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dlrover_run.coordination.presence import Presence
from dlrover_run.coordination.records import Member


def seat_nodes(before: Sequence[Member], living: Sequence[Presence], size: int) -> list[Presence]:
    """`size` of the `living` nodes in the order of their ranks in the next round; `before` is the last one.

    Whoever was in the last round comes before newcomers, and keeps his rank where the round has one of that number.
    Only for a rank that he wishes, and that nobody had, does he leave it: so he returns from a round that was too small
    for it, and a newcomer can have the rank of the node that it replaces. The ranks that are left go to newcomers who
    wish one of them, then by the natural order of host and address, in which node2 comes before node10. Newcomers take
    part in the order of their arrival; who is left over is a spare.
    """
    old = {member.key: rank for rank, member in enumerate(before)}
    survivors = sorted((p for p in living if p.status.key in old), key=lambda p: old[p.status.key])
    newcomers = sorted((p for p in living if p.status.key not in old), key=lambda p: (p.arrived, p.status.key))
    chosen = [*survivors, *newcomers][:size]
    seats: dict[int, Presence] = {}

    def seat(nodes: list[Presence], wishes: list[int | None]) -> list[Presence]:
        unseated = []
        for node, wish in zip(nodes, wishes, strict=True):
            if wish is not None and wish < size and wish not in seats:
                seats[wish] = node
            else:
                unseated.append(node)
        return unseated

    stayed, new = chosen[: len(survivors)], chosen[len(survivors) :]
    had = {old[node.status.key] for node in stayed}
    others = seat(stayed, [None if node.status.rank_wish in had else node.status.rank_wish for node in stayed])
    others = seat(others, [old[node.status.key] for node in others])
    others += seat(new, [node.status.rank_wish for node in new])
    free = [rank for rank in range(size) if rank not in seats]
    seats.update(zip(free, sorted(others, key=_place), strict=True))
    return [seats[rank] for rank in range(size)]


def _place(node: Presence) -> tuple[list[tuple[int, str]], list[tuple[int, str]], float, tuple[str, str]]:
    return natural_order(node.status.host), natural_order(node.status.address), node.arrived, node.status.key


def natural_order(text: str) -> list[tuple[int, str]]:
    """A sort key in which numbers inside a text count as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", text) if part]
