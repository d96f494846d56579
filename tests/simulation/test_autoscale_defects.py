"""The sixteen defects of the published rule for scaling by throughput: each is a fact that the published rule fails
and ours fulfills, in the same job where both can play it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
import pytest

from dlrover_run.features.autoscale.measure import observe
from dlrover_run.features.autoscale.model import AutoscaleState, Measurement, Sizes, StepsReport
from dlrover_run.features.autoscale.rules import AutoscaleRules
from dlrover_run.output.relay.log_steps import Budget, LogSteps
from simulation.autoscale.job import Account, Ours, Published, run
from simulation.autoscale.published import OBSERVATIONS, Controller, log_line, parse
from simulation.autoscale.worlds import HOUR, Curve, World

LINEAR = Curve("linear")
FLAT = Curve("flat")
LINE = "Epoch: [17][  50/1563]\tTime  0.258 ( 0.385)\tData  0.155 ( 0.170)\tLoss 2.5e+00\tAcc@1  42.2\tAcc@5  71.9"
REGEX = r"Epoch: \[\d+\]\[ *(\d+)/"


def world(curve: Curve, most: int, **more: object) -> World:
    """A job without noise, of 1 to `most` nodes, in a cluster with twice as many."""
    plain = World(curve, Sizes(1, most), start=1, here=2 * most, hours=1.5, pause=5.0)
    return replace(plain, **more)  # type: ignore[arg-type]


def ended(job: World) -> tuple[int, int]:
    """With how many nodes the job ends: by our rule, and by the published one."""
    ours, published = run(job), run(job, Published)
    assert ours.outside is None
    return ours.ended_with, published.ended_with


def looks(times: dict[int, float], fewest: int, most: int, number: int = 40) -> list[int]:
    """The numbers of replicas that the published rule comes to, from the seconds of a step at each."""
    controller, replicas, found = Controller(), fewest, [fewest]
    for place in range(number):
        line = log_line(1, place, times.get(replicas, 0.5))
        replicas = controller.look("job", replicas, fewest, most, False, False, line)
        found += [replicas] if replicas != found[-1] else []
    return found


def counted(lines: list[str]) -> list[int | None]:
    """The steps that `--progress-regex` finds in these lines."""

    class Counter:
        def __init__(self) -> None:
            self.numbers: list[int | None] = []

        def count(self, numbers: list[int | None]) -> None:
            self.numbers += numbers

    counter = Counter()
    steps = LogSteps(REGEX, counter, Budget(lambda: 0.0, lambda: 0.0), pytest.fail)  # type: ignore[arg-type]
    steps.feed("".join(f"{line}\n" for line in lines).encode())
    return counter.numbers


def test_01_a_doubling_is_cut_to_the_range() -> None:
    job = world(LINEAR, 3)
    assert run(job, Published).outside == 4
    ours = run(job)
    assert (ours.outside, ours.ended_with) == (None, 3)


def test_02_one_observation_does_not_decide() -> None:
    # Two nodes do a tenth less than one. The fifth step of the log happens to be as short as the shortest of one node.
    controller, replicas = Controller(), 1
    for place, seconds in enumerate([0.26] * 6 + [0.58, 0.58, 0.58, 0.58, 0.50]):
        replicas = controller.look("job", replicas, 1, 8, False, False, log_line(1, place, seconds))
    assert replicas == 4
    curve = Curve("decline", serial=1.2, crosstalk=0.011)
    job = world(curve, 8, noise=0.08, outliers=0.05)
    assert [run(replace(job, seed=seed)).ended_with for seed in range(3)] == [1, 1, 1]


def test_03_a_gain_that_is_not_worth_the_nodes_does_not_count() -> None:
    # Twice the nodes do one percent more.
    assert ended(world(Curve("amdahl", serial=0.98), 8)) == (1, 8)


def test_04_a_job_with_slow_steps_scales() -> None:
    assert ended(world(LINEAR, 4, step=3.0)) == (4, 1)


def test_05_steps_are_read_by_an_expression_that_says_which_number_they_are() -> None:
    parsed = parse(LINE)
    assert parsed is not None
    assert parsed.batch == 17, "the epoch, not the batch"
    assert counted([LINE]) == [50]


def test_06_a_job_shares_nothing_with_another_one_of_its_name() -> None:
    controller = Controller()
    for place in range(40):
        controller.look("resnet", 1, 1, 8, False, False, log_line(1, place, 0.2 if place < 7 else 0.9))
    assert controller.jobs["resnet"].condition == "Stop"
    for place in range(40):
        # Another job of that name, which would gain from more nodes.
        assert controller.look("resnet", 1, 1, 8, False, False, log_line(1, place, 0.2)) == 1
    assert ended(world(FLAT, 4))[0] == 1
    assert ended(world(LINEAR, 4))[0] == 4


def test_07_a_new_coordinator_continues() -> None:
    controller, replicas = Controller(), 1
    for place in range(8):
        replicas = controller.look("job", replicas, 1, 8, False, False, log_line(1, place, 0.2))
    assert replicas == 2
    controller = Controller()
    for place in range(OBSERVATIONS):
        controller.look("job", replicas, 1, 8, False, False, log_line(1, place, 0.2))
    with pytest.raises(KeyError):
        controller.look("job", replicas, 1, 8, False, False, log_line(1, 9, 0.2))

    def one(taken_over: float) -> Account:
        return run(world(LINEAR, 8, noise=0.05, taken_over=taken_over))

    assert one(taken_over=HOUR).changes == one(taken_over=0.0).changes


class Moved(World):
    """A job whose input no longer limits it after an hour."""

    def speed(self, size: int, at: float) -> float:
        return 1.5 * size if at > HOUR else min(size, 2.0)


def test_08_the_size_follows_a_job_that_changes_also_down() -> None:
    job = Moved(LINEAR, Sizes(1, 8), start=1, here=8, hours=3.0, pause=5.0)
    assert ended(job) == (8, 2)
    large = replace(world(FLAT, 8), start=8)
    assert run(large).ended_with == 1
    controller = Controller()
    found = [controller.look("job", 8, 1, 8, False, False, log_line(1, place, 0.2)) for place in range(5)]
    assert set(found) == {8}


def test_09_a_shortage_does_not_toggle_the_size() -> None:
    controller, replicas = Controller(), 1
    for place in range(11):
        replicas = controller.look("job", replicas, 1, 8, False, False, log_line(1, place, 0.2))
    assert replicas == 4
    # A pod pends, as long as machines are missing.
    assert [controller.look("job", replicas, 1, 8, True, False, "") for _ in range(4)] == [2, 4, 2, 4]
    ours = run(world(LINEAR, 8, here=3, hours=6.0))
    assert [size for _, size in ours.changes[-2:]] == [2, 3]
    assert len(ours.changes) <= Sizes(1, 8).max_changes


def test_10_an_odd_line_ends_nothing() -> None:
    odd = "Epoch: done"
    with pytest.raises(IndexError):
        parse(odd)
    assert counted([odd, LINE]) == [50]


def test_11_a_job_that_divides_its_batch_is_understood() -> None:
    # A step of two nodes takes as long as one of one.
    assert ended(world(FLAT, 8, strong=True)) == (1, 8)


def test_12_the_batch_of_the_job_can_be_limited() -> None:
    job = world(LINEAR, 8)
    assert run(job, Published).ended_with == 8
    assert run(job, partial(Ours, max_batch=2.0)).ended_with == 2


def test_13_a_worker_that_fails_once_ends_nothing() -> None:
    assert ended(world(LINEAR, 8, fails_at=30.0)) == (8, 1)


def test_14_the_first_steps_of_a_size_are_not_measured() -> None:
    controller = Controller()
    for seconds in (0.9, 0.9, 0.2):
        controller.look("job", 1, 1, 8, False, False, log_line(1, 1, seconds))
    assert controller.observed["job"][1][0] == 0.9
    measurement, at, steps = Measurement(), 0.0, 0
    while len(measurement.blocks) < OBSERVATIONS:
        steps, at = steps + 1, at + (5.969 if steps == 0 else 0.25)
        measurement = observe(AutoscaleRules(), measurement, 1, 1, StepsReport(steps, at), False)
    assert max(measurement.blocks) - min(measurement.blocks) < 0.01


def test_15_a_change_must_pay_for_its_pause() -> None:
    job = world(LINEAR, 2, hours=0.3, pause=300.0, tells_end=True)
    assert (len(run(job).changes), len(run(job, Published).changes)) == (1, 2)


def test_16_all_nodes_are_counted_also_the_first() -> None:
    # A master and one worker train: no number of nodes does more work than these two. A step takes longer with each.
    assert looks({workers: 0.1 * (workers + 1) for workers in range(1, 9)}, 1, 4) == [1, 2, 4]
    assert run(replace(world(FLAT, 5), sizes=Sizes(2, 5), start=2)).ended_with == 2


def test_the_state_of_ours_is_a_record() -> None:
    assert msgspec.json.decode(msgspec.json.encode(AutoscaleState()), type=AutoscaleState) == AutoscaleState()
