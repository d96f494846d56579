"""Who of those that wait for a part is told that there is none, when all are given and some may still come back. Pure.

Whoever waits takes over what a dying process held, so that nothing of the tail is left over. But nobody may wait for
one who waits himself: a process may need a part of the next one before it can finish the last.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import TypeVar

Holder = TypeVar("Holder", bound=Hashable)


def dismissed(holders: Collection[Holder], waiting: Sequence[Holder], keeper: Holder | None) -> set[Holder]:
    """Those in `waiting` that are told that all is over; `holders` hold the parts that are open.

    All, when no part is open. None, while one who does not wait holds something. Else all but one, who stays for what
    may come back: the one that is preferred as `keeper`, unless nobody else holds anything.
    """
    if not holders:
        return set(waiting)
    if not set(holders) <= set(waiting):
        return set()
    others = [one for one in waiting if any(holder != one for holder in holders)]
    stays = keeper if keeper in others else next(iter(others), None)
    return {one for one in waiting if one != stays}
