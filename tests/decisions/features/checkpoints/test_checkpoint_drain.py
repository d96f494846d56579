"""How long a node waits at its end for the checkpoints in memory: in virtual time, with a process that never ends."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

from support.virtual_loop import run_virtually

from dlrover_run.features.checkpoints.agent_memory import CheckpointMemory


def drained_after(timeout: float, *hurried: tuple[float, float]) -> float:
    """Seconds until a drain with that timeout gives up; at each moment of `hurried` the node gets a signal, and has
    that many seconds."""

    async def run() -> float:
        memory: Any = CheckpointMemory(None, lambda line: None)
        loop = asyncio.get_running_loop()
        memory._control = SimpleNamespace(send=lambda data: None)

        def end(number: int) -> None:
            assert number == signal.SIGKILL
            memory._ended.set()

        memory._process = SimpleNamespace(send=end)
        for at, seconds in hurried:
            loop.call_at(at, memory.hurry, seconds)
        await memory.drain(timeout)
        return loop.time()

    return run_virtually(run())


def test_a_signal_shortens_the_wait_for_the_disk_and_a_second_one_gives_no_more_time() -> None:
    assert drained_after(600.0) == 600.0
    assert drained_after(600.0, (10.0, 30.0)) == 40.0
    assert drained_after(600.0, (10.0, 30.0), (35.0, 30.0)) == 40.0
    assert drained_after(600.0, (10.0, 30.0), (12.0, 0.0)) == 12.0
    assert drained_after(30.0, (20.0, 30.0)) == 30.0
