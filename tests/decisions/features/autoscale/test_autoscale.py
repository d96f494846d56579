"""The autoscaler's decisions one by one, and the invariants that hold whatever happens to a job."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dlrover_run.features.autoscale.decide import decide
from dlrover_run.features.autoscale.measure import MIN_BLOCKS, RECENT, estimate, observe, remaining_seconds, work_done
from dlrover_run.features.autoscale.model import (
    MAX_BLOCKS,
    MAX_SIZES,
    AutoscaleState,
    Condition,
    FailureAtSize,
    Measurement,
    SizeRecord,
    Sizes,
    SizeView,
    StepsReport,
)
from dlrover_run.features.autoscale.rules import STRONG, WEAK, AutoscaleRules
from dlrover_run.features.autoscale.search import best_size, next_size
from dlrover_run.features.autoscale.text import AutoscaleCode
from dlrover_run.words.reasons import codes, render

RULES = AutoscaleRules(scaling=STRONG)
TICK = 10.0


def record(size: int, rate: float, error: float = 0.01, **more: float) -> SizeRecord:
    """A size that does `rate` work per second."""
    return SizeRecord(size, math.log(rate), error, 10, **more)  # type: ignore[arg-type]


class Steady:
    """A job without noise, each of whose sizes does the work that `curve` gives, and which changes at once."""

    def __init__(self, curve: dict[int, float], sizes: Sizes, start: int, rules: AutoscaleRules = RULES) -> None:
        self.curve, self.sizes, self.rules = curve, sizes, rules
        self.size, self.present, self.round, self.now, self.began = start, sizes.most, 1, 0.0, 0.0
        self.pause = 0.0
        self.remaining: float | None = None
        self.failure: FailureAtSize | None = None
        self.state = AutoscaleState()
        self.trained: list[int] = [start]
        self.seen: list[str] = []

    def view(self) -> SizeView:
        steps = int((self.now - self.began) * self.curve[self.size] * 10)
        progress = StepsReport(steps, self.began + steps / (self.curve[self.size] * 10)) if steps > 0 else None
        return SizeView(
            round=self.round,
            size=self.size,
            present=self.present,
            progress=progress,
            failure=self.failure,
            remaining=self.remaining,
        )

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK
            self.state = decide(self.rules, self.sizes, self.state, self.view(), self.now)
            self.seen += [code for code in codes(self.state.reasons) if code not in self.seen]
            possible = min(self.state.target or self.size, self.present)
            if possible != self.size:
                self.size, self.round, self.began = possible, self.round + 1, self.now + self.pause
                self.trained.append(possible)


def linear(most: int) -> dict[int, float]:
    return {size: float(size) for size in range(1, most + 1)}


def knee(most: int, at: int) -> dict[int, float]:
    return {size: float(min(size, at)) for size in range(1, most + 1)}


@pytest.mark.parametrize(
    ("curve", "start", "trained", "condition"),
    [
        (linear(8), 1, [1, 2, 4, 8], Condition.LARGEST),
        (linear(6), 1, [1, 2, 4, 6], Condition.LARGEST),
        (knee(8, 2), 1, [1, 2, 4, 3, 2], Condition.BEST),
        # Nothing is known beyond 8, so 7 may be better than 6 and 8.
        (knee(8, 6), 1, [1, 2, 4, 8, 6, 7, 6], Condition.BEST),
        (knee(8, 1), 8, [8, 4, 2, 1], Condition.BEST),
        (knee(8, 1), 1, [1, 2, 1], Condition.BEST),
        (linear(1), 1, [1], Condition.LARGEST),
    ],
)
def test_a_job_without_noise_goes_straight_to_its_best_size(
    curve: dict[int, float], start: int, trained: list[int], condition: Condition
) -> None:
    job = Steady(curve, Sizes(1, len(curve)), start)
    job.pass_time(4000)
    assert (job.trained, job.state.condition) == (trained, condition)


def test_a_size_is_kept_only_if_enough_of_it_becomes_throughput() -> None:
    curve = {1: 1.0, 2: 1.3}
    job = Steady(curve, Sizes(1, 2), 1)
    job.pass_time(2000)
    assert job.trained == [1, 2, 1]
    assert "autoscale.changing" in job.seen
    job = Steady(curve, Sizes(1, 2), 1, replace(RULES, efficiency=0.3))
    job.pass_time(2000)
    assert job.trained == [1, 2]


@pytest.mark.parametrize(("remaining", "trained"), [(100.0, [1]), (160.0, [1]), (10_000.0, [1, 2])])
def test_a_change_must_pay_for_its_pause_in_the_time_that_is_left(remaining: float, trained: list[int]) -> None:
    job = Steady(linear(2), Sizes(1, 2), 1)
    job.remaining = remaining
    job.pass_time(1000)
    assert job.trained == trained
    assert ("autoscale.pause" in codes(job.state.reasons)) == (trained == [1])


def declining(most: int) -> dict[int, float]:
    return {size: size / (1 + 0.04 * (size - 1) + 0.018 * size * (size - 1)) for size in range(1, most + 1)}


def test_a_search_that_waited_until_a_change_pays_goes_on_counting_its_changes() -> None:
    job = Steady(declining(6), Sizes(1, 6), 4)
    job.pause = 200.0
    job.pass_time(12 * 3600)
    assert "autoscale.pause" in job.seen
    assert job.state.condition is Condition.BEST
    assert job.state.changes == len(job.trained) - 1


def test_what_is_left_is_known_in_seconds_once_the_size_was_measured() -> None:
    done = StepsReport(100, 10.0, left=1000)
    assert remaining_seconds(RULES, AutoscaleState(), 2, done) is None
    known = AutoscaleState(table=(record(2, 20.0),))
    assert remaining_seconds(RULES, known, 2, done) == pytest.approx(50)
    assert remaining_seconds(RULES, known, 4, done) is None
    assert remaining_seconds(RULES, known, 2, None) is None
    # Steps of two nodes are twice the work; samples are counted once.
    weak = AutoscaleRules(scaling=WEAK)
    assert remaining_seconds(weak, known, 2, done) == pytest.approx(100)
    assert remaining_seconds(weak, known, 2, StepsReport(100, 10.0, 800, 1000)) == pytest.approx(50)
    measured = AutoscaleState(table=known.table, measurement=Measurement(1, 2, blocks=(math.log(10.0),)))
    assert remaining_seconds(RULES, measured, 2, done) == pytest.approx(100)


def test_a_pause_is_measured_from_the_end_of_a_round_to_the_first_step_of_the_next() -> None:
    job = Steady(linear(4), Sizes(1, 4), 1)
    job.pause = 120.0
    job.pass_time(3000)
    assert job.state.pauses
    assert all(pause == pytest.approx(120, abs=2 * TICK) for pause in job.state.pauses)


def test_nodes_that_do_not_come_are_given_up_for_longer_and_longer() -> None:
    job = Steady(linear(8), Sizes(1, 8), 2)
    job.present = 2
    wishes, wanted = [], False
    for _ in range(24 * 60):
        job.pass_time(60)
        wishes += [job.now] if job.state.target > 2 and not wanted else []
        wanted = job.state.target > 2
    pauses = [later - one for one, later in pairwise(wishes)]
    assert job.trained == [2, 1, 2]
    assert 3 <= len(pauses) <= 6
    assert all(later > 1.9 * one for one, later in pairwise(pauses))


def test_nodes_that_come_later_are_used_at_once() -> None:
    job = Steady(linear(8), Sizes(1, 8), 2)
    job.present = 2
    job.pass_time(600)
    job.present = 8
    job.pass_time(600)
    assert job.size == 8


def test_nodes_that_do_not_come_stay_wished_for_and_are_tried_whenever_they_come() -> None:
    job = Steady(linear(8), Sizes(1, 8), 2)
    job.present = 2
    job.pass_time(300)
    published = []
    for _ in range(12 * 60):
        job.pass_time(60)
        choice = job.state.size_choice
        published.append(choice.wanted_nodes)
        assert choice.chosen_nodes <= choice.wanted_nodes
    # An autoscaler of the cluster that follows it never takes back what it has ordered.
    assert set(published) == {4}
    assert (job.size, job.state.ceiling.refusals > 2) == (2, True)
    job.present = 8
    job.pass_time(600)
    assert (job.size, job.state.wish) == (8, 0)


@pytest.mark.parametrize("pause", [0.0, 400.0], ids=["they have trained", "they leave before the first step"])
def test_nodes_that_do_not_stay_are_not_wished_for(pause: float) -> None:
    job = Steady(linear(4), Sizes(1, 4), 2)
    job.present = 2
    job.pass_time(600)
    job.pause = pause
    for _ in range(2):
        job.present = 4
        job.pass_time(300)
        assert job.size == 4
        job.present = 2
        job.pass_time(300)
    assert (job.state.target, job.state.wish) == (2, 0)
    assert codes(job.state.reasons) == ("autoscale.unstable",)
    job.present = 4
    job.pass_time(300)
    assert job.size == 2


def test_no_more_nodes_are_wished_for_than_would_pay() -> None:
    job = Steady(knee(4, 2), Sizes(1, 4), 4)
    job.pass_time(4000)
    job.present = 2
    job.pass_time(4000)
    assert (job.state.target, job.state.wish) == (2, 0)


def test_a_shortage_sets_the_target_to_what_is_here() -> None:
    job = Steady(linear(4), Sizes(1, 4), 1)
    job.pass_time(1000)
    assert job.trained == [1, 2, 4]
    job.present = 3
    job.pass_time(400)
    assert (job.size, job.state.target, job.state.condition) == (3, 3, Condition.STOP)
    assert job.trained == [1, 2, 4, 3]


def test_a_size_at_which_workers_fail_is_left_and_tried_once_more() -> None:
    job = Steady(linear(3), Sizes(1, 3), 2)
    fails: list[float] = []
    for _ in range(2000):
        if job.size == 3:
            job.failure = FailureAtSize(job.round, 3)
            fails.append(job.now)
        job.pass_time(TICK)
    assert len(fails) == 2
    assert fails[1] - fails[0] >= RULES.retry
    assert job.size == 2
    assert "autoscale.crashed" in job.seen


def test_a_failure_at_a_size_that_has_trained_is_not_of_the_size() -> None:
    job = Steady(linear(2), Sizes(1, 2), 1)
    job.pass_time(1000)
    job.failure = FailureAtSize(job.round, 2)
    job.round += 1
    job.pass_time(1000)
    assert job.trained == [1, 2]


def test_other_sizes_are_measured_again_when_the_throughput_has_changed() -> None:
    job = Steady(knee(8, 2), Sizes(1, 8), 1)
    job.pass_time(5000)
    assert job.size == 2
    # The input is faster now: the knee is gone, and each node does more.
    job.curve = {size: 1.5 * size for size in range(1, 9)}
    job.pass_time(5000)
    assert job.size == 8
    assert "autoscale.drifted" in job.seen
    assert job.trained == [1, 2, 4, 3, 2, 4, 8]


def test_another_range_is_followed() -> None:
    job = Steady(linear(8), Sizes(1, 8), 1)
    job.pass_time(2000)
    assert job.size == 8
    job.sizes = Sizes(1, 4)
    job.pass_time(1000)
    assert job.size == 4
    assert "autoscale.allowed" in job.seen
    job.sizes = Sizes(6, 8)
    job.pass_time(2000)
    assert job.size == 8


def test_nothing_is_decided_while_the_job_is_busy() -> None:
    view = SizeView(round=1, size=2, present=8, progress=StepsReport(10_000, 1000.0), busy=True)
    assert decide(RULES, Sizes(1, 8), AutoscaleState(), view, 1000.0).target == 0


def test_the_batch_of_a_job_that_scales_weakly_is_limited() -> None:
    assert AutoscaleRules(scaling=WEAK, max_batch=4).allowed(2, 64, 2) == Sizes(2, 8, 2)
    assert AutoscaleRules(scaling=STRONG, max_batch=4).allowed(2, 64, 2) == Sizes(2, 64, 2)
    assert AutoscaleRules().allowed(3, 11, 2) == Sizes(4, 10, 2)


def test_work_is_samples_or_steps_of_all_nodes_or_steps() -> None:
    progress = StepsReport(100, 1.0)
    assert work_done(AutoscaleRules(scaling=WEAK), 4, progress) == 400
    assert work_done(AutoscaleRules(scaling=STRONG), 4, progress) == 100
    assert work_done(AutoscaleRules(scaling=STRONG), 4, StepsReport(100, 1.0, 3200)) == 3200


# Measurements.


def test_a_few_outliers_do_not_move_an_estimate() -> None:
    calm = [0.01 * (place % 5) for place in range(40)]
    spoiled = [value - (2.3 if place % 20 == 7 else 0) for place, value in enumerate(calm)]
    one, other = estimate(tuple(calm)), estimate(tuple(spoiled))
    assert one is not None
    assert other is not None
    assert abs(one.rate - other.rate) < 0.01


def test_correlated_blocks_are_less_certain() -> None:
    random = [((place * 7919) % 101) / 100 for place in range(60)]
    sorted_blocks = sorted(random)
    one, other = estimate(tuple(random)), estimate(tuple(sorted_blocks))
    assert one is not None
    assert other is not None
    assert other.error > 2 * one.error


def test_too_few_blocks_are_no_estimate_and_equal_ones_are_exact() -> None:
    assert estimate((0.0,) * (MIN_BLOCKS - 1)) is None
    assert estimate((0.0,) * MIN_BLOCKS) == (0.0, 0.0, MIN_BLOCKS)


def test_the_first_steps_of_a_round_are_not_measured() -> None:
    measurement = Measurement()
    # The first step takes a minute, each other one a second.
    for second in range(60, 200):
        measurement = observe(RULES, measurement, 1, 2, StepsReport(second - 59, float(second)), False)
    assert set(measurement.blocks) == {0.0}


def test_a_long_measurement_has_longer_blocks_and_a_recent_one_drops_the_oldest() -> None:
    long = recent = Measurement()
    for place in range(1, 2000):
        progress = StepsReport(20 * place, 10.0 * place)
        long = observe(RULES, long, 1, 2, progress, False)
        recent = observe(RULES, recent, 1, 2, progress, True)
    assert len(long.blocks) <= MAX_BLOCKS
    assert long.seconds >= 16 * RULES.block
    assert len(recent.blocks) == RECENT
    assert recent.seconds == 0


# The next size.


@pytest.mark.parametrize(
    ("measured", "bad", "highest", "size"),
    [
        ([(4, 4)], [], 16, 8),
        ([(4, 4)], [], 4, 2),
        ([(16, 16)], [], 16, 8),
        ([(4, 4), (8, 8)], [], 16, 16),
        # The lines through the sizes on either side meet at the knee.
        ([(2, 2), (4, 4), (8, 6), (16, 6)], [], 16, 6),
        # Workers fail with 8: the middle, and after that as well nothing beyond it.
        ([(2, 2), (4, 4)], [8], 16, 6),
        ([(2, 2), (4, 4)], [8, 6], 16, None),
    ],
)
def test_the_size_with_the_most_to_gain_is_next(
    measured: list[tuple[int, float]], bad: list[int], highest: int, size: int | None
) -> None:
    known = [record(*one, error=0.0) for one in measured]
    found = next_size(Sizes(1, 16), highest, known, bad, 0.5, best_size(known, 0.5, 0.02))
    assert (found.size if found is not None and found.gain > 0.02 else None) == size


@pytest.mark.parametrize(("bad", "size"), [([], 8), ([8], 12), ([12], 4), ([12, 8], None)])
def test_a_smaller_size_is_found_on_either_side_of_one_at_which_workers_fail(bad: list[int], size: int | None) -> None:
    known = [record(16, 4.0, error=0.0)]
    found = next_size(Sizes(4, 16, 4), 16, known, bad, 0.5, known[0])
    assert (found.size if found is not None else None) == size


def test_of_sizes_that_cannot_be_told_apart_the_smallest_is_best() -> None:
    known = [record(2, math.sqrt(2) * 0.99), record(4, 2.0), record(1, 0.9)]
    assert best_size(known, 0.5, 0.025).size == 2


# Invariants.


def test_a_state_with_everything_at_its_bound_is_small_enough_for_a_plan() -> None:
    state = AutoscaleState(
        table=tuple(SizeRecord(10_000 + place, -1.2345678901234, 0.0123456789, 64, 1e9) for place in range(MAX_SIZES)),
        measurement=Measurement(1, 2, blocks=(-1.2345678901234567,) * MAX_BLOCKS),
    )
    assert len(msgspec.json.encode(state)) < 12_000


@st.composite
def lives(draw: st.DrawFn) -> tuple[Sizes, list[float], list[tuple[float, int, bool]]]:
    """The sizes of a job, the work per second at each, and what happens to it: seconds, nodes, whether workers fail."""
    unit = draw(st.integers(1, 4))
    fewest = draw(st.integers(1, 6))
    sizes = Sizes(fewest * unit, draw(st.integers(fewest, 20)) * unit, unit)
    curve = draw(st.lists(st.floats(0.1, 50), min_size=sizes.most + 1, max_size=sizes.most + 1))
    event = st.tuples(st.floats(1, 400), st.integers(0, sizes.most + 8), st.sampled_from((False, False, False, True)))
    return sizes, curve, draw(st.lists(event, max_size=20))


@settings(max_examples=25, deadline=None)
@given(lives())
def test_whatever_happens_the_invariants_hold(life: tuple[Sizes, list[float], list[tuple[float, int, bool]]]) -> None:
    sizes, curve, events = life
    state, now, size, round_, began = AutoscaleState(), 0.0, sizes.most, 1, 0.0
    failure: FailureAtSize | None = None
    here = came = 0
    for seconds, present, fails in [*events, *[(300.0, sizes.most, False)] * 10]:
        # Nodes that come may make a size possible that was wanted before.
        came, here = came + (sizes.below(present) > sizes.below(here)), present
        for _ in range(10):
            now += seconds / 10
            possible = min(present, state.target or sizes.most) // sizes.unit * sizes.unit
            possible = possible if possible >= sizes.fewest else 0
            if possible != size:
                size, round_, began = possible, round_ + 1, now
            steps = int((now - began) * curve[size]) if size else 0
            progress = StepsReport(steps, began + steps / curve[size]) if steps else None
            view = SizeView(round=round_, size=size, present=present, progress=progress, failure=failure)
            before, state = state, decide(RULES, sizes, state, view, now)
            assert state.target == 0 or state.target in sizes
            assert state.wish == 0 or (state.wish in sizes and state.wish > state.target)
            came = came if state.changes else 0
            limit = sizes.max_changes + 1 + came
            assert state.changes <= limit, "one more is the way back from a size at which workers fail"
            assert len(state.table) <= MAX_SIZES
            assert render(state.reasons) or state.condition is Condition.START
            assert decide(RULES, sizes, state, view, now) == state, "it is idempotent"
            stored = msgspec.json.decode(msgspec.json.encode(state), type=AutoscaleState)
            assert stored == state
            if before.condition.has_settled and state.target != before.target:
                assert before.quiet_until <= now or size < before.target, "a search begins only after its time"
        if fails and size:
            failure, round_, began = FailureAtSize(round_, size), round_ + 1, now


def test_each_code_has_a_text() -> None:
    params = dict.fromkeys(("size", "to", "ratio", "efficiency", "floor", "pause", "horizon", "seconds"), 2) | {
        "sizes": "1, 2"
    }
    for code in AutoscaleCode:
        assert "autoscale." not in render((code(**params),))
