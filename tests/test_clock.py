"""The clocks of a node and its master: told where they differ and the job checks its nodes, and decided by nowhere."""

from __future__ import annotations

import asyncio
import time

import pytest
from master_node import serving
from scripted_master import Script, Stream
from test_master_board import alone, meeting, until_the_end

from dlrover_run.backends.clock import CLOCK_SKEW_LIMIT, clock_skew, tell_skew
from dlrover_run.coordination.rules import CHECK_ALWAYS, CHECK_NEVER, CHECK_ONCE, Rules
from dlrover_run.wire import messages
from dlrover_run.wire.messages import BadMessage, Join, Welcome

HOUR = 3600.0


@pytest.mark.parametrize(
    ("master", "own", "round_trip", "skew"),
    [
        (1000.0, 1000.0, 0.0, None),
        (1000.0, 1000.0 + CLOCK_SKEW_LIMIT, 0.0, None),
        (1000.0, 1010.0, 0.0, 10.0),
        (1000.0, 990.0, 0.0, -10.0),
        (1000.0, 1010.0, 2.0, 9.0),
        (1000.0, 990.0, 2.0, -11.0),
    ],
)
def test_the_skew_is_counted_from_the_middle_of_the_round_trip(
    master: float, own: float, round_trip: float, skew: float | None
) -> None:
    assert clock_skew(master, own, round_trip) == skew


@pytest.mark.parametrize("said_at", [0.0, 7.0, 20.0])
def test_a_master_that_is_slow_to_answer_makes_no_clock_wrong(said_at: float) -> None:
    """The two clocks are the same one, and the word came 20 s after it was asked for, whenever it was said."""
    assert clock_skew(1000.0 + said_at, 1020.0, 20.0) is None


def test_the_warning_has_the_figure_the_direction_and_what_to_do() -> None:
    assert "is 37.2 s behind the master's" in tell_skew(-37.24)
    assert "is 3,600.0 s ahead of the master's" in tell_skew(HOUR)
    assert "NTP" in tell_skew(HOUR)
    assert "\n" not in tell_skew(HOUR)


def with_clock(ahead: float | None, check: int) -> Script:
    """A master whose clock is that many seconds ahead of the node's; None when it does not say its time."""

    async def script(stream: Stream) -> None:
        await stream.challenge()
        assert isinstance(await stream.hear(), Join)
        said = 0.0 if ahead is None else time.time() + ahead
        await stream.say(Welcome(messages.rule_values(Rules(check=check)), time=said))
        await stream.assign(reason="taken in")
        await until_the_end(stream)

    return script


def told_by(*scripts: Script) -> list[str]:
    """What the person at the node is told of clocks, by a node that loses its master as often as there are scripts."""
    said: list[str] = []

    async def scene() -> None:
        async with meeting(*scripts) as (node, _):
            await node.until(lambda: node.board.assignment.reason == "taken in")
            said.extend(node.said)

    alone(scene)
    return [line for line in said if "clock" in line]


@pytest.mark.parametrize("check", [CHECK_ONCE, CHECK_ALWAYS])
def test_a_node_whose_clock_is_behind_says_so_when_the_job_checks_its_nodes(check: int) -> None:
    (line,) = told_by(with_clock(HOUR, check))
    assert line.startswith("warning: the clock of this node is 3,")
    assert "s behind the master's" in line


def test_a_node_whose_clock_is_ahead_says_so() -> None:
    (line,) = told_by(with_clock(-HOUR, CHECK_ONCE))
    assert "s ahead of the master's" in line


def test_nothing_is_said_in_a_job_without_a_check() -> None:
    assert told_by(with_clock(HOUR, CHECK_NEVER)) == []


@pytest.mark.parametrize("ahead", [0.0, None])
def test_nothing_is_said_of_clocks_that_agree_or_that_nobody_knows(ahead: float | None) -> None:
    assert told_by(with_clock(ahead, CHECK_ONCE)) == []


def test_it_is_said_once_however_often_the_master_is_met() -> None:
    async def scene() -> None:
        async def welcome_and_go(stream: Stream) -> None:
            await stream.challenge()
            assert isinstance(await stream.hear(), Join)
            await stream.say(Welcome(messages.rule_values(Rules(check=CHECK_ONCE)), time=time.time() + HOUR))

        async with meeting(welcome_and_go, with_clock(2 * HOUR, CHECK_ONCE)) as (node, server):
            await node.until(lambda: node.board.assignment.reason == "taken in")
            assert server.streams == 2
            assert len([line for line in node.said if "clock" in line]) == 1

    alone(scene)


def test_a_real_master_says_its_time() -> None:
    async def scene() -> None:
        async with serving() as bed:
            node = bed.node()
            before = time.time()
            welcome = await node.join()
            assert before <= welcome.time <= time.time()
            node.cut()

    asyncio.run(scene())


@pytest.mark.parametrize("said", ["-1", "1e13", '"noon"', "null"])
def test_a_time_that_is_none_is_refused(said: str) -> None:
    with pytest.raises(BadMessage):
        messages.from_master(b'{"type":"welcome","rules":{},"time":%s}' % said.encode())
