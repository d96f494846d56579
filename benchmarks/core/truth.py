"""What the ranks of a job did by their own logs and the kernel's, and how far the event log's ledger is off. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from core.process_events import Life, moment
from dlrover_run.events.ledger import Ledger
from dlrover_run.events.reader import AgentLog
from dlrover_run.events.records import CheckpointSeen, WorkerExited, WorkerReady
from dlrover_run.events.timeline import TimePhase

PHASES: Mapping[str, TimePhase] = {
    "start": TimePhase.IMPORT,
    "train": TimePhase.TRAIN,
    "lost": TimePhase.LOST,
    "restart": TimePhase.RESTART,
}
"""The figures of a script's log, and the phase of the ledger that each is."""


class End(NamedTuple):
    """How a round ends: the rank that fails, None in the last round; after how many steps; by a signal or "exit"."""

    rank: int | None
    steps: int
    how: str


@dataclass(frozen=True)
class Plan:
    """The chaos of one job."""

    workers: int
    save_every: int
    begins_after: float
    rounds: tuple[End, ...]


class Note(NamedTuple):
    """A line of a rank's log. `at` is in seconds of the monotonic clock."""

    rank: int
    round: int
    what: str
    at: float
    pid: int = 0


@dataclass(frozen=True)
class Truth:
    """Seconds of one rank, by its own log."""

    start: float
    train: float
    lost: float
    restart: float


def plan_of(seed: int, scale: int = 1) -> Plan:
    """The job of a seed. Each round has `scale` times as many steps."""
    choose = random.Random(seed)
    workers = choose.randint(1, 3)
    ends = [
        End(choose.randrange(workers), scale * choose.randint(50, 200), choose.choice(["SIGKILL", "SIGTERM", "exit"]))
        for _ in range(choose.randint(1, 4))
    ]
    save_every = choose.randint(10, 60)
    last = End(None, scale * choose.randint(50, 200), "")
    return Plan(workers, save_every, random.Random(seed).uniform(0.2, 1.5), (*ends, last))


def read_notes(folder: Path, workers: int) -> list[Note]:
    """The logs of all ranks."""
    return [
        Note(rank, note["round"], note["what"], note["at"], note["pid"])
        for rank in range(workers)
        for note in map(json.loads, (folder / f"truth.{rank}").read_text().splitlines())
    ]


def with_kernel_times(notes: Sequence[Note], lives: Mapping[int, Life]) -> list[Note]:
    """The notes with the times at which the kernel began and ended the process of a rank that begins or fails. Raises
    Lost if it has not said so."""
    events = {"begins": "began", "fails": "ended"}
    return [
        note._replace(at=moment(lives, note.pid, events[note.what])) if note.what in events else note for note in notes
    ]


def truth_of(notes: Sequence[Note], workers: int, rounds: int) -> list[Truth]:
    """What the ranks did, from their logs together: a round is over for all when one rank fails."""
    over = {note.round: note.at for note in notes if note.what == "fails"}
    saved = sorted(note.at for note in notes if note.what == "saved")
    found = []
    for rank in range(workers):
        own = {(note.round, note.what): note.at for note in notes if note.rank == rank}
        start = train = lost = restart = 0.0
        for number in range(rounds):
            began, end = own[number, "begins"], over.get(number, own.get((number, "succeeds"), 0.0))
            if number:
                restart += began - over[number - 1]
            works = own[number, "works"]
            kept = end
            if number in over and (before := [at for at in saved if at <= end]):
                # Work of an earlier round that no checkpoint has kept was lost with that round.
                kept = max(works, before[-1])
            start, train, lost = start + works - began, train + kept - works, lost + end - kept
        found.append(Truth(start, train, lost, restart))
    return found


class Pair(NamedTuple):
    """One figure, in seconds or as a share."""

    ledger: float
    truth: float

    @property
    def error(self) -> float | None:
        """The relative error of the ledger; None of nothing."""
        return self.ledger / self.truth - 1 if self.truth else None


def compare(ledger: Ledger, truth: Sequence[Truth], wall: float) -> dict[str, Pair]:
    """The figures of all ranks together: "wall", each of PHASES, "ettr", and "sum", that of all phases. `wall` is the
    seconds of the job by the clock of the benchmark."""
    whole = wall * len(truth)
    pairs = {
        name: Pair(sum(place.total(phase) for place in ledger.places) / 1e6, sum(getattr(one, name) for one in truth))
        for name, phase in PHASES.items()
    }
    pairs["wall"] = Pair(ledger.wall / 1e6, whole)
    pairs["sum"] = Pair(sum(ledger.totals().values()) / 1e6, whole)
    pairs["ettr"] = Pair(ledger.ettr or 0.0, sum(one.train for one in truth) / whole)
    return pairs


def delays(log: AgentLog, notes: Sequence[Note], rounds: int) -> dict[str, list[float]]:
    """By how many seconds each moment in the event log is later than in the log of the script: where errors come from.

    Moments that cannot be paired, as a log lacks some of them, are left out.
    """
    found: dict[str, list[float]] = {"first step": [], "checkpoint": [], "failure": [], "success": []}

    def pair(name: str, ours: Iterable[float], theirs: Iterable[float]) -> None:
        ours, theirs = list(ours), list(theirs)
        if len(ours) == len(theirs):
            found[name] += [mine - own for mine, own in zip(ours, theirs, strict=True)]

    for rank in {note.rank for note in notes}:
        own = {(note.round, note.what): note.at for note in notes if note.rank == rank}
        ready = [
            one.mono if one.since is None else one.since
            for one in log.events
            if isinstance(one, WorkerReady) and one.stage == "step" and one.rank == rank
        ]
        pair("first step", ready, [own[number, "works"] for number in range(rounds) if (number, "works") in own])
        exits = [one.mono for one in log.events if isinstance(one, WorkerExited) and one.rank == rank]
        if len(exits) == rounds:
            for number, at in enumerate(exits):
                for what, name in (("fails", "failure"), ("succeeds", "success")):
                    pair(name, [at], [own[number, what]] if (number, what) in own else [])
    seen = [one.mono for one in log.events if isinstance(one, CheckpointSeen)]
    pair("checkpoint", seen, sorted(note.at for note in notes if note.what == "saved"))
    return found
