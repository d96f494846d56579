"""The events of the progress of workers: when a first step was made, and figures at intervals."""

from __future__ import annotations

import pytest
from scripted_agent import Emitted, seat

from dlrover_run.agent.progress_events import FIGURES_INTERVAL, ProgressEvents
from dlrover_run.events.records import WorkerProgress, WorkerReady
from dlrover_run.progress.page import Phase, Progress, StepSource

RANKS = seat(3, restart_count=2, node_rank=1, nodes=2, workers=2, first_rank=4, world_size=6)


def done(steps: int, at: float, waited: float = 0.0) -> Progress:
    return Progress(steps, 8 * steps, waited, round(at * 1e9), StepSource.REPORT, Phase.TRAINING)


def firsts(emitted: Emitted) -> list[tuple[int, int, str, float | None]]:
    return [
        (event.rank, event.local_rank, event.stage, event.since)
        for event in emitted.events
        if isinstance(event, WorkerReady)
    ]


def test_the_first_step_is_dated_from_two_looks() -> None:
    emitted = Emitted()
    events = ProgressEvents(RANKS, emitted, began=100.0)
    events.follow({0: None, 1: None}, 101.0)
    events.follow({0: done(1, 101.7), 1: done(0, 0.0)}, 102.0)
    assert firsts(emitted) == [(4, 0, "step", 101.7)]
    events.follow({0: done(3, 102.9), 1: done(4, 102.9)}, 103.0)
    assert len(firsts(emitted)) == 1
    events.follow({0: done(6, 103.9), 1: done(14, 103.9)}, 104.0)
    assert firsts(emitted)[1:] == [(5, 1, "step", pytest.approx(102.6))]
    events.follow({0: done(9, 104.9), 1: done(24, 104.9)}, 105.0)
    assert len(firsts(emitted)) == 2


def test_it_is_not_dated_before_a_look_that_found_no_step() -> None:
    emitted = Emitted()
    events = ProgressEvents(RANKS, emitted, began=100.0)
    events.follow({0: None}, 101.0)
    events.follow({0: done(4, 101.9)}, 102.0)
    # The next step was a checkpoint.
    events.follow({0: done(5, 111.9)}, 112.0)
    assert firsts(emitted) == [(4, 0, "step", 101.0)]


def test_a_worker_that_ends_after_one_look_has_its_steps_spread() -> None:
    emitted = Emitted()
    events = ProgressEvents(RANKS, emitted, began=100.0)
    events.follow({0: None}, 109.0, last=True)
    events.follow({1: done(10, 110.0)}, 111.0, last=True)
    assert firsts(emitted) == [(5, 1, "step", 101.0)]


def test_figures_come_at_intervals_and_at_the_end() -> None:
    emitted = Emitted()
    events = ProgressEvents(RANKS, emitted, began=0.0)
    for second in range(1, 3 * round(FIGURES_INTERVAL)):
        events.follow({0: done(second, second, second / 4)}, second)
    events.follow({0: done(999, 3 * FIGURES_INTERVAL)}, 3 * FIGURES_INTERVAL, last=True)
    figures = [event for event in emitted.events if isinstance(event, WorkerProgress)]
    assert [event.steps for event in figures] == [1, 61, 121, 999]
    assert (figures[1].samples, figures[1].waited, figures[1].rank) == (488, 15.25, 4)
