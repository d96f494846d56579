"""What each process uses of NVIDIA GPUs, read by NVML."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from dlrover_run.coordination.records.resource_use import MAX_DEVICES, DeviceUse
from dlrover_run.devices.count import Nvml

T = TypeVar("T")

NOT_FOUND = 6
"""NVML's error where no process has computed since the last sample."""

TEMPERATURE_OF_GPU = 0
"""NVML's number of the only sensor that each GPU has."""


class ProcessOnDevice(NamedTuple):
    """`memory` in bytes and the `share` of the time in which it computed, None where the driver does not report it."""

    memory: int | None
    share: float | None


class Device(NamedTuple):
    """One GPU, with the processes on it by pid."""

    whole: DeviceUse
    processes: Mapping[int, ProcessOnDevice]


def read_devices(nvml: Nvml, seen: dict[int, int]) -> list[Device]:
    """All GPUs that can be read; NVML must be initialised. `seen` has the time of the last sample of each GPU, and is
    updated: a process has a share only of the time since. Raises NVMLError where no GPU can be counted."""
    return list(readable(nvml, lambda index: _read_device(nvml, index, seen)).values())


def readable(nvml: Nvml, read: Callable[[int], T]) -> dict[int, T]:
    """What `read` returns of each GPU, by its index, without those that are lost: NVML still counts them, and returns
    an error for all else."""
    found = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):
            found[index] = read(index)
    return found


def _read_device(nvml: Nvml, index: int, seen: dict[int, int]) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def read(ask: Callable[[], T]) -> T | None:
        # GPUs without a function return "not supported", old drivers and old versions of pynvml lack some.
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            return ask()
        return None

    rates = read(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    memory = read(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    power = read(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    whole = DeviceUse(
        index=index,
        busy=None if rates is None else _ratio(rates),
        used=None if memory is None else int(memory.used),
        total=None if memory is None else int(memory.total),
        temperature=read(lambda: int(nvml.nvmlDeviceGetTemperature(handle, TEMPERATURE_OF_GPU))),
        power=None if power is None else power / 1000,
    )
    running = read(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
    sizes = {one.pid: one.usedGpuMemory for one in running}
    shares = read(lambda: _read_shares(nvml, handle, index, seen))
    processes = {
        # A process that did not compute has no sample.
        pid: ProcessOnDevice(size, None if shares is None else shares.get(pid, 0.0))
        for pid, size in sizes.items()
    }
    return Device(whole, processes)


def _read_shares(nvml: Nvml, handle: object, index: int, seen: dict[int, int]) -> dict[int, float]:
    """The share of each process that has computed since this was called last. Raises NVMLError."""
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, seen.get(index, 0))
    except nvml.NVMLError as error:
        if getattr(error, "value", None) != NOT_FOUND:
            raise
        return {}
    seen[index] = max([seen.get(index, 0), *(one.timeStamp for one in samples)])
    # Drivers have returned figures above 100, for processes that are none.
    known = [one for one in samples if one.smUtil <= 100]
    return {one.pid: _ratio(one.smUtil) for one in sorted(known, key=lambda one: one.timeStamp)}


def _ratio(percent: float) -> float:
    return min(1.0, max(0.0, percent / 100))


def used_by(devices: Sequence[Device], pids: Collection[int]) -> list[DeviceUse]:
    """What the processes of one worker use of these devices. Pure."""
    found = []
    for whole, processes in devices:
        own = [processes[pid] for pid in pids if pid in processes]
        if own:
            memory = [one.memory for one in own if one.memory is not None]
            shares = [one.share for one in own if one.share is not None]
            share = min(1.0, sum(shares)) if shares else None
            found.append(replace(whole, share=share, memory=sum(memory) if memory else None))
    return found[:MAX_DEVICES]
