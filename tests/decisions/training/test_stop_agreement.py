"""All ranks stop after the same step, whenever each of them gets the signal; and none, if one has been lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from dlrover_run.training.stop_agreement import StopAgreement

STEPS = 12


class Job:
    """Ranks that take turns in an order drawn by chance. A step has a collective that each rank begins without waiting:
    it is finished when all have begun it. `lost` is a rank that ends before it begins that step; with `breaks_off` its
    collectives end on the others, with a state that is good for nothing."""

    def __init__(
        self, seed: int, world_size: int, lost: tuple[int, int] | None = None, breaks_off: bool = False
    ) -> None:
        self.breaks_off = breaks_off
        self.is_lost = False
        self.world_size = world_size
        self.lost = lost
        self.begun = [0] * world_size
        self.numbers: dict[str, int] = {}
        self.values: dict[str, str] = {}
        self.stopped: dict[int, int] = {}
        self._chance = random.Random(seed)
        self._turn = threading.Condition()
        self._waits: dict[int, Callable[[], bool]] = {rank: lambda: True for rank in range(world_size)}
        self._current = -1

    def run(self, signals: list[int]) -> dict[int, int]:
        """The step after which each rank has stopped and may save; a rank that waits for ever is in none."""
        threads = [threading.Thread(target=self._rank, args=(rank, at)) for rank, at in enumerate(signals)]
        for thread in threads:
            thread.start()
        with self._turn:
            self._choose()
        for thread in threads:
            thread.join()
        return self.stopped

    def give_turn(self, rank: int, until: Callable[[], bool] = lambda: True) -> bool:
        """Let other ranks go on; whether this holds now. It does not if no rank can go on."""
        with self._turn:
            self._waits[rank] = until
            self._choose()
            self._await_turn(rank)
        return until()

    def _rank(self, rank: int, signal_at: int) -> None:
        agreement = StopAgreement(OfRank(self, rank))
        with self._turn:
            self._await_turn(rank)
        try:
            for step in range(1, STEPS + 1):
                if self.lost == (rank, step):
                    self.is_lost = True
                    return
                self.begun[rank] = step
                self.give_turn(rank)
                if step >= signal_at and agreement.stops_after(step):
                    self.stopped[rank] = step
                    return
        except RuntimeError:
            pass
        finally:
            with self._turn:
                del self._waits[rank]
                self._choose()

    def _await_turn(self, rank: int) -> None:
        self._turn.wait_for(lambda: self._current == rank)

    def _choose(self) -> None:
        able = [rank for rank, until in self._waits.items() if until()] or list(self._waits)
        self._current = self._chance.choice(sorted(able)) if able else -1
        self._turn.notify_all()


class OfRank:
    """One rank's view of them."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank

    @property
    def world_size(self) -> int:
        return self._job.world_size

    def synchronize(self) -> None:
        job, own = self._job, self._job.begun[self._rank]
        if not job.give_turn(self._rank, lambda: min(job.begun) >= own or (job.breaks_off and job.is_lost)):
            raise RuntimeError("the device waits for ever")

    def add(self, key: str, amount: int) -> int:
        self._job.give_turn(self._rank)
        self._job.numbers[key] = self._job.numbers.get(key, 0) + amount
        return self._job.numbers[key]

    def first(self, key: str, proposal: str) -> str:
        self._job.give_turn(self._rank)
        return self._job.values.setdefault(key, proposal)

    def publish(self, key: str, value: str) -> None:
        self._job.values[key] = value

    def await_value(self, key: str, timeout: float) -> bool:
        return self._job.give_turn(self._rank, lambda: key in self._job.values)


@pytest.mark.parametrize("seed", range(60))
def test_all_stop_after_the_same_step_whenever_they_get_the_signal(seed: int) -> None:
    chance = random.Random(seed)
    world = chance.randint(1, 4)
    signals = [chance.randint(1, 8) for _ in range(world)]
    stopped = Job(seed, world).run(signals)
    assert len(stopped) == world
    assert len(set(stopped.values())) == 1
    # A rank without the signal may be ahead of those that have it.
    assert max(signals) < stopped[0] <= max(signals) + 2


@pytest.mark.parametrize("breaks_off", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_none_stops_if_one_has_been_lost_before_the_step(seed: int, breaks_off: bool) -> None:
    chance = random.Random(seed)
    world = chance.randint(2, 4)
    rank, step = chance.randrange(world), chance.randint(1, 8)
    stopped = Job(seed, world, (rank, step), breaks_off).run([chance.randint(1, 8) for _ in range(world)])
    assert all(at < step for at in stopped.values())
    assert len(stopped) in (0, world), "one that was lost later had stopped with the others"
