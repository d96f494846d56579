"""Reads where the workers of this node are in their collectives, once they seem to hang."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

from dlrover_run.coordination.records.round import RankAssignment
from dlrover_run.events.records import CollectivesRead, Events
from dlrover_run.features.hangs.collectives.positions import Position
from dlrover_run.features.hangs.collectives.ras_client import RasProblem, read_report
from dlrover_run.features.hangs.collectives.ras_positions import ras_positions
from dlrover_run.features.hangs.collectives.ras_report import parse_report


class CollectiveReader:
    """Reads the evidence of one round. `pids` are those of the workers of this node that run, by rank; `address` is
    that of NCCL RAS, None without one. Each request is an event: there is none while the round trains.

    `report` is the last one of NCCL as it came, empty without an answer."""

    def __init__(
        self, pids: Callable[[], Mapping[int, int]], ranks: RankAssignment, address: str | None, events: Events
    ) -> None:
        self._pids = pids
        self._ranks = ranks
        self._address = address
        self._events = events
        self.report = ""

    async def read(self) -> Mapping[int, tuple[Position, ...]]:
        """The positions now, of each worker for which a source has any. It takes RAS_TIMEOUT if the workers do not
        answer, and no time if nothing listens."""
        self.report = ""
        if self._address is None or self._ranks.world_size < 2:
            return {}
        began, problem, found = time.monotonic(), "", {}
        try:
            self.report = await read_report(self._address)
            communicators = parse_report(self.report)
            found = ras_positions(communicators, self._pids(), self._ranks.world_size, is_local_address)
        except RasProblem as raised:
            problem = str(raised)
        self._events.emit(
            CollectivesRead(
                round=self._ranks.round,
                source="ras",
                workers=len(found),
                seconds=time.monotonic() - began,
                problem=problem,
            )
        )
        return found


def is_local_address(host: str) -> bool:
    """Whether an address is one of this machine: only those can be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except (OSError, UnicodeError):
        return False
    return True
