"""How long a job that has failed is still shown to Prometheus: for two scrapes, if anything scrapes this master. Pure.

Prometheus sees only the state at a scrape, and a master ends with its last job: without this no rule could know that a
job has failed. Nothing waits where the page is not scraped, and what waits is the master alone, with its endpoint
closed."""

from __future__ import annotations

from collections import deque

SCRAPES = 2
"""Scrapes after a failure. One is enough for the rule; another is for a scrape that fails, or a second Prometheus."""

MAX_LINGER = 150.0
"""Seconds for which a job that has failed is shown at most: two scrapes each minute, the interval of Prometheus without
a setting, and some time for the second one."""


GAPS = 4
"""Gaps between scrapes of which the longest counts: two Prometheus servers scrape in turn, at unequal gaps."""


class ScrapeTimes:
    """The times of the scrapes of one master, on a monotonic clock."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._gaps: deque[float] = deque(maxlen=GAPS)

    def note(self, now: float) -> None:
        """Metrics are asked for."""
        if self._last is not None:
            self._gaps.append(now - self._last)
        self._last = now

    def linger(self, now: float) -> float:
        """Seconds for which a job that fails now is shown; 0 where nothing has scraped lately, or only once."""
        if self._last is None or not self._gaps:
            return 0.0
        wait = min(SCRAPES * max(self._gaps) + 1.0, MAX_LINGER)
        # What has not scraped for as long is gone.
        return wait if now - self._last <= wait else 0.0
