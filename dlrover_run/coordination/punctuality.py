"""How late the owner of a coordinator is himself, before he concludes anything from the time that has passed.

Pure: times are told, in seconds of one monotonic clock.
"""

from __future__ import annotations

BEAT = 0.25
"""Seconds between two beats by which a coordinator's owner measures his own lateness.

A stop of the process is seen as up to this much shorter than it was, so this is a fraction of `LOST_AFTER`.
"""

TOLERANCE = 0.02
"""Seconds by which a beat may be late without anybody's patience being lengthened: a busy moment of the loop."""


class Punctuality:
    """Measures how late its owner is, who promises to call `late` at `next_beat` at the latest."""

    def __init__(self, now: float) -> None:
        self.next_beat = now + BEAT

    def late(self, now: float) -> float:
        """Seconds for which the owner was stopped or overloaded and that were not yet told; 0 when it is in time.

        To be asked before anything is concluded from the time that has passed.
        """
        late = now - self.next_beat
        if late < 0:
            return 0.0
        self.next_beat = now + BEAT
        return late if late > TOLERANCE else 0.0
