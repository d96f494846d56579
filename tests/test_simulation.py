"""Whole jobs in virtual time: many seeds, that a seed replays exactly, and that broken rules are found."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from simulation.disk import DiskJournal
from simulation.scenario import simulate
from simulation.timeline import Broken

from dlrover_run.agent.standing import Standing
from dlrover_run.backends.orders import Orders
from dlrover_run.coordination import gathering, training
from dlrover_run.coordination.coordinator import Coordinator
from dlrover_run.coordination.decision import Decision
from dlrover_run.coordination.records import Assignment, Plan, assignment
from dlrover_run.coordination.rules import Rules
from dlrover_run.coordination.seating import seat_nodes

SEEDS = 500
LONG_CHUNK = 1000
ENOUGH = 2000
"""Seeds within which every broken variant has to be found."""


def run_seeds(first: int, count: int) -> None:
    broken = []
    for seed in range(first, first + count):
        try:
            simulate(seed)
        except Broken as reason:
            broken.append(str(reason))
    assert not broken, "\n".join(broken)


def test_every_law_holds_whatever_happens() -> None:
    run_seeds(0, SEEDS)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", range(10))
def test_every_law_holds_for_ten_thousand_seeds(chunk: int) -> None:
    run_seeds(SEEDS + chunk * LONG_CHUNK, LONG_CHUNK)


def test_the_runs_are_worth_something() -> None:
    outcomes = [simulate(seed) for seed in range(60)]
    assert {"finished", "failed"} <= {outcome.phase for outcome in outcomes}
    assert sum(outcome.rounds for outcome in outcomes) > 100
    assert sum(outcome.completed for outcome in outcomes) > 60
    assert sum(outcome.restarts for outcome in outcomes) > 10
    assert sum(outcome.coordinators > 1 for outcome in outcomes) > 10


def test_a_seed_replays_exactly_in_another_process() -> None:
    def trace(hash_seed: str) -> str:
        here = Path(__file__).parent
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(here.parent)}
        command = [sys.executable, "-m", "simulation", "4"]
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.rpartition("1 seeds in")[0]

    first = trace("1")
    assert len(first.splitlines()) > 20
    assert trace("2") == first


def patched(*places: tuple[Any, str], by: Any) -> Callable[[], AbstractContextManager[None]]:
    """Something in place of a name in every module that uses it."""

    @contextmanager
    def hold() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name in places:
                # A built-in is in no module until it is put there; whatever else is not there was renamed.
                stack.enter_context(patch.object(owner, name, by, create=hasattr(builtins, name)))
            yield

    return hold


def charge_without_ending(rules: Rules, plan: Plan, present: Any, cause: Any, now: float) -> Decision:
    """Charges a failure, and forgets that its round is over."""
    return Decision(training.charge(rules, plan, cause.status.failure, True, now))


def take_without_another_port(self: Any, wanted: Assignment) -> None:
    """Offers the same port until a round is known to use it."""
    is_known = wanted.seat is not None and wanted.seat.store_port == self._next_port.number
    if not is_known:
        self._heard, self._epoch = wanted.key, wanted.epoch
    real_take(self, wanted)


real_take = Standing.take


def take_whatever_is_new(self: Orders, wanted: Assignment) -> bool:
    """Takes a word of any coordinator."""
    self.epoch = 0
    return real_take_word(self, wanted)


real_take_word = Orders.take


@contextmanager
def obey_whoever_spoke_last() -> Iterator[None]:
    """Neither side looks at epochs: each of them alone would be enough."""
    with (
        patch.object(Orders, "take", take_whatever_is_new),
        patch.object(Coordinator, "_compare_epochs", lambda self, status: None),
    ):
        yield


BROKEN = {
    "a failure is charged twice": patched((training, "_restart"), by=charge_without_ending),
    "a failure is charged to nobody": patched((training, "charge"), by=lambda rules, plan, failure, worked, now: plan),
    "a round may use a port that another one used": patched(
        (gathering, "offers_a_fresh_port"), (training, "offers_a_fresh_port"), by=lambda rules, plan, leader: True
    ),
    "a node offers a port again": patched((Standing, "take"), by=take_without_another_port),
    "nodes are told before the journal is": patched((DiskJournal, "append"), by=lambda self, plan: None),
    "a node obeys whoever spoke last": obey_whoever_spoke_last,
    "an old master does not notice its successor": patched((DiskJournal, "_look"), by=lambda self: None),
    "a round is formed while it is unknown who lives": patched(
        (gathering, "until_known"), (training, "until_known"), by=lambda plan, present, now: None
    ),
    "survivors get other ranks": patched(
        (gathering, "seat_nodes"),
        (training, "seat_nodes"),
        by=lambda before, living, size: seat_nodes((), living, size),
    ),
    "the unit of nodes is forgotten": patched(
        (Rules, "size"), by=lambda self, nodes: min(nodes, self.most) if nodes >= self.least else 0
    ),
    "no more nodes train than have to": patched(
        (Rules, "size"), by=lambda self, nodes: self.fewest if nodes >= self.fewest else 0
    ),
    "one success is enough": patched((training, "all"), by=any),
    "nobody looks when something falls due": patched((Coordinator, "wake_at"), by=lambda self: None),
    "the loss of a node changes nothing": patched(
        (training, "_regroup_without"), by=lambda rules, plan, present, gone, now: Decision(plan)
    ),
    "a broken connection goes unnoticed": patched((Coordinator, "disconnect"), by=lambda self, key, now: None),
    "a round that is adopted is ended first": patched(
        (Coordinator, "assignment"),
        by=lambda self, key, waiting=None: assignment(self.plan, self.seat(key), waiting),
    ),
    "nobody waits for what others failed of": patched((Rules, "cause_delay"), by=0.0),
    "two processes may have one id": patched((Coordinator, "refusal"), by=lambda self, key: None),
}


@pytest.mark.parametrize("variant", BROKEN)
def test_a_broken_rule_is_found(variant: str) -> None:
    with BROKEN[variant]():
        for seed in range(ENOUGH):
            try:
                simulate(seed)
            except Broken:
                return
    raise AssertionError(f"{ENOUGH} seeds did not find that {variant}")
