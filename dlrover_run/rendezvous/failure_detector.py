"""How late the owner of a coordinator is himself, before he concludes anything from the time that has passed.

Pure: times are told, in seconds of one monotonic clock.


Who has been silent for too long, judged by one who first asks how late he was himself.

Pure: times are told, in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

STALL_CHECK_INTERVAL = 0.25
"""Seconds between two beats by which a coordinator's owner measures his own lateness.

A stop of the process is seen as up to this much shorter than it was, so this is a fraction of `LOST_AFTER`.
"""

TOLERANCE = 0.02
"""Seconds by which a beat may be late without anybody's patience being lengthened: a busy moment of the loop."""


class StallMonitor:
    """Measures how late its owner is, who promises to call `late` at `next_beat` at the latest."""

    def __init__(self, now: float) -> None:
        self.next_beat = now + STALL_CHECK_INTERVAL

    def late(self, now: float) -> float:
        """Seconds for which the owner was stopped or overloaded and that were not yet told; 0 when it is in time.

        To be asked before anything is concluded from the time that has passed.
        """
        late = now - self.next_beat
        if late < 0:
            return 0.0
        self.next_beat = now + STALL_CHECK_INTERVAL
        return late if late > TOLERANCE else 0.0


LOOK_MARGIN = 0.001
"""Seconds after the limit at which to look, so that rounding never makes a look too early and the next one due at
once."""

Who = TypeVar("Who", bound=Hashable)


class FailureDetector(Generic[Who]):
    """Remembers when each of several was last heard."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._excused = 0.0
        # In the order of their times, for whoever is heard moves to the end. Excused time does not pass.
        self._heard: dict[Who, float] = {}

    def heard(self, who: Who, now: float) -> None:
        """A sign of life."""
        self._heard.pop(who, None)
        self._heard[who] = now - self._excused

    def forget(self, who: Who) -> None:
        """Nobody expects a sign of life any more."""
        self._heard.pop(who, None)

    def excuse(self, late: float) -> None:
        """That many seconds were the listener's own, and are added to his patience with everybody."""
        self._excused += late

    def over_limit(self, now: float) -> list[Who]:
        """Who has been silent for longer than the limit; the longest silence comes first."""
        found = []
        for who, heard in self._heard.items():
            if now - self._excused - heard <= self._limit:
                break
            found.append(who)
        return found

    def next_look(self) -> float | None:
        """The time from which on somebody may be over the limit; None when nobody is expected."""
        first = next(iter(self._heard.values()), None)
        return None if first is None else first + self._excused + self._limit + LOOK_MARGIN
