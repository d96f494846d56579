"""How much each worker uses its device when a hang is looked at: by NVML, without samples of before the hang, and
without waiting for a driver that does not answer."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_run.coordination.records.resource_use import DeviceUse as Whole
from dlrover_run.devices import holders
from dlrover_run.devices.use import Device, ProcessOnDevice
from dlrover_run.features.hangs.node import device_use
from dlrover_run.features.hangs.node.device_use import RECENT, DeviceUseReader, use_of
from dlrover_run.features.hangs.search.suspects import DeviceUse


def _device(index: int, busy: float | None, shares: dict[int, float | None]) -> Device:
    whole = Whole(index, busy=busy, power=127.4)
    return Device(whole, {pid: ProcessOnDevice(1, share) for pid, share in shares.items()})


def test_the_worker_that_waits_in_its_kernel_uses_the_device_and_the_one_that_sleeps_does_not() -> None:
    # As on one H100 that two ranks shared.
    devices = [_device(0, 1.0, {1364: 0.99, 1365: 0.0})]
    assert use_of(devices, [1364]) == DeviceUse(99, 100, 127)
    assert use_of(devices, [1365]) == DeviceUse(0, 100, 127)
    assert use_of(devices, [99]) is None
    assert use_of([], [1364]) is None


def test_the_device_that_a_worker_uses_most_counts() -> None:
    devices = [_device(0, 0.1, {11: 0.0}), _device(1, 0.7, {11: 0.7})]
    assert use_of(devices, [11]) == DeviceUse(70, 70, 127)


def test_a_driver_that_has_no_samples_of_processes_says_nothing_of_one() -> None:
    devices = [_device(0, 1.0, {11: 0.0, 12: 0.0})]
    assert use_of(devices, [11]) == DeviceUse(None, 100, 127)
    assert use_of([_device(0, None, {11: None})], [11]) == DeviceUse(None, None, 127)
    idle = [_device(0, 0.0, {11: 0.0, 12: 0.0})]
    assert use_of(idle, [11]) == DeviceUse(0, 0, 127)


class _NvmlError(Exception):
    value = 6


class _Nvml:
    """One GPU, on which this process computed until a minute ago, and which may not answer until it is `free`."""

    NVMLError = _NvmlError

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.now = time.time()
        self.readings = 0

    def nvmlInit(self) -> None:
        self.readings += 1
        self.free.wait()

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=0)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=1, total=2)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 90_000

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 40

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=1)]

    def nvmlDeviceGetProcessUtilization(self, handle: int, seen: int) -> list[Any]:
        before = int((self.now - 30 * RECENT) * 1e6)
        if seen >= before:
            raise _NvmlError
        return [SimpleNamespace(pid=os.getpid(), timeStamp=before, smUtil=100)]


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process holds a device, as far as its files show."""
    file = tmp_path / "nvidia0"
    file.touch()
    monkeypatch.setattr(holders, "PREFIX", str(tmp_path / "nvidia"))
    return file


def test_only_the_last_seconds_count(held: Path) -> None:
    with held.open():
        found = asyncio.run(DeviceUseReader(_Nvml()).read({3: os.getpid()}))
    assert found == {3: DeviceUse(0, 0, 90)}


def test_the_driver_is_not_asked_of_workers_that_hold_no_device(held: Path) -> None:
    nvml = _Nvml()
    assert asyncio.run(DeviceUseReader(nvml).read({3: os.getpid()})) == {}
    assert nvml.readings == 0


def test_a_driver_that_does_not_answer_is_not_waited_for(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_use, "DEVICE_TIMEOUT", 0.05)
    nvml = _Nvml()
    nvml.free.clear()
    reader = DeviceUseReader(nvml)
    with held.open():
        assert asyncio.run(reader.read({3: os.getpid()})) == {}
        # No second thread is stuck beside the first one.
        assert asyncio.run(reader.read({3: os.getpid()})) == {}
        assert nvml.readings == 1
        nvml.free.set()
        assert reader._thread is not None
        reader._thread.join()
        monkeypatch.undo()
