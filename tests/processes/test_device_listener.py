"""The process that listens to the driver reports every error that a stand-in for the driver's library plants."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from support.harness import WAIT
from support.nvml_stub import NvmlStub

from dlrover_run.devices.xids import XIDS
from dlrover_run.features.device_errors import listener as module
from dlrover_run.features.device_errors.listener import DriverListener
from dlrover_run.features.device_errors.messages import WatchedGpu, XidSeen


def test_each_error_arrives_with_its_gpu_and_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = NvmlStub(tmp_path, gpus=2)
    driver.set(1, pids=[os.getpid()])
    for name, value in driver.environment.items():
        monkeypatch.setenv(name, value)
    planted = [*sorted(XIDS), 9999]

    async def listen() -> list[XidSeen]:
        errors: asyncio.Queue[XidSeen] = asyncio.Queue()
        watching: asyncio.Future[tuple[WatchedGpu, ...]] = asyncio.get_running_loop().create_future()
        listener = DriverListener(errors.put_nowait, watching.set_result)
        listener.start()
        try:
            async with asyncio.timeout(WAIT):
                gpus = await watching
                assert [(gpu.index, gpu.pci_bus_id) for gpu in gpus] == [(0, "0000:1a:00.0"), (1, "0000:1b:00.0")]
                for number in planted:
                    driver.report(number % 2, number)
                found = [await errors.get() for _ in planted]
                driver.set(0, lost=1)
                driver.set(1, action=2, memory_errors=5)
                states = await listener.states()
                assert states[0].problem == "GPU is lost"
                assert (states[1].action, states[1].memory_errors) == (2, 5)
        finally:
            await listener.close()
        assert listener.pids == set()
        assert await listener.states() == {}
        return found

    found = asyncio.run(listen())
    assert [(error.index, error.number) for error in found] == [(number % 2, number) for number in planted]
    assert {error.pids for error in found if error.index == 1} == {(os.getpid(),)}
    assert {error.pids for error in found if error.index == 0} == {()}


def test_a_driver_that_is_stuck_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = NvmlStub(tmp_path, gpus=1)
    for name, value in driver.environment.items():
        monkeypatch.setenv(name, value)

    async def listen() -> None:
        watching: asyncio.Future[tuple[WatchedGpu, ...]] = asyncio.get_running_loop().create_future()
        listener = DriverListener(lambda error: None, watching.set_result)
        listener.start()
        async with asyncio.timeout(WAIT):
            await watching
            assert list(await listener.states()) == [0]
            (pid,) = listener.pids
            os.kill(pid, signal.SIGSTOP)
            monkeypatch.setattr(module, "ANSWER_TIMEOUT", 0.01)
            assert await listener.states() == {}
            # From now on a wait would not end.
            monkeypatch.setattr(module, "ANSWER_TIMEOUT", 10 * WAIT)
            assert await listener.states() == {}
            os.kill(pid, signal.SIGCONT)
            while not (states := await listener.states()):
                await asyncio.sleep(0.01)
            assert list(states) == [0]
            await listener.close()

    asyncio.run(listen())


def test_without_a_driver_the_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = NvmlStub(tmp_path, gpus=1)
    monkeypatch.setenv("LD_LIBRARY_PATH", driver.environment["LD_LIBRARY_PATH"])
    # The library says that no driver is loaded.
    monkeypatch.delenv("NVML_STUB", raising=False)

    async def listen() -> None:
        listener = DriverListener(lambda error: None, lambda gpus: None)
        listener.start()
        async with asyncio.timeout(WAIT):
            while listener.pids:
                await asyncio.sleep(0.01)
        assert await listener.states() == {}

    asyncio.run(listen())
