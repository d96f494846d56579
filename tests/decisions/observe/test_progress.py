"""The record of a worker's progress, which is never read torn, and the rhythm that is computed from it."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_run.observe.page import (
    AREA_BYTES,
    LAYOUT,
    MAX_COUNT,
    MAX_FIRST_STEPS,
    PAGE_BYTES,
    SLOT_BYTES,
    Area,
    Phase,
    Progress,
    StepSource,
    Writer,
    decode,
    encode,
    is_blank,
)
from dlrover_run.observe.rhythm import KEPT, MIN_PAUSES, Rhythm

WORD = 8
"""Bytes that a processor stores at once."""

progresses = st.builds(
    Progress,
    steps=st.integers(0, MAX_COUNT),
    samples=st.integers(0, MAX_COUNT),
    waited=st.floats(0, allow_infinity=False),
    at=st.integers(0, MAX_COUNT),
    source=st.sampled_from(StepSource),
    phase=st.sampled_from(Phase),
    first=st.integers(0, MAX_COUNT),
    first_steps=st.integers(0, MAX_FIRST_STEPS),
    left=st.none() | st.integers(0, MAX_COUNT),
    ended=st.integers(0, MAX_COUNT),
)


def slot(number: int, progress: Progress) -> bytes:
    return encode(number, progress).ljust(SLOT_BYTES, b"\0")


@given(progresses)
def test_a_record_is_read_as_it_was_written(progress: Progress) -> None:
    assert decode(slot(1, progress)) == progress


@given(st.lists(progresses, min_size=2, max_size=6), st.sets(st.integers(0, SLOT_BYTES // WORD - 1)))
def test_a_reader_in_the_middle_of_a_write_gets_the_record_before_it(written: list[Progress], stored: set[int]) -> None:
    # Some words of the last record are visible, in whatever order the processor shows them.
    slots = [bytes(SLOT_BYTES), bytes(SLOT_BYTES)]
    for number, progress in enumerate(written[:-1], start=1):
        slots[number & 1] = slot(number, progress)
    last = len(written)
    old, new = slots[last & 1], slot(last, written[-1])
    words = ((new if word in stored else old)[word * WORD :][:WORD] for word in range(SLOT_BYTES // WORD))
    slots[last & 1] = b"".join(words)
    complete = slots[last & 1][: len(encode(last, written[-1]))] == encode(last, written[-1])
    assert decode(b"".join(slots)) == (written[-1] if complete else written[-2])


@given(st.binary(min_size=AREA_BYTES, max_size=AREA_BYTES))
def test_bytes_that_are_no_record_are_none(data: bytes) -> None:
    assert decode(data) is None


def test_a_record_of_another_layout_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(1, 2, 3.0, 4, StepSource.REPORT, Phase.TRAINING)
    monkeypatch.setattr("dlrover_run.observe.page.LAYOUT", LAYOUT + 1)
    of_tomorrow = slot(1, progress)
    monkeypatch.undo()
    assert decode(of_tomorrow) is None
    assert not is_blank(of_tomorrow)


def anonymous() -> mmap.mmap:
    return mmap.mmap(-1, PAGE_BYTES)


def shown(memory: mmap.mmap, area: Area = Area.WORKER) -> Progress | None:
    return decode(memory[area : area + AREA_BYTES])


def test_nothing_is_shown_before_the_first_step() -> None:
    memory = anonymous()
    Writer(memory, Area.WORKER).enter(Phase.SAVING)
    assert shown(memory) is None
    assert is_blank(memory[:])


def test_counts_add_up() -> None:
    memory = anonymous()
    writer = Writer(memory, Area.WORKER)
    for _ in range(5):
        writer.add(StepSource.REPORT, 2, 8, 0.25)
    found = shown(memory)
    assert found is not None
    assert found[:3] == (10, 40, 1.25)
    assert shown(memory, Area.LOG) is None


def test_what_is_left_is_that_of_the_last_step() -> None:
    memory = anonymous()
    writer = Writer(memory, Area.WORKER)
    for left in (None, 8, 0, None):
        writer.add(StepSource.SAMPLER, 1, 8, 0.0, left)
        found = shown(memory)
        assert found is not None
        assert found.left == left
    again = Writer(memory, Area.WORKER)
    again.add(StepSource.SAMPLER, 1, 8, 0.0, 3)
    again.enter(Phase.SAVING)
    found = shown(memory)
    assert found is not None
    assert (found.left, found.phase) == (3, Phase.SAVING)


def test_the_end_of_the_script_is_stored_with_the_counts_before_it() -> None:
    memory, times = anonymous(), iter((10, 20, 30))
    writer = Writer(memory, Area.WORKER, interval=1_000, now=lambda: next(times))
    writer.end()
    assert shown(memory) is None
    writer.add(StepSource.REPORT, 1, 8, 0.0)
    writer.end()
    found = shown(memory)
    assert found is not None
    assert (found.steps, found.at, found.ended) == (1, 20, 30)
    # Another program of the same process continues.
    again = Writer(memory, Area.WORKER)
    again.add(StepSource.REPORT, 1, 8, 0.0)
    found = shown(memory)
    assert found is not None
    assert (found.steps, found.ended) == (2, 0)


def test_a_source_replaces_the_counts_of_a_less_precise_one() -> None:
    memory = anonymous()
    writer = Writer(memory, Area.WORKER)
    counted = []
    for source in (
        StepSource.OPTIMIZER,
        StepSource.OPTIMIZER,
        StepSource.SAMPLER,
        StepSource.OPTIMIZER,
        StepSource.REPORT,
        StepSource.SAMPLER,
    ):
        writer.add(source, 1, 1, 0.0)
        found = shown(memory)
        assert found is not None
        counted.append((found.source.name, found.steps))
    assert counted == [("OPTIMIZER", 1), ("OPTIMIZER", 2), ("SAMPLER", 1), ("SAMPLER", 1), ("REPORT", 1), ("REPORT", 1)]


def test_a_phase_is_no_step() -> None:
    memory = anonymous()
    writer = Writer(memory, Area.WORKER)
    writer.add(StepSource.REPORT, 1, 0, 0.0)
    before = shown(memory)
    writer.enter(Phase.SAVING)
    during = shown(memory)
    writer.enter(Phase.TRAINING)
    assert before is not None
    assert during == before._replace(phase=Phase.SAVING)
    assert shown(memory) == before


def test_a_writer_continues_where_the_one_before_it_stopped() -> None:
    memory = anonymous()
    for _ in range(3):
        Writer(memory, Area.LOG).add(StepSource.LOG, 1, 0, 0.0)
    found = shown(memory, Area.LOG)
    assert found is not None
    assert found.steps == 3


def test_a_count_has_an_end() -> None:
    memory = anonymous()
    writer = Writer(memory, Area.WORKER)
    for _ in range(2):
        writer.add(StepSource.REPORT, MAX_COUNT, MAX_COUNT, 0.0)
    found = shown(memory)
    assert found is not None
    assert found[:2] == (MAX_COUNT, MAX_COUNT)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


def test_the_first_steps_keep_their_time_until_another_source_counts() -> None:
    memory, clock = anonymous(), Clock()
    writer = Writer(memory, Area.WORKER, now=clock)
    firsts = []
    for source, steps in (
        (StepSource.OPTIMIZER, 0),
        (StepSource.OPTIMIZER, 3),
        (StepSource.OPTIMIZER, 1),
        (StepSource.REPORT, 1),
        (StepSource.OPTIMIZER, 1),
        (StepSource.REPORT, 9),
    ):
        clock.now += 10
        writer.add(source, steps, 0, 0.0)
        found = shown(memory)
        assert found is not None
        firsts.append((found.at, found.first, found.first_steps))
    assert firsts == [(1010, 0, 0), (1020, 1020, 3), (1030, 1020, 3), (1040, 1040, 1), (1040, 1040, 1), (1060, 1040, 1)]


def test_short_steps_are_counted_at_once_and_stored_at_intervals() -> None:
    memory, clock = anonymous(), Clock()
    writer = Writer(memory, Area.WORKER, interval=100, now=clock)

    def counted() -> tuple[int, int]:
        found = shown(memory)
        assert found is not None
        return found.steps, found.at

    stored = []
    for _ in range(8):
        writer.add(StepSource.SAMPLER, 1, 0, 0.0)
        stored.append(counted())
        clock.now += 40
    # The first one at once; a record is never older than an interval and a step.
    assert stored == [(1, 1000), (1, 1000), (1, 1000), (4, 1120), (4, 1120), (4, 1120), (7, 1240), (7, 1240)]
    writer.flush()
    assert counted() == (8, 1280)
    number = memory[:]
    writer.flush()
    assert memory[:] == number, "there is nothing to store"
    writer.add(StepSource.REPORT, 1, 0, 0.0)
    assert counted() == (1, 1320), "another source is stored at once"
    writer.add(StepSource.REPORT, 1, 0, 0.0)
    writer.enter(Phase.SAVING)
    assert counted() == (2, 1320)


def test_a_step_as_long_as_the_interval_is_stored_at_once() -> None:
    memory, clock = anonymous(), Clock()
    writer = Writer(memory, Area.WORKER, interval=100, now=clock)
    for steps in range(1, 9):
        writer.add(StepSource.REPORT, 1, 0, 0.0)
        found = shown(memory)
        assert found is not None
        assert found.steps == steps
        clock.now += 100


def rhythm_of(*steps: tuple[int, float]) -> Rhythm:
    rhythm = Rhythm()
    for count, at in steps:
        rhythm.observe(1, count, at)
    return rhythm


def test_there_is_no_period_before_enough_steps() -> None:
    assert rhythm_of((1, 0.0), (2, 9.0), (3, 9.5)).period is None


def test_the_period_does_not_depend_on_how_often_it_is_observed() -> None:
    at = [count * 0.25 for count in range(400)]
    often, rarely = rhythm_of(*enumerate(at)), rhythm_of(*list(enumerate(at))[::37])
    assert often.period == rarely.period == 0.25


def test_a_slow_first_step_and_a_checkpoint_do_not_change_the_period() -> None:
    times = [60.0, *(1.0 for _ in range(9)), 30.0, *(1.0 for _ in range(9))]
    rhythm = rhythm_of(*((count, sum(times[:count])) for count in range(len(times) + 1)))
    assert (rhythm.period, rhythm.longest_pause) == (1.0, 60.0)


def test_a_pause_is_the_time_between_two_counts_however_many_steps_follow_it() -> None:
    """An evaluation of 30 seconds, after which ten steps were made before the next observation."""
    rhythm = rhythm_of((0, 0.0), (1, 1.0), (1, 20.0), (11, 31.0))
    assert rhythm.longest_pause == 30.0
    assert not rhythm.knows_pauses
    for count in range(12, 12 + MIN_PAUSES):
        rhythm.observe(1, count, float(20 + count))
    assert rhythm.knows_pauses


def test_old_pauses_are_forgotten_and_a_frozen_machine_is_no_pause() -> None:
    rhythm = rhythm_of((0, 0.0), (1, 500.0))
    rhythm.shift(100.0)
    rhythm.observe(1, 2, 601.0)
    assert rhythm.longest_pause == 500.0
    for count in range(3, KEPT + 3):
        assert rhythm.observe(1, count, 600.0 + count)
    assert rhythm.longest_pause == 2.0
    assert not rhythm.observe(1, KEPT + 2, 9000.0), "the same count"


@given(st.lists(st.floats(0.9, 1.1), min_size=6, max_size=40))
def test_the_period_lies_among_the_steps(times: list[float]) -> None:
    period = rhythm_of(*((count, sum(times[:count])) for count in range(len(times) + 1))).period
    assert period is not None
    assert 0.9 - 1e-9 <= period <= 1.1 + 1e-9


def test_a_new_round_forgets_the_rhythm() -> None:
    rhythm = rhythm_of(*((count, count * 0.5) for count in range(9)))
    rhythm.observe(2, 9, 5.0)
    assert rhythm.period is None


def test_a_count_that_decreases_restarts_and_keeps_the_rhythm() -> None:
    rhythm = rhythm_of(*((count, count * 0.5) for count in range(9)))
    rhythm.observe(1, 1, 100.0)
    rhythm.observe(1, 2, 100.5)
    assert rhythm.period == 0.5


def test_a_rhythm_that_changes_is_followed() -> None:
    rhythm = rhythm_of(*((count, float(count)) for count in range(KEPT)))
    for count in range(1, KEPT + 1):
        rhythm.observe(1, KEPT + count, KEPT + 3.0 * count)
    assert rhythm.period == 3.0
