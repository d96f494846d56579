"""The ledger of a job that is killed again and again, against the log that its script keeps itself.

The jobs are those of `benchmarks/ledger.py`, which measures how exact the ledger is. All are long: they compare times.
DLROVER_LEDGER_SEEDS is the number of seeds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import ledger
from core.run import NANOSECOND, Run
from core.truth import PHASES, End, Plan, compare, plan_of, read_notes, truth_of

from dlrover_run.events.ledger import build_ledger
from dlrover_run.events.timeline import TimePhase

LATE = 0.1
"""Seconds of a round for which a worker that ends may still run, and count, on a machine with other work. On an idle
one it is 1 ms."""

SEEDS = int(os.environ.get("DLROVER_LEDGER_SEEDS", "5"))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_ledger_agrees_with_the_log_of_the_script(seed: int) -> None:
    """The sums are the wall clock within 1 %, each phase is right within 5 %, and ETTR within 3 %."""
    plan = plan_of(seed)
    with Run() as run:
        logs, notes, began = ledger.run_plan(run, plan)
    (log,) = logs
    assert log.ended is not None
    account, truth = build_ledger(logs), truth_of(notes, plan.workers, len(plan.rounds))
    assert len(account.places) == len(truth)
    assert sum(account.totals().values()) == account.wall
    assert not account.totals()[TimePhase.UNKNOWN]
    for place, expected in zip(account.places, truth, strict=True):
        for name, phase in PHASES.items():
            slack = LATE * len(plan.rounds)
            assert place.total(phase) / 1e6 == pytest.approx(getattr(expected, name), rel=0.05, abs=slack), (seed, name)
    figures = compare(account, truth, log.ended.mono - began * NANOSECOND)
    assert figures["wall"].ledger == pytest.approx(figures["wall"].truth, rel=0.01)
    assert figures["ettr"].ledger == pytest.approx(figures["ettr"].truth, rel=0.03)


@pytest.mark.long
def test_a_checkpoint_of_one_node_counts_on_the_other() -> None:
    plan = Plan(1, 50, 0.2, (End(1, 120, "SIGKILL"), End(None, 60, "")))
    with Run() as run:
        logs, _, _ = ledger.run_plan(run, plan, ["--local-nodes=2"])
        truth = truth_of(read_notes(run.directory, 2), 2, len(plan.rounds))
    account = build_ledger(logs)
    assert len(account.places) == 2
    # Both ranks do the same, and only the first one saves.
    for place in account.places:
        assert place.total(TimePhase.LOST) / 1e6 == pytest.approx(truth[0].lost, abs=LATE * len(plan.rounds))
    assert truth[0].lost > LATE * len(plan.rounds)
