"""Decides for which workers the others of a round wait, from the shares of their time. Pure.

All workers of a data-parallel job make the same number of steps, because a collective waits for the slowest of them. So
a straggler is a worker that waits for the others much less than they wait. What it does in that time, more than they
do, is the cause. Workers that wait for an accelerator by spinning look as if they computed: then no rank is named.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Literal, cast

import msgspec

from dlrover_run.coordination.records.bounds import Total
from dlrover_run.features.hangs.stragglers.shares import Ratio, Shares
from dlrover_run.features.hangs.stragglers.text import StragglerCode
from dlrover_run.words.reasons import Reasons, render

FOUND_GAP = 0.3
"""A worker is a straggler if it waits for the others less than they do by this share of the time."""

GONE_GAP = 0.15
"""It is one no more below this gap: a worker near the limit is not named again and again."""

FOUND_SENDING, GONE_SENDING = 0.5, 0.3
"""The same limits for the share in which only its data are on their way."""

OTHERS_SENDING = 0.15
"""A larger share of the others: all of them send, and the network is no worse for one."""


MAX_STRAGGLERS = 8
"""Stragglers that are named: those that wait least."""

WAITED = ("computing", "processor", "data", "disk", "time")
"""The shares that explain why a worker does not wait for the others."""

NETWORK = "network"

CAUSES = (*WAITED, NETWORK)
"""Every cause: the name of a StragglerCode in lower case."""

Cause = Literal["computing", "processor", "data", "disk", "time", "network"]


class Straggler(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker for which the others wait, and the share of the time in which it has its cause. It waits for the others
    for the share `own`, they wait for `others`."""

    rank: Total
    cause: Cause
    share: Ratio
    own: Ratio
    others: Ratio

    @property
    def reasons(self) -> Reasons:
        """Why it is one."""
        why = StragglerCode[self.cause.upper()](share=100 * self.share)
        return (why, StragglerCode.WAITS(own=100 * self.own, others=100 * self.others))

    @property
    def text(self) -> str:
        """The line that names it."""
        return f"rank {self.rank} is a straggler: {render(self.reasons)}"


def find_stragglers(workers: Sequence[Shares], known: Collection[int] = ()) -> tuple[Straggler, ...]:
    """The stragglers among all workers of a round, by their ranks; `known` are the ranks that were stragglers before.
    They are fewer than half of the workers, or one of two: otherwise nothing shows what is usual."""
    if len(workers) < 2:
        return ()
    peers, sending = (sorted(getattr(one, name) for one in workers) for name in ("peers", "sending"))

    def waits_less(one: Shares) -> bool:
        gap = GONE_GAP if one.rank in known else FOUND_GAP
        return _others(peers, one.peers) - one.peers >= gap

    def sends_alone(one: Shares) -> bool:
        share = GONE_SENDING if one.rank in known else FOUND_SENDING
        others_send, others_wait = _others(sending, one.sending), _others(peers, one.peers)
        return one.sending >= share and others_send <= OTHERS_SENDING and others_wait >= FOUND_GAP

    if slow := _minority(workers, waits_less):
        found = [(one, _cause(one, workers)) for one in slow]
    else:
        found = [(one, NETWORK) for one in _minority(workers, sends_alone)]
    return tuple(
        Straggler(
            one.rank,
            cast("Cause", cause),
            one.sending if cause == NETWORK else getattr(one, cause),
            one.peers,
            _others(peers, one.peers),
        )
        for one, cause in sorted(found, key=lambda each: each[0].rank)
    )


def _minority(workers: Sequence[Shares], slow: Callable[[Shares], bool]) -> list[Shares]:
    """The workers that are slow, unless they are too many."""
    found = [one for one in workers if slow(one)]
    if len(found) > 1 and 2 * len(found) >= len(workers):
        return []
    return sorted(found, key=lambda one: (one.peers, one.rank))[:MAX_STRAGGLERS]


def _others(ordered: Sequence[float], own: float) -> float:
    """The median of the figures of the others, the lower one of two. `ordered` are those of all workers."""
    middle = (len(ordered) - 2) // 2
    return ordered[middle if middle < bisect_left(ordered, own) else middle + 1]


def _cause(straggler: Shares, workers: Sequence[Shares]) -> str:
    """What the straggler does for longer than the others."""

    def excess(name: str) -> float:
        others = sorted(getattr(one, name) for one in workers if one is not straggler)
        usual = others[(len(others) - 1) // 2]
        return float(getattr(straggler, name) - usual)

    return max(WAITED, key=excess)
