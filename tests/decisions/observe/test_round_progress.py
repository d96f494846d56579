"""The events of the progress of workers: when a first step was made, and figures at intervals."""

from __future__ import annotations

import pytest
from support.scripted_agent import Emitted, rank_assignment

from dlrover_run.events.records import WorkerProgress, WorkerReady
from dlrover_run.observe.page import Phase, Progress, StepSource
from dlrover_run.observe.round_progress import FIGURES_INTERVAL, ProgressEvents

RANKS = rank_assignment(3, restart_count=2, node_rank=1, nodes=2, workers=2, first_rank=4, world_size=6)


def done(steps: int, at: float, first: float = 0.0, first_steps: int = 1) -> Progress:
    first = first or at
    return Progress(
        steps, 8 * steps, steps / 4, nanoseconds(at), StepSource.REPORT, Phase.TRAINING, nanoseconds(first), first_steps
    )


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def firsts(emitted: Emitted) -> list[tuple[int, int, str, float | None]]:
    return [
        (event.rank, event.local_rank, event.stage, event.since)
        for event in emitted.events
        if isinstance(event, WorkerReady)
    ]


def test_the_first_step_is_dated_by_the_worker() -> None:
    emitted = Emitted()
    events = ProgressEvents(RANKS, emitted, began=100.0)
    events.follow({0: None, 1: None}, 101.0)
    events.follow({0: done(1, 101.7), 1: done(0, 0.0)}, 102.0)
    assert firsts(emitted) == [(4, 0, "step", 101.7)]
    # However late the look, and whatever came between the steps.
    events.follow({0: done(3, 112.9, 101.7), 1: done(9, 112.9, 102.2)}, 113.0)
    events.follow({0: done(9, 114.9, 101.7), 1: done(24, 114.9, 102.2)}, 115.0)
    assert firsts(emitted)[1:] == [(5, 1, "step", 102.2)]


def test_of_steps_that_are_counted_together_the_first_is_dated_by_those_that_follow() -> None:
    emitted = Emitted()
    events = ProgressEvents(RANKS, emitted, began=100.0)
    events.follow({0: None, 1: None}, 101.0)
    # A line every four steps.
    events.follow({0: done(4, 102.9, 102.9, 4), 1: done(4, 101.2, 101.2, 4)}, 103.0)
    assert firsts(emitted) == []
    events.follow({0: done(8, 103.7, 102.9, 4), 1: done(8, 102.0, 101.2, 4)}, 104.0)
    assert firsts(emitted) == [(4, 0, "step", pytest.approx(102.3)), (5, 1, "step", 101.0)]


def test_a_worker_that_ends_without_further_steps_has_its_first_ones_spread() -> None:
    emitted = Emitted()
    events = ProgressEvents(RANKS, emitted, began=100.0)
    events.follow({0: None}, 109.0, last=True)
    events.follow({1: done(10, 110.0, 110.0, 10)}, 111.0, last=True)
    assert firsts(emitted) == [(5, 1, "step", 101.0)]


def test_figures_come_at_intervals_and_at_the_end() -> None:
    emitted = Emitted()
    events = ProgressEvents(RANKS, emitted, began=0.0)
    for second in range(1, 3 * round(FIGURES_INTERVAL)):
        events.follow({0: done(second, second)}, second)
    events.follow({0: done(999, 3 * FIGURES_INTERVAL)}, 3 * FIGURES_INTERVAL, last=True)
    figures = [event for event in emitted.events if isinstance(event, WorkerProgress)]
    assert [event.steps for event in figures] == [1, 61, 121, 999]
    assert (figures[1].samples, figures[1].waited, figures[1].rank) == (488, 15.25, 4)
