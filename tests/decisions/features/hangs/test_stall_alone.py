"""Workers that hang while others, which do not communicate with them, train on: what is a stall, and what is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stall_traces import (
    HARMLESS,
    INTERVAL,
    RoundTrace,
    Worker,
    checkpoint,
    download,
    evaluation,
    idle,
    spin,
    spin_overloaded,
    together,
)

from dlrover_run.features.hangs.search.codes import GuiltCode
from dlrover_run.features.hangs.search.detector import MIN_LIMIT, PAUSE_FACTOR, Detector, Resumed, StallCode, Stalled
from dlrover_run.features.hangs.search.guilt import find_alone
from dlrover_run.features.hangs.search.round_detectors import ALONE_LIMIT, ENOUGH_WITNESSES, WITNESS_SECONDS
from dlrover_run.features.hangs.search.suspects import Place, Suspect

Each = Callable[[Sequence[Worker], float], None]

SLACK = WITNESS_SECONDS + 4 * INTERVAL
"""Until the others have trained on for long enough, after the limit."""

PROBING_SECONDS = 4.0


def trained(ranks: int = 3, *, counts: bool = True, data: bool = False, period: float = 0.5) -> RoundTrace:
    """Workers that have trained for a while."""
    trace = RoundTrace(ranks)
    assert trace.run(12 * period + 10, trace.training(*range(ranks), counts=counts, data=data, period=period)) is None
    return trace


def stopped(workers: Sequence[Worker], _: float) -> None:
    workers[1].state = "T"


@pytest.mark.parametrize("hangs", [idle, stopped, spin, spin_overloaded])
@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("period", [0.5, 2, 10])
def test_a_worker_that_hangs_while_others_count_steps_is_found(hangs: Each, data: bool, period: float) -> None:
    trace = trained(data=data, period=period)
    began = trace.now
    found = trace.run(600, together(hangs, trace.training(0, 2, data=data, period=period)))
    assert found is not None
    assert (found.code, found.ranks) == (StallCode.ALONE, (1,))
    limit = max(ALONE_LIMIT, PAUSE_FACTOR * period)
    assert limit - period <= trace.now - began <= limit + SLACK + PROBING_SECONDS + 3 * period


def test_the_detector_of_the_round_alone_does_not_see_it() -> None:
    trace = trained()
    detector = Detector()
    others = trace.training(0, 2)
    for _ in range(400):
        trace.now += INTERVAL
        others(trace.workers, INTERVAL)
        assert detector.observe([one.evidence(trace.now) for one in trace.workers], trace.steps) is None


def test_a_group_that_waits_for_one_of_its_ranks_while_another_group_trains() -> None:
    """Without steps: two workers exchange data."""
    trace = trained(4, counts=False, data=True)
    found = trace.run(60, trace.training(2, 3, counts=False, data=True))
    assert found is not None
    assert (found.code, found.ranks) == (StallCode.ALONE, (0, 1))
    assert trace.run(100, trace.training(2, 3, counts=False, data=True)) is None, "once"


@pytest.mark.parametrize("each", HARMLESS)
@pytest.mark.parametrize("data", [False, True])
def test_what_one_worker_does_for_a_minute_while_others_train_is_no_stall(each: Each, data: bool) -> None:
    trace = trained(4, data=data)
    # Those that a harmless pause is about are ranks 0 and 1; of others, one has nothing to do with it and trains.
    acts = {0, 1} if each.__name__ in ("compilation", "overloaded_compilation") else {_actor(each)}
    others = trace.training(*({*range(4)} - acts), data=data)
    assert trace.run(60, together(each, others)) is None
    trace.workers[0].state, trace.workers[1].traced = "S", False
    assert trace.run(20, trace.training(*range(4), data=data)) is None
    # The minute belongs to the rhythm of its steps.
    found = trace.run(PAUSE_FACTOR * 60 + 20, trace.training(1, 2, 3, data=data))
    assert found is not None, "a hang after it is still found"
    assert found.ranks == (0,)


def _actor(each: Each) -> int:
    return 1 if each.__name__ in ("download", "debugger") else 0


@pytest.mark.parametrize("each", [evaluation, checkpoint, download])
@pytest.mark.parametrize("counts", [False, True])
def test_workers_that_wait_for_one_that_works_are_no_stall(each: Each, counts: bool) -> None:
    """However long: none of the others trains."""
    trace = trained(4, counts=counts, data=True)
    assert trace.run(300, each) is None
    assert trace.run(60, trace.training(*range(4), counts=counts, data=True)) is None


def test_two_workers_that_work_and_exchange_nothing_show_no_training() -> None:
    trace = trained(4, counts=False, data=True)

    def both(workers: Sequence[Worker], seconds: float) -> None:
        evaluation(workers, seconds)
        workers[3].written += 5000

    assert trace.run(200, both) is None


def test_the_first_data_of_the_step_after_a_pause_shows_no_training() -> None:
    """The others send theirs, and wait for a worker that comes late."""
    trace = trained(4, counts=False, data=True)
    assert trace.run(60, evaluation) is None
    trace.workers[0].state = "S"
    begun = trace.training(0, 2, 3, counts=False, data=True)
    assert trace.run(2 * INTERVAL, begun) is None
    assert trace.run(MIN_LIMIT - INTERVAL, idle) is None


def test_a_worker_without_a_rhythm_is_no_stall() -> None:
    trace = RoundTrace(3)
    assert trace.run(600, trace.training(0, 2)) is None


def test_a_pause_that_belongs_to_the_rhythm_of_a_worker_is_no_stall() -> None:
    trace = RoundTrace(3)
    for _ in range(8):
        assert trace.run(20, trace.training(0, 2)) is None
        trace.steps[1] = trace.steps.get(1, 0) + 1
    assert trace.run(3 * 20 - 1, trace.training(0, 2)) is None
    assert trace.run(20, trace.training(0, 2)) is not None


def test_data_that_is_exchanged_beside_the_steps_is_no_rhythm() -> None:
    """The data set is in memory now; the steps take as long as before."""
    trace = RoundTrace(3)
    fetches = trace.training(1, counts=False, data=True)
    for _ in range(8):
        assert trace.run(20, together(fetches, trace.training(0, 2))) is None
        trace.steps[1] = trace.steps.get(1, 0) + 1
    for _ in range(4):
        assert trace.run(20, trace.training(0, 2)) is None
        trace.steps[1] += 1


@pytest.mark.parametrize("gap", [4, 60, 36_000])
def test_a_machine_that_was_frozen_is_no_stall(gap: float) -> None:
    trace = trained()
    trace.now += gap
    assert trace.run(ALONE_LIMIT - 2 * INTERVAL, trace.training(0, 2)) is None
    trace.steps[1] += 1
    assert trace.run(ALONE_LIMIT - INTERVAL, trace.training(0, 2)) is None
    found = trace.run(PAUSE_FACTOR * ALONE_LIMIT, trace.training(0, 2))
    assert found is not None, "the freeze is no pause of its rhythm"


def test_a_limit_of_the_user_replaces_the_learned_one() -> None:
    trace = RoundTrace(3, timeout=40)
    assert trace.run(20, trace.training(0, 1, 2)) is None
    assert trace.run(39, trace.training(0, 2)) is None
    found = trace.run(SLACK + 3, trace.training(0, 2))
    assert found is not None
    assert found.limit == 40


def test_all_workers_that_hang_are_a_stall_of_the_round() -> None:
    trace = trained(data=True)
    found = trace.run(60, idle)
    assert found is not None
    assert (found.code, found.ranks) == (StallCode.TRAINING, (0, 1, 2))
    assert trace.run(60, idle) is None


def test_another_worker_that_hangs_is_found_too_and_a_resumed_one_is_named() -> None:
    trace = trained(4)
    first = trace.run(60, trace.training(0, 2, 3))
    assert first is not None
    assert first.ranks == (1,)
    second = trace.run(60, trace.training(0, 3))
    assert second is not None
    assert second.ranks == (1, 2)
    trace.steps[1] += 1
    trace.now += INTERVAL
    resumed = trace.sample()
    assert isinstance(resumed, Resumed)
    assert (resumed.ranks, resumed.alone) == ((1,), True)
    third = trace.run(60, trace.training(0, 1, 3))
    assert third is not None
    assert third.ranks == (2,)


def test_a_withdrawn_stall_is_looked_at_again_after_twice_the_time() -> None:
    trace = trained()
    found = trace.run(60, trace.training(0, 2))
    assert found is not None
    quiet = trace.now - found.since
    trace.round.withdraw()
    assert trace.run(quiet - 2 * INTERVAL, trace.training(0, 2)) is None
    assert trace.run(3 * INTERVAL, trace.training(0, 2)) == Stalled(StallCode.ALONE, (1,), found.since, found.limit)


def test_a_node_reports_its_quiet_workers_whatever_its_others_do() -> None:
    """Whether workers of other nodes train is not known here."""
    trace = RoundTrace(2, elsewhere=True)
    assert trace.run(20, trace.training(0, 1)) is None
    together_first = trace.run(60, idle)
    assert together_first is not None
    assert together_first.code is StallCode.TRAINING
    alone = trace.run(60, idle)
    assert alone is not None
    assert (alone.code, alone.ranks) == (StallCode.ALONE, (0, 1))


def test_witnesses_have_trained_on_since_a_time() -> None:
    trace = trained(3, counts=False, data=True)
    asked = trace.now
    assert trace.round.witnesses(asked) == 0
    trace.run(2 * WITNESS_SECONDS, trace.training(2, counts=False, data=True))
    assert trace.round.witnesses(asked) == 1
    trace.run(2 * WITNESS_SECONDS, trace.training(0, 2, counts=False, data=True))
    assert trace.round.witnesses(asked) == ENOUGH_WITNESSES
    assert trace.round.witnesses(trace.now) == 0
    counting = trained(2)
    asked = counting.now
    counting.run(2 * WITNESS_SECONDS, counting.training(1))
    assert counting.round.witnesses(asked) == ENOUGH_WITNESSES


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0.5, 20), min_size=8, max_size=20))
def test_no_pause_within_three_times_the_longest_is_a_stall(pauses: list[float]) -> None:
    trace = RoundTrace(3)
    others = trace.training(0, 2)
    for pause in [max(pauses)] * 6 + pauses:
        assert trace.run(pause, others) is None
        trace.steps[1] = trace.steps.get(1, 0) + 1


WAITS = Suspect(0, Place.COLLECTIVE, alone=True)
SLEEPS = Suspect(1, Place.ELSEWHERE, alone=True, file="/u/train.py", line=10, function="load")


def counting(suspect: Suspect, **changes: object) -> Suspect:
    """The same worker, of which nothing else says that it trains."""
    fields = {name: getattr(suspect, name) for name in Suspect.__struct_fields__}
    return Suspect(**{**fields, "counts": True, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("suspects", "code", "ranks"),
    [
        ([counting(SLEEPS)], GuiltCode.IDLE, (1,)),
        ([counting(SLEEPS, busy=True)], GuiltCode.SPINNING, (1,)),
        ([counting(SLEEPS, place=Place.LOCK)], GuiltCode.LOCKED, (1,)),
        ([counting(SLEEPS, lost_child=True)], GuiltCode.CHILD_LOST, (1,)),
        ([Suspect(1, alone=True, state="T")], GuiltCode.STOPPED, (1,)),
        ([Suspect(1, alone=True, state="D")], GuiltCode.BLOCKED_IN_KERNEL, (1,)),
        ([WAITS, SLEEPS], GuiltCode.IDLE, (1,)),
        ([counting(SLEEPS), counting(SLEEPS, rank=2, busy=True)], GuiltCode.IDLE, (1, 2)),
        # It may wait for a request, or for a time.
        ([SLEEPS], None, ()),
        # They wait for a worker that works.
        ([WAITS], None, ()),
        ([WAITS, counting(SLEEPS, place=Place.COLLECTIVE)], None, ()),
        # Without a stack it may be in a collective.
        ([counting(SLEEPS, place=Place.UNKNOWN)], None, ()),
        ([WAITS, Suspect(1, ended=True)], None, ()),
        ([WAITS, counting(SLEEPS, alone=False)], None, ()),
        ([], None, ()),
    ],
)
def test_who_hangs_while_others_train(suspects: list[Suspect], code: GuiltCode | None, ranks: tuple[int, ...]) -> None:
    found = find_alone(suspects)
    assert (None if found is None else found.code) == code
    if found is not None:
        assert found.ranks == ranks
        assert [reason.code for reason in found.reasons[:2]] == [found.code.code, GuiltCode.OTHERS_GO_ON.code]
        assert GuiltCode.PLACE.within(found.reasons) == (found.line is not None)
