"""Which connections carry training, and which only send heartbeats: generated ones, sampled as the agent does."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from dlrover_run.observe.carriers import BEATS, LARGE_BYTES, SMALL_BYTES, Carriers
from dlrover_run.observe.records import Traffic, summarize
from dlrover_run.observe.sock_diag import SocketCounters

STORE = 29500


class Connection:
    """One connection that sends `size` bytes at each of its times, and receives as many."""

    def __init__(self, inode: int = 7) -> None:
        self.inode = inode
        self.bytes = 0
        self.sent_at = 0.0

    def send(self, size: int, at: float) -> None:
        self.bytes += size
        self.sent_at = at

    def counters(self, at: float) -> SocketCounters:
        age = at - self.sent_at
        return SocketCounters(self.inode, 1000, 2000, self.bytes, self.bytes, age, age, 0, 0)


class Sampled:
    """Connections that send by themselves, and the samples of them. `now` is the time of the last sample."""

    def __init__(self, seed: int = 1) -> None:
        self.random = Random(seed)
        self.carriers = Carriers()
        self.now = 0.0
        self.connection = Connection()
        self._next = 0.5

    def run(self, seconds: float, size: int, period: Callable[[], float]) -> Traffic:
        """Send `size` bytes in each period; the traffic of the worker at the end."""
        end = self.now + seconds
        while self.now < end:
            self.now += self.random.uniform(0.75, 1.25)
            while self._next <= self.now:
                self.connection.send(size, self._next)
                self._next += period()
            one = self.connection.counters(self.now)
            self.carriers.take([one], self.now)
        return summarize([one], STORE, self.carriers)


@pytest.mark.parametrize("seed", range(20))
def test_a_heartbeat_is_known_and_counts_no_more(seed: int) -> None:
    sampled = Sampled(seed)
    known = sampled.run(30, 100, lambda: 1.0)
    assert known.carried == 0
    assert known.sent_age is None, "its age says nothing of a collective"
    assert known.data_age is None
    later = sampled.run(30, 100, lambda: 1.0)
    assert later.counted == known.counted
    assert later.acked > known.acked


@pytest.mark.parametrize("seed", range(20))
def test_small_data_of_a_job_that_makes_many_steps_are_no_heartbeat(seed: int) -> None:
    sampled = Sampled(seed)
    before = sampled.run(30, 8, lambda: 0.05)
    after = sampled.run(30, 8, lambda: 0.05)
    assert before.counted is not None
    assert after.counted is not None
    assert after.counted > before.counted
    assert after.sent_age is not None


def test_small_data_at_uneven_times_are_no_heartbeat() -> None:
    sampled = Sampled()
    periods = iter([1.0, 9.0] * 50)
    before = sampled.run(60, 100, lambda: next(periods))
    after = sampled.run(60, 100, lambda: next(periods))
    assert after.counted != before.counted


def test_a_report_on_a_keepalive_does_not_count_and_training_on_it_does() -> None:
    sampled = Sampled()
    known = sampled.run(30, 100, lambda: 1.0)
    sampled.connection.send(100 * SMALL_BYTES, sampled.now)
    report = sampled.run(1, 100, lambda: 1.0)
    assert (report.carried, report.counted) == (known.carried, known.counted)
    sampled.connection.send(2 * LARGE_BYTES, sampled.now)
    trains = sampled.run(1, 100, lambda: 1.0)
    assert trains.carried != known.carried
    assert trains.sent_age is not None
    assert sampled.run(60, 100, lambda: 1.0).counted != trains.counted, "what has carried training is no keep-alive"


def test_a_connection_that_sends_its_reports_first_becomes_a_keepalive() -> None:
    sampled = Sampled()
    sampled.connection.send(50 * SMALL_BYTES, 0.1)
    assert sampled.run(2 * BEATS + 4, 100, lambda: 1.0).data_age is None


def test_large_data_are_carried_and_a_closed_connection_is_forgotten() -> None:
    sampled = Sampled()
    before = sampled.run(5, 1_000_000, lambda: 1.0)
    after = sampled.run(5, 1_000_000, lambda: 1.0)
    assert after.carried is not None
    assert before.carried is not None
    assert after.carried > before.carried
    one = sampled.connection.counters(sampled.now)
    sampled.carriers.take([], sampled.now)
    assert summarize([one], STORE, sampled.carriers).carried == 0
