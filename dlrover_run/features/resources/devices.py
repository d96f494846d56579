"""What each process uses of NVIDIA GPUs, read by NVML in a thread of its own: a driver that is stuck stops that thread
and nothing else."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from dlrover_run.coordination.records.resource_use import MAX_DEVICES, DeviceUse
from dlrover_run.devices import holders
from dlrover_run.devices.count import Nvml, NvmlUnavailable, open_nvml, read_gpu, select_devices
from dlrover_run.failures.guard import guarded
from dlrover_run.processes import signals

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
    return list(_readable(nvml, lambda index: _read_device(nvml, index, seen)).values())


def _readable(nvml: Nvml, read: Callable[[int], T]) -> dict[int, T]:
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


def visible_indices(nvml: Nvml, environ: Mapping[str, str]) -> list[int]:
    """The GPUs that workers started with this environment see, in the order of `cuda:0`, `cuda:1`; NVML must be
    initialised. Raises NVMLError."""
    gpus = _readable(nvml, lambda index: read_gpu(nvml, index))
    indices = {gpu.device.pci_bus_id: index for index, gpu in gpus.items()}
    visible = select_devices(environ.get("CUDA_VISIBLE_DEVICES"), list(gpus.values()))
    return [indices[device.pci_bus_id] for device in visible]


class DeviceReader:
    """Reads all GPUs each time that it is asked to, in its own thread, which `close` ends. `latest` are those that were
    read last, none before the first reading and without a driver, and `visible` the indices of those that workers see.
    `nvml` None: import it in the thread."""

    def __init__(self, nvml: Nvml = None) -> None:
        self.latest: Sequence[Device] = ()
        self.visible: Sequence[int] = ()
        self._nvml = nvml
        self._asked = threading.Event()
        self._closed = False
        with signals.blocked_in_new_threads():
            self._thread = threading.Thread(target=self._run, name="devices", daemon=True)
            self._thread.start()

    def used_by(self, pids: Collection[int], local_rank: int | None) -> list[DeviceUse]:
        """What the processes of a worker used when the devices were read last. In a container with pids of its own the
        driver names none of them: then a worker that holds a device has the one of its local rank, if it has one."""
        devices = self.latest
        found = used_by(devices, pids)
        is_named = any(os.path.exists(f"/proc/{pid}") for device in devices for pid in device.processes)
        if found or is_named or local_rank is None or local_rank >= len(self.visible):
            return found
        index = self.visible[local_rank]
        return [one.whole for one in devices if one.whole.index == index and any(map(holders.holds_device, pids))]

    def ask(self) -> None:
        """Begin to read. It returns at once."""
        self._asked.set()

    def close(self) -> None:
        """End the thread after the reading that is under way."""
        self._closed = True
        self._asked.set()

    def _run(self) -> None:
        seen: dict[int, int] = {}
        # Without a driver that answers, or without pynvml, there are no figures of devices.
        with contextlib.suppress(NvmlUnavailable, ImportError), open_nvml(self._nvml) as nvml:
            self.visible = guarded("the visible devices", lambda: visible_indices(nvml, os.environ), [])
            while True:
                self._asked.wait()
                self._asked.clear()
                if self._closed:
                    return
                self.latest = guarded("the devices", lambda: read_devices(nvml, seen), ())
