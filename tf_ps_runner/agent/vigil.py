"""When a server is ready, and when it counts as silent: what follows from its answers. Pure.

A server that hangs, or is stopped, gives no error to those that wait for it: nobody but its agent finds out.
"""

from __future__ import annotations

import enum

from dlrover_run.rendezvous.failure_detector import STALL_CHECK_INTERVAL

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

SILENCE = 6.0
"""Seconds for which we must have listened in vain, beside the misses, before a server is silent. Those in which we were
stopped or starved ourselves do not count: the answer may have been there, and was not taken."""


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
        self._listened = 0.0

    def answer(self) -> None:
        """It has answered in time."""
        self._misses, self._listened = 0, 0.0
        if self.verdict is Verdict.AWAITED:
            self.verdict = Verdict.READY

    def miss(self, took: float, late: float) -> None:
        """It did not answer for `took` seconds, in which we were `late` seconds late ourselves."""
        # A stop is seen as up to a beat shorter than it was.
        self._note_miss(max(0.0, took - late - STALL_CHECK_INTERVAL) if late else took)

    def fail(self) -> None:
        """It could not be reached: that is sure, however late we were."""
        self._note_miss(ANSWER_TIMEOUT)

    def _note_miss(self, listened: float) -> None:
        if self.verdict is Verdict.AWAITED:
            # It is still starting, and how long that may take is not decided here.
            self._attempts += 1
            return
        self._misses += 1
        self._listened += listened
        if self._misses >= MISSES and self._listened >= SILENCE:
            self.verdict = Verdict.SILENT

    def pause(self, took: float) -> float:
        """Seconds until the next question, when the last one took that many."""
        if self.verdict is Verdict.AWAITED:
            return min(TRY_MOST, TRY_FIRST * 1.5 ** min(self._attempts, 16))
        return max(0.0, ASK_INTERVAL - took)
