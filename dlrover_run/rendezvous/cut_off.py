"""Decides whether this node is cut off from the others, so that it ends and its scheduler can replace it.

A coordinator that cannot be reached may be the one that has failed, and then training goes on. So a node is cut off
only if other nodes of its job cannot be reached either.
"""

from __future__ import annotations

from dlrover_run.rendezvous.failure_detector import FailureDetector
from dlrover_run.rendezvous.reach import Reach, probe

PROBE_INTERVAL = 5.0
"""Seconds between two probes of the other nodes while the coordinator is unreachable; at most a third of
`cut_off_timeout`."""

PROBE_TIMEOUT = 3.0
"""Seconds for the answer of one node: TCP repeats its first packet after one second."""

_OTHERS = "others"


class CutOffDetector:
    """Declares this node cut off when neither the coordinator nor another node has answered for `timeout` seconds, 0
    for never. Pure: times of one monotonic clock are passed in. Time for which this process was stalled is excluded."""

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._detector: FailureDetector[str] = FailureDetector(timeout)
        self._detector.heartbeat(_OTHERS, now)

    @property
    def interval(self) -> float:
        """Seconds between two probes of the others. A client that has no coordinator asks before each wait."""
        return min(PROBE_INTERVAL, self._timeout / 3)

    def note_answer(self, now: float) -> None:
        self._detector.heartbeat(_OTHERS, now)

    def is_cut_off(self, now: float, due: float) -> bool:
        """Whether this node is cut off; `due` is when this check was due."""
        return self._timeout > 0 and bool(self._detector.failed_peers(now, due))


async def reaches(host: str, port: int) -> bool:
    """Whether the machine at that address answers: it accepts a connection, or refuses it because no process listens.

    Nothing is sent. No answer within PROBE_TIMEOUT, or no route, means no.
    """
    return await probe(host, port, PROBE_TIMEOUT) is not Reach.SILENT
