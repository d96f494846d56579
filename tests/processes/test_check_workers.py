"""The check processes of a node: they follow orders, and the exit of each is detected at once and described."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from support.harness import WAIT, WORKERS, open_descriptors

from dlrover_run.features.node_check.node.check_workers import CheckWorkers, CheckWorkersLost
from dlrover_run.processes.process import ProcessSpec, spawn

COMPUTE = {"do": "compute", "seconds": 0.5}
ARGV = (sys.executable, "-u", str(WORKERS / "fake_check"))


async def spawned(start: ProcessSpec) -> int:
    return spawn(start)


def with_check_workers(scene: Callable[[CheckWorkers], Awaitable[None]], workers: int = 2) -> None:
    """Start check workers, run `scene` with them and close them; no process of them may be left."""

    async def play() -> None:
        group = CheckWorkers(ARGV, [{**os.environ, "LOCAL_RANK": str(rank)} for rank in range(workers)])
        try:
            await group.start(spawned)
            pids = group.pids
            assert len(pids) == workers
            await scene(group)
        finally:
            await group.end()
        assert not group.pids
        assert not [pid for pid in pids if psutil.pid_exists(pid)]

    before = open_descriptors()
    asyncio.run(play())
    assert not open_descriptors() - before


@pytest.fixture(autouse=True)
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_local_rank_answers_every_order_in_rank_order() -> None:
    async def scene(group: CheckWorkers) -> None:
        computed = await group.run([COMPUTE] * 2, WAIT)
        assert [(answer.device, answer.tflops) for answer in computed] == [("fake", 1.0), ("fake", 2.0)]
        linked = await group.run([{"do": "link", "name": "1/1/0/0-1"}] * 2, WAIT)
        assert [(answer.name, answer.gigabytes) for answer in linked] == [("1/1/0/0-1", 8.0), ("1/1/0/0-1", 7.0)]
        assert group.idle

    with_check_workers(scene)


@pytest.mark.parametrize(
    ("behaviour", "clause", "own"),
    [
        ("die 9", "the check process of local rank 1 was killed by SIGKILL: what it said last", True),
        ("die 6", "the check process of local rank 1 was killed by SIGABRT (abort): what it said last", False),
        ("exit", "the check process of local rank 1 ended with code 1: LookupError: nothing there", False),
    ],
)
def test_the_exit_of_one_is_reported_at_once_though_another_never_answers(
    stage: Path, behaviour: str, clause: str, own: bool
) -> None:
    (stage / "behave").write_text(f"0 compute hang\n1 compute {behaviour}\n")

    async def scene(group: CheckWorkers) -> None:
        with pytest.raises(CheckWorkersLost) as lost:
            await group.run([COMPUTE] * 2, WAIT)
        assert str(lost.value) == clause
        assert lost.value.local is own
        assert not group.idle

    with_check_workers(scene)


def test_one_that_does_not_answer_in_time_is_named(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stage / "behave").write_text("1 compute hang\n")
    limit = 2 * WAIT

    async def scene(group: CheckWorkers) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        with monkeypatch.context() as frozen:
            frozen.setattr(loop, "time", lambda: now)
            answers = asyncio.ensure_future(group.run([COMPUTE] * 2, limit))
            await asyncio.sleep(0)
        # The time is over when the other process has answered, however long that takes on a busy machine.
        await asyncio.wait([group._processes[0].answer], timeout=WAIT)
        monkeypatch.setattr(loop, "time", lambda: now + limit)
        with pytest.raises(
            CheckWorkersLost, match=rf"^the check process of local rank 1 gave no answer in {limit:g} s$"
        ) as lost:
            await answers
        assert not lost.value.local
        assert not group.idle

    with_check_workers(scene)


def test_a_process_that_exited_between_requests_is_detected() -> None:
    async def scene(group: CheckWorkers) -> None:
        await group.run([COMPUTE] * 2, WAIT)
        assert group.idle
        first = min(group.pids)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(CheckWorkersLost, match="was killed by SIGKILL"):
            await group.run([COMPUTE] * 2, WAIT)
        assert not group.idle
        with pytest.raises(CheckWorkersLost, match="was killed by SIGKILL"):
            await group.run([COMPUTE] * 2, WAIT)

    with_check_workers(scene)


def test_an_invalid_answer_is_a_problem_of_that_rank(stage: Path) -> None:
    (stage / "behave").write_text("1 compute babble\n")

    async def scene(group: CheckWorkers) -> None:
        answers = await group.run([COMPUTE] * 2, WAIT)
        assert [answer.problem for answer in answers] == ["", "the check process wrote an invalid answer"]

    with_check_workers(scene)


def test_check_processes_of_which_one_exits_after_its_answer_are_not_reused(stage: Path) -> None:
    (stage / "behave").write_text("0 compute end\n")

    async def scene(group: CheckWorkers) -> None:
        answers = await group.run([COMPUTE] * 2, WAIT)
        assert [answer.problem for answer in answers] == ["it hung", ""]
        assert not group.idle

    with_check_workers(scene)


def test_the_last_line_of_a_long_error_output_is_kept(stage: Path) -> None:
    (stage / "behave").write_text("0 compute complain\n")

    async def scene(group: CheckWorkers) -> None:
        with pytest.raises(CheckWorkersLost) as lost:
            await group.run([COMPUTE], WAIT)
        assert str(lost.value).endswith(" ended with code 3: the last of them")

    with_check_workers(scene, workers=1)


def test_a_process_that_cannot_be_started_leaves_no_other_process() -> None:
    started: list[int] = []

    async def second_fails(start: ProcessSpec) -> int:
        if started:
            raise BlockingIOError(11, "no more processes")
        started.append(spawn(start))
        return started[0]

    async def play() -> None:
        group = CheckWorkers(ARGV, [{**os.environ, "LOCAL_RANK": "0"}] * 2)
        with pytest.raises(BlockingIOError):
            await group.start(second_fails)
        assert not group.idle
        await group.end()

    asyncio.run(play())
    assert not psutil.pid_exists(started[0])
