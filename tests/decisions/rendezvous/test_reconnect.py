"""When a node tries to connect again and when it gives up, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from dlrover_run.coordination.coordinator import RETURN_GRACE
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.rendezvous.reconnect import (
    BACKOFF_FIRST,
    BACKOFF_MAX,
    ID_IN_USE_TIMEOUT,
    ReconnectBackoff,
    wait_for_event,
)


def reconnect(rng: float = 1.0, join_timeout: float = 600.0) -> ReconnectBackoff:
    return ReconnectBackoff(join_timeout, 0.0, lambda: rng)


def test_the_first_attempt_is_made_at_once_and_the_pauses_grow_to_a_bound() -> None:
    backoff = reconnect()
    pauses = []
    for _ in range(40):
        pauses.append(backoff.next_pause())
        backoff.note_failed()
    assert pauses[:4] == [0.0, 2 * BACKOFF_FIRST, 4 * BACKOFF_FIRST, 8 * BACKOFF_FIRST]
    assert pauses == sorted(pauses)
    assert pauses[-1] == BACKOFF_MAX < RETURN_GRACE


def test_a_pause_is_any_part_of_its_bound() -> None:
    backoff = reconnect(rng=0.25)
    backoff.note_failed()
    assert backoff.next_pause() == 0.25 * 2 * BACKOFF_FIRST


def test_a_master_that_was_held_is_looked_for_at_once_but_one_that_ends_every_stream_is_not() -> None:
    backoff = reconnect()
    backoff.note_failed()
    backoff.note_connected(10.0)
    backoff.note_disconnected(10.0 + BACKOFF_MAX)
    assert backoff.next_pause() == 0
    backoff.note_connected(20.0)
    backoff.note_disconnected(20.1)
    assert backoff.next_pause() > 0


def test_a_node_without_workers_gives_up_and_one_with_workers_never_does() -> None:
    backoff = reconnect()
    assert backoff.time_left(0.0) == 600
    assert backoff.time_left(599.0) == 1
    assert backoff.time_left(601.0) == 0
    backoff.note_phase(NodePhase.RUNNING, 602.0)
    assert backoff.time_left(100_000.0) is None


def test_the_timeout_begins_when_the_master_is_away_and_the_workers_have_ended() -> None:
    backoff = reconnect()
    backoff.note_connected(1.0)
    backoff.note_phase(NodePhase.RUNNING, 2.0)
    assert backoff.time_left(3.0) is None
    backoff.note_disconnected(1000.0)
    assert backoff.time_left(5000.0) is None
    backoff.note_phase(NodePhase.FAILED, 5000.0)
    backoff.note_phase(NodePhase.WAITING, 5100.0)
    assert backoff.time_left(5200.0) == 400
    backoff.note_connected(5300.0)
    assert backoff.time_left(5300.0) is None


def test_a_temporary_refusal_is_retried_for_a_while() -> None:
    backoff = reconnect()
    assert not backoff.note_refused(100.0)
    assert not backoff.note_refused(100.0 + ID_IN_USE_TIMEOUT - 1)
    assert backoff.note_refused(100.0 + ID_IN_USE_TIMEOUT)
    backoff.note_connected(200.0)
    assert not backoff.note_refused(201.0)
    # A rendezvous backend that does not answer does not refuse.
    backoff.note_failed()
    assert not backoff.note_refused(500.0)


def test_a_node_that_is_refused_and_then_finds_no_master_still_gives_up() -> None:
    backoff = reconnect()
    backoff.note_connected(0.0)
    backoff.note_refused(10.0)
    backoff.note_failed()
    assert backoff.time_left(11.0) == 599


@pytest.mark.parametrize("comes", [True, False])
def test_an_event_is_waited_for_within_a_timeout(comes: bool) -> None:
    async def whole() -> bool:
        event = asyncio.Event()
        if comes:
            asyncio.get_running_loop().call_later(0.001, event.set)
        return await wait_for_event(event, None if comes else 0.001)

    assert asyncio.run(whole()) is comes


def test_a_cancellation_that_comes_together_with_the_event_is_not_lost() -> None:
    async def whole() -> None:
        event = asyncio.Event()
        task = asyncio.ensure_future(wait_for_event(event, 1000))
        await asyncio.sleep(0)
        event.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(whole())
