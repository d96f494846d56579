"""Heartbeat timeouts and stalls, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_run.background import LONG_PAUSE
from dlrover_run.rendezvous.failure_detector import (
    PAUSE_CHECK_INTERVAL,
    PAUSE_TOLERANCE,
    FailureDetector,
    PauseDetector,
)


def test_failed_peers_come_in_the_order_of_their_last_heartbeats() -> None:
    detector: FailureDetector[str] = FailureDetector(9.0)
    detector.heartbeat("a", 0.0)
    detector.heartbeat("b", 1.0)
    detector.heartbeat("c", 2.0)
    detector.heartbeat("a", 5.0)
    assert detector.next_deadline() == pytest.approx(10.0, abs=0.01)
    assert detector.failed_peers(10.0) == []
    assert detector.failed_peers(11.5) == ["b", "c"]
    detector.remove("b")
    detector.remove("c")
    assert detector.next_deadline() == pytest.approx(14.0, abs=0.01)
    detector.remove("a")
    assert detector.next_deadline() is None


@given(st.lists(st.tuples(st.floats(0.01, 5), st.sampled_from("abc"), st.floats(0, 30)), max_size=30))
def test_stalls_do_not_count(events: list[tuple[float, str, float]]) -> None:
    detector: FailureDetector[str] = FailureDetector(9.0)
    now, stalled, heartbeats = 0.0, 0.0, {}
    for pause, who, late in events:
        now += pause + late
        detector.compensate_stall(late)
        stalled += late
        detector.heartbeat(who, now)
        heartbeats[who] = now - stalled
        now += 6
        expected = {name for name, time in heartbeats.items() if now - stalled - time > 9.0 + 1e-6}
        assert (
            expected
            <= set(detector.failed_peers(now))
            <= {n for n, t in heartbeats.items() if now - stalled - t > 9 - 1e-6}
        )


@given(st.lists(st.floats(0, 40), min_size=1, max_size=30))
def test_a_stall_is_measured_but_for_one_interval(stops: list[float]) -> None:
    stalls, now = PauseDetector(100.0), 100.0
    for stop in stops:
        # The owner is on time until some moment, and wakes up a stop later.
        now = stalls.next_check - PAUSE_CHECK_INTERVAL / 3
        assert stalls.paused_for(now) == 0.0
        now += stop
        found = stalls.paused_for(now)
        assert stop - PAUSE_CHECK_INTERVAL / 3 - PAUSE_TOLERANCE <= found <= stop
        assert stalls.paused_for(now) == 0.0
        assert stalls.next_check > now


def watching(now: float = 0.0) -> FailureDetector[str]:
    detector: FailureDetector[str] = FailureDetector(9.0)
    detector.heartbeat("master", now)
    return detector


def test_a_peer_fails_at_the_timeout_after_its_last_heartbeat() -> None:
    detector = watching()
    assert not detector.failed_peers(3.0, due=3.0)
    detector.heartbeat("master", 3.0)
    assert not detector.failed_peers(9.0, due=9.0)
    assert detector.next_deadline() == pytest.approx(12.0, abs=0.01)
    assert detector.failed_peers(12.001, due=12.0) == ["master"]


def test_a_process_that_was_stopped_does_not_declare_the_master_failed() -> None:
    # A check was due at 3 s, and the process was stopped until 60 s: what came meanwhile is still to be read.
    detector = watching()
    assert not detector.failed_peers(60.0, due=3.0)
    assert not detector.failed_peers(63.0, due=63.0)
    assert detector.failed_peers(69.1, due=69.0) == ["master"]


def test_a_stop_just_before_the_deadline_does_not_count_either() -> None:
    assert not watching().failed_peers(40.0, due=9.0)


def test_a_timer_that_is_a_little_late_changes_nothing() -> None:
    assert watching().failed_peers(9.0 + LONG_PAUSE, due=9.0) == ["master"]
