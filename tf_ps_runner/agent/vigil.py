"""When a server is ready, and when it counts as silent: what follows from its answers. Pure.

A server that hangs, or is stopped, gives no error to those that wait for it: nobody but its agent finds out.
"""

from __future__ import annotations

import enum

TRY_FIRST = 0.05
"""Seconds between the first two attempts to reach a server that has just been started."""

TRY_MOST = 0.5
"""Seconds that no pause between two such attempts is longer than; so much later it may be found ready."""

ASK_INTERVAL = 2.0
"""Seconds from one question to the next, once a server has answered."""

ANSWER_TIMEOUT = 2.5
"""Seconds that an answer may take, which takes 3 ms. After that it counts as a miss."""

MISSES = 3
"""Misses in a row after which a server is silent: one may be a moment in which the machine had no time for it."""

LATENESS = 0.5
"""Seconds by which we may ourselves be late during a question that goes unanswered. By more, and it is no miss: the
answer may be there, and we were stopped or starved."""


class Verdict(enum.Enum):
    """What is known of a server: it has not answered yet, it is READY, or it lives and is SILENT, which is final."""

    AWAITED = "awaited"
    READY = "ready"
    SILENT = "silent"


class Vigil:
    """What one server has answered."""

    def __init__(self) -> None:
        self.verdict = Verdict.AWAITED
        self._attempts = 0
        self._misses = 0

    def answer(self) -> None:
        """It has answered in time."""
        self._misses = 0
        if self.verdict is Verdict.AWAITED:
            self.verdict = Verdict.READY

    def miss(self, late: float) -> None:
        """It could not be reached, or did not answer, while we were `late` seconds late ourselves."""
        if self.verdict is Verdict.AWAITED:
            # It is still starting, and how long that may take is not decided here.
            self._attempts += 1
        elif late <= LATENESS:
            self._misses += 1
            if self._misses >= MISSES:
                self.verdict = Verdict.SILENT

    def pause(self, took: float) -> float:
        """Seconds until the next question, when the last one took that many."""
        if self.verdict is Verdict.AWAITED:
            return min(TRY_MOST, TRY_FIRST * 1.5 ** min(self._attempts, 16))
        return max(0.0, ASK_INTERVAL - took)
