"""Reads where the workers of this node are in their collectives, once they seem to hang."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlrover_run.coordination.records.round import RankAssignment
from dlrover_run.events.records import CollectivesRead, Events
from dlrover_run.features.hangs.collectives.positions import MAX_POSITIONS, Position
from dlrover_run.features.hangs.collectives.ras_client import RasProblem, read_report
from dlrover_run.features.hangs.collectives.ras_positions import ras_positions
from dlrover_run.features.hangs.collectives.ras_report import parse_report
from dlrover_run.features.hangs.collectives.recorder import recorder_positions
from dlrover_run.features.hangs.collectives.recorder_files import RecorderFiles
from dlrover_run.processes.tree import below


@dataclass(frozen=True)
class Evidence:
    """What was said of one incident: the positions by rank, the report of NCCL as it came, empty without one, and the
    dumps of the flight recorder by rank."""

    positions: Mapping[int, tuple[Position, ...]] = field(default_factory=dict)
    ras_report: str = ""
    dumps: Mapping[int, dict[str, Any]] = field(default_factory=dict)


MAX_PROCESSES = 1000
"""Processes of one worker that are looked for in a report."""


class CollectiveReader:
    """Reads the evidence of one round. `pids` are those of the workers of this node that run, by rank; `address` is
    that of NCCL RAS, and `recorder` has their dumps, each None without one. Each request is an event: there is none
    while the round trains.

    `latest` is what was read last."""

    def __init__(
        self,
        pids: Callable[[], Mapping[int, int]],
        ranks: RankAssignment,
        address: str | None,
        events: Events,
        recorder: RecorderFiles | None = None,
    ) -> None:
        self._pids = pids
        self._ranks = ranks
        self._address = address
        self._events = events
        self._recorder = recorder
        self.latest = Evidence()

    async def read(self) -> Mapping[int, tuple[Position, ...]]:
        """The positions now, of each worker for which a source has any. It takes RAS_TIMEOUT if the workers do not
        answer, and no time if nothing listens."""
        self.latest = Evidence()
        if self._ranks.world_size < 2:
            return {}
        (report, by_ras), (dumps, by_recorder) = await asyncio.gather(self._ask_ras(), self._ask_recorder())
        positions = {
            rank: merged(by_recorder.get(rank, ()), by_ras.get(rank, ()))
            for rank in sorted(by_ras.keys() | by_recorder.keys())
        }
        self.latest = Evidence(positions, report, dumps)
        return positions

    async def _ask_ras(self) -> tuple[str, Mapping[int, tuple[Position, ...]]]:
        if self._address is None:
            return "", {}
        began, problem, report = time.monotonic(), "", ""
        found: Mapping[int, tuple[Position, ...]] = {}
        try:
            report = await read_report(self._address)
            # A worker may run its script in a child: `--no-python bash train.sh`.
            ranks_of = {one: rank for rank, pid in self._pids().items() for one in below(pid, MAX_PROCESSES)}
            found = ras_positions(parse_report(report), ranks_of, self._ranks.world_size, is_local_address)
        except RasProblem as raised:
            problem = str(raised)
        self._note("ras", began, len(found), problem)
        # That of another job is no evidence of this one.
        return report if found else "", found

    async def _ask_recorder(self) -> tuple[Mapping[int, dict[str, Any]], Mapping[int, tuple[Position, ...]]]:
        if self._recorder is None:
            return {}, {}
        began = time.monotonic()
        dumps = await self._recorder.read(self._pids())
        found = {rank: recorder_positions(dump, rank) for rank, dump in dumps.items()}
        self._note("flight_recorder", began, len(dumps), "" if dumps else "no worker has written a dump")
        return dumps, {rank: own for rank, own in found.items() if own}

    def _note(self, source: str, began: float, workers: int, problem: str) -> None:
        seconds = time.monotonic() - began
        self._events.emit(
            CollectivesRead(round=self._ranks.round, source=source, workers=workers, seconds=seconds, problem=problem)
        )


def merged(first: Sequence[Position], second: Sequence[Position]) -> tuple[Position, ...]:
    """The positions of one worker from two sources, half of those that are kept from each: other nodes may have one of
    the sources only."""
    half = MAX_POSITIONS // 2
    own, other = first[: max(half, MAX_POSITIONS - len(second))], second[: max(half, MAX_POSITIONS - len(first))]
    return (*own, *other)


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
