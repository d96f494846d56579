"""The event loop of the agent, the supervisor of a local cluster and the master, when signals come at a bad time."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio import selector_events

import pytest

from dlrover_run.process_tree import event_loop


def test_a_signal_while_the_loop_closes_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    close = selector_events.BaseSelectorEventLoop.close
    closed = []

    def close_then_signal(loop: selector_events.BaseSelectorEventLoop) -> None:
        close(loop)
        # The pipe of the loop is closed now, and its signal handlers are not removed yet.
        os.kill(os.getpid(), signal.SIGCHLD)
        closed.append(loop)

    async def handle_signals() -> str:
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, lambda: None)
        return "done"

    monkeypatch.setattr(selector_events.BaseSelectorEventLoop, "close", close_then_signal)
    assert event_loop.run(handle_signals()) == "done"
    assert len(closed) == 1
    assert capfd.readouterr().err == ""
    assert signal.set_wakeup_fd(-1) == -1


def test_more_signals_than_the_loop_reads_print_no_warning(capfd: pytest.CaptureFixture[str]) -> None:
    async def take_many() -> None:
        loop = asyncio.get_running_loop()
        taken = asyncio.Event()
        for number in (signal.SIGCHLD, signal.SIGUSR1):
            loop.add_signal_handler(number, taken.set)
        for _ in range(5000):
            os.kill(os.getpid(), signal.SIGCHLD)
        await taken.wait()

    event_loop.run(take_many())
    assert capfd.readouterr().err == ""
