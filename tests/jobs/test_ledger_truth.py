"""The ledger of a job that is killed again and again, against the log that its script keeps itself.

All are long: they compare times. DLROVER_LEDGER_SEEDS is the number of seeds.
"""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import OURS, WORKERS, run

from dlrover_run.events.ledger import Ledger, TimePhase, build_ledger
from dlrover_run.events.reader import read_logs

LATE = 0.1
"""Seconds of a round for which a worker that ends may still run, and count, on a machine with other work. On an idle
one it is 1 ms."""

SEEDS = int(os.environ.get("DLROVER_LEDGER_SEEDS", "5"))


@dataclass(frozen=True)
class Truth:
    """Seconds of one rank, by its own log."""

    start: float
    train: float
    lost: float
    restart: float


def plan_of(seed: int) -> tuple[int, int, list[tuple[int | None, int, str]]]:
    """The number of workers, how many steps lie between checkpoints, and the end of each round."""
    choose = random.Random(seed)
    workers = choose.randint(1, 3)
    ends: list[tuple[int | None, int, str]] = [
        (choose.randrange(workers), choose.randint(50, 200), choose.choice(["SIGKILL", "SIGTERM", "exit"]))
        for _ in range(choose.randint(1, 4))
    ]
    return workers, choose.randint(10, 60), [*ends, (None, choose.randint(50, 200), "")]


def truth_of(folder: Path, workers: int, rounds: int) -> list[Truth]:
    """What the ranks did, from their logs together: a round is over for all when one rank fails."""
    notes: list[tuple[int, int, str, float]] = []
    for rank in range(workers):
        for line in (folder / f"truth.{rank}").read_text().splitlines():
            note = json.loads(line)
            notes.append((rank, note["round"], note["what"], note["at"]))
    over = {number: at for _, number, what, at in notes if what == "fails"}
    saved = sorted(at for _, _, what, at in notes if what == "saved")
    found = []
    for rank in range(workers):
        own = {(number, what): at for who, number, what, at in notes if who == rank}
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


def ledger_and_truth(folder: Path, seed: int) -> tuple[Ledger, list[Truth], float, int]:
    """Run the job of a seed. Also the seconds from its launch to its end, and its number of rounds."""
    workers, save_every, rounds = plan_of(seed)
    (folder / "plan.json").write_text(json.dumps(rounds))
    flags = [f"--nproc-per-node={workers}", f"--max-restarts={len(rounds)}", f"--journal={folder / 'journal'}"]
    began = time.monotonic()
    args = [folder, str(save_every), str(random.Random(seed).uniform(0.2, 1.5))]
    ended = run(OURS, [*flags, WORKERS / "truth.py", *args], cwd=folder)
    assert ended.code == 0, ended.err
    logs = read_logs(folder / "journal")
    (log,) = logs
    assert log.ended is not None
    return build_ledger(logs), truth_of(folder, workers, len(rounds)), log.ended.mono - began, len(rounds)


def compare(folder: Path, seed: int) -> None:
    """The sums are the wall clock within 1 %, each phase is right within 5 %, and ETTR within 3 %."""
    ledger, truth, wall, rounds = ledger_and_truth(folder, seed)
    assert len(ledger.places) == len(truth)
    assert ledger.wall / 1e6 == pytest.approx(wall * len(truth), rel=0.01)
    assert sum(ledger.totals().values()) == ledger.wall
    assert not ledger.totals()[TimePhase.UNKNOWN]
    for place, expected in zip(ledger.places, truth, strict=True):
        for phase in ("import", "train", "lost", "restart"):
            seconds, known = (
                place.total(TimePhase(phase)) / 1e6,
                getattr(expected, {"import": "start"}.get(phase, phase)),
            )
            assert seconds == pytest.approx(known, rel=0.05, abs=LATE * rounds), (seed, place.local_rank, phase)
    assert ledger.ettr == pytest.approx(sum(each.train for each in truth) / (wall * len(truth)), rel=0.03)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_ledger_agrees_with_the_log_of_the_script(tmp_path: Path, seed: int) -> None:
    compare(tmp_path, seed)


@pytest.mark.long
def test_a_checkpoint_of_one_node_counts_on_the_other(tmp_path: Path) -> None:
    rounds = [(1, 120, "SIGKILL"), (None, 60, "")]
    (tmp_path / "plan.json").write_text(json.dumps(rounds))
    flags = ["--local-nodes=2", "--nproc-per-node=1", "--max-restarts=2", f"--journal={tmp_path / 'journal'}"]
    ended = run(OURS, [*flags, WORKERS / "truth.py", tmp_path, "50", "0.2"], cwd=tmp_path)
    assert ended.code == 0, ended.err
    ledger, truth = build_ledger(read_logs(tmp_path / "journal")), truth_of(tmp_path, 2, len(rounds))
    assert len(ledger.places) == 2
    # Both ranks do the same, and only the first one saves.
    for place in ledger.places:
        assert place.total(TimePhase.LOST) / 1e6 == pytest.approx(truth[0].lost, abs=LATE * len(rounds))
    assert truth[0].lost > LATE * len(rounds)
