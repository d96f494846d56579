"""Whether the wall clock of this node and that of its master agree.

This is told to a person and decides nothing: all waiting goes by the monotonic clock of one process.
"""

from __future__ import annotations

CLOCK_SKEW_LIMIT = 5.0
"""Seconds that two clocks may differ before a person is told. A machine that keeps time is within a tenth of a second,
so none that does is told of; one that does not drifts on. Lines in the logs of two nodes cannot be put in order
any more then, and certificates, cloud tokens and object stores refuse a clock that is minutes off."""


def clock_skew(master_time: float, own_time: float, round_trip: float) -> float | None:
    """Seconds by which this node's clock is ahead of the master's, negative when behind; None when they agree as far as
    can be told.

    Both times are seconds since 1970, the master's read while this node waited for its word. The word took about half
    of the round trip, and the other half is what is not known: a master that is slow to answer makes no clock wrong.
    """
    skew = own_time - (master_time + round_trip / 2)
    return skew if abs(skew) > CLOCK_SKEW_LIMIT + round_trip / 2 else None


def tell_skew(skew: float) -> str:
    """The warning about clocks that do not agree, with the figure and what to do."""
    where = "ahead of" if skew > 0 else "behind"
    return (
        f"the clock of this node is {abs(skew):,.1f} s {where} the master's, so their logs cannot be compared: "
        "let NTP set both (`timedatectl`, `chronyc tracking`)"
    )
