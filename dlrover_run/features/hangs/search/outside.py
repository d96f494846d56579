"""Workers that wait for an answer from outside of the job: a server, a child, or a time that the script names. Pure.

Evaluations by another model, uploads and downloads are rare and take longer than any pause between steps, and nothing
shows how long. So a worker that waits for one of them is named only after OUTSIDE_LIMIT, whatever the rhythm of its
steps is, and nothing is done to it earlier. One that waits for a lock, a dead child or a peer is not meant.
"""

from __future__ import annotations

import re

from dlrover_run.observe.records import Evidence
from dlrover_run.observe.waits import Waits, classify
from dlrover_run.stacks.stack import Stack

OUTSIDE_LIMIT = 75.0
"""Seconds without progress after which a worker that waits for something outside is named, at least: more than a
minute, which is the time-out of many clients."""

OUTSIDE_FACTOR = 3.0
"""It is this many times the longest such wait of the job, if that is more."""

# Calls below the user's line that wait for another process or machine, also where a thread of theirs does it.
_CLIENTS = re.compile(
    r"/(?:subprocess|socket|ssl|selectors)\.py:|/(?:http|urllib|asyncio|multiprocessing)/"
    r"|/site-packages/(?:requests|urllib3|httpx|httpcore|aiohttp|grpc|botocore|boto3|fsspec|anyio|trio|websockets)/"
)
# The innermost call of a thread that reads the answer of a server; one that serves waits in a selector.
_READS = re.compile(r"/socket\.py:\d+:readinto$|/ssl\.py:\d+:(?:read|recv|recv_into)$|/subprocess\.py:")


class LearnedPauses:
    """What the rounds of a job leave to the next one: the pauses of the last round, and the longest wait outside."""

    def __init__(self) -> None:
        self.rhythm: tuple[float, ...] = ()
        self._longest = 0.0
        self._since: float | None = None

    @property
    def outside_limit(self) -> float:
        """The seconds after which a worker that waits outside is named."""
        return max(OUTSIDE_LIMIT, OUTSIDE_FACTOR * self._longest)

    @property
    def has_wait(self) -> bool:
        """Whether a worker waits outside of which the end is not known yet."""
        return self._since is not None

    def begin_wait(self, since: float) -> None:
        """A worker has waited outside since this time, and was not named for it."""
        self._since = since

    def end_wait(self, at: float) -> None:
        """Such a wait is over, and has shown how long they may be; also that of a worker that is named for it now, so
        that the next wait may be longer. Nothing follows if there was none."""
        if self._since is not None:
            self._longest = max(self._longest, at - self._since)
            self._since = None

    def forget_wait(self) -> None:
        """The round ends, and says nothing about how long the wait would have been."""
        self._since = None


def waits_outside(evidence: Evidence | None, stack: Stack | None) -> bool:
    """Whether the main thread of a worker waits for a time, a living child, or a connection without lost data."""
    figures = None if evidence is None else evidence.figures
    if evidence is None or figures is None or figures.own.state != "S" or (stack is not None and stack.in_collective):
        return False
    lost = any(child.state in "TZ" for child in figures.children)
    waits = classify("S", figures.wchan)
    if waits is Waits.TIME:
        return True
    if lost or evidence.traffic.unsent_peers:
        return False
    if waits is Waits.DATA:
        return True
    return stack is not None and (stack.is_below(_CLIENTS) or (stack.in_lock and _thread_reads(stack)))


def _thread_reads(stack: Stack) -> bool:
    return any(thread.frames and _READS.search(str(thread.frames[0])) for thread in stack.threads[:-1])
