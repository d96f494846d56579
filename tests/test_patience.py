"""When a node tries again, gives up, and calls a master silent: in virtual time."""

from __future__ import annotations

from dlrover_run.coordination.coordinator import RETURN_GRACE
from dlrover_run.coordination.records import NodePhase
from dlrover_run.rendezvous.reconnect import BACKOFF_FIRST, BACKOFF_MAX, ID_IN_USE_TIMEOUT, ReconnectBackoff, Silence


def search(chance: float = 1.0, join_timeout: float = 600.0) -> ReconnectBackoff:
    return ReconnectBackoff(join_timeout, 0.0, lambda: chance)


def test_the_first_attempt_is_made_at_once_and_the_pauses_grow_to_a_bound() -> None:
    looking = search()
    pauses = []
    for _ in range(40):
        pauses.append(looking.pause())
        looking.failed()
    assert pauses[:4] == [0.0, 2 * BACKOFF_FIRST, 4 * BACKOFF_FIRST, 8 * BACKOFF_FIRST]
    assert pauses == sorted(pauses)
    assert pauses[-1] == BACKOFF_MAX < RETURN_GRACE


def test_a_pause_is_any_part_of_its_bound() -> None:
    looking = search(chance=0.25)
    looking.failed()
    assert looking.pause() == 0.25 * 2 * BACKOFF_FIRST


def test_a_master_that_was_held_is_looked_for_at_once_but_one_that_ends_every_stream_is_not() -> None:
    looking = search()
    looking.failed()
    looking.connected(10.0)
    looking.lost(10.0 + BACKOFF_MAX)
    assert looking.pause() == 0
    looking.connected(20.0)
    looking.lost(20.1)
    assert looking.pause() > 0


def test_a_node_without_workers_gives_up_and_one_with_workers_never_does() -> None:
    looking = search()
    assert looking.left(0.0) == 600
    assert looking.left(599.0) == 1
    assert looking.left(601.0) == 0
    looking.see(NodePhase.RUNNING, 602.0)
    assert looking.left(100_000.0) is None


def test_the_patience_begins_when_the_master_is_away_and_the_workers_have_ended() -> None:
    looking = search()
    looking.connected(1.0)
    looking.see(NodePhase.RUNNING, 2.0)
    assert looking.left(3.0) is None
    looking.lost(1000.0)
    assert looking.left(5000.0) is None
    looking.see(NodePhase.FAILED, 5000.0)
    looking.see(NodePhase.WAITING, 5100.0)
    assert looking.left(5200.0) == 400
    looking.connected(5300.0)
    assert looking.left(5300.0) is None


def test_a_refusal_that_may_pass_is_borne_for_a_while() -> None:
    looking = search()
    assert not looking.refused(100.0)
    assert not looking.refused(100.0 + ID_IN_USE_TIMEOUT - 1)
    assert looking.refused(100.0 + ID_IN_USE_TIMEOUT)
    looking.connected(200.0)
    assert not looking.refused(201.0)
    # Nobody who is away refuses anybody.
    looking.failed()
    assert not looking.refused(500.0)


def test_a_node_that_is_refused_and_then_finds_nobody_still_gives_up() -> None:
    looking = search()
    looking.connected(0.0)
    looking.refused(10.0)
    looking.failed()
    assert looking.left(11.0) == 599


def test_a_master_that_says_nothing_is_silent_at_the_limit() -> None:
    silence = Silence(9.0, 0.0)
    assert not silence.too_long(3.0, 3.0)
    silence.hear(3.0)
    assert not silence.too_long(9.0, 9.0)
    assert silence.deadline == 12
    assert silence.too_long(12.0, 12.001)


def test_a_process_that_was_stopped_does_not_accuse_the_master() -> None:
    silence = Silence(9.0, 0.0)
    # It was to look at 3 s, and was stopped until 60 s: what the master said meanwhile is still to be read.
    assert not silence.too_long(3.0, 60.0)
    assert not silence.too_long(63.0, 63.0)
    assert silence.too_long(silence.deadline, silence.deadline)
    assert silence.deadline >= 69


def test_a_stop_just_before_the_limit_does_not_count_either() -> None:
    silence = Silence(9.0, 0.0)
    assert not silence.too_long(9.0, 40.0)
