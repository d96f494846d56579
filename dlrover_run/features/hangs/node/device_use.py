"""Reads how much the workers of this node use their devices, once they make no progress."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from dlrover_run.background import begin_in_thread
from dlrover_run.devices import holders
from dlrover_run.devices.count import Nvml, NvmlUnavailable, open_nvml
from dlrover_run.devices.use import Device, read_devices, used_by
from dlrover_run.failures.guard import guarded
from dlrover_run.features.hangs.search.suspects import DeviceUse
from dlrover_run.processes.tree import below

DEVICE_TIMEOUT = 2.0
"""Seconds for NVML. A driver that is stuck does not answer, which is no reason to report a hang later."""

RECENT = 2.0
"""Seconds of which the driver's samples count. A worker that computed before it hung has samples of that time too."""

MAX_PROCESSES = 100
"""Processes of one worker that are looked for on the devices."""


class DeviceUseReader:
    """One thread at a time reads; after a reading that was late none begins until it has ended. `nvml` None: import it
    in the thread."""

    def __init__(self, nvml: Nvml = None) -> None:
        self._nvml = nvml
        self._thread: threading.Thread | None = None

    async def read(self, pids: Mapping[int, int]) -> dict[int, DeviceUse]:
        """The use of the devices by each of these processes and those below it, by rank, of those that the driver
        names. It returns at once on a machine without devices."""
        busy = self._thread is not None and self._thread.is_alive()
        if busy or not holders.is_present():
            return {}
        processes = {rank: below(pid, MAX_PROCESSES) for rank, pid in pids.items()}
        if not any(holders.holds_device(pid) for own in processes.values() for pid in own):
            return {}
        found, self._thread = begin_in_thread(self._read, "use of devices")
        await asyncio.wait([found], timeout=DEVICE_TIMEOUT)
        devices = found.result() if found.done() else ()
        found.cancel()
        return {rank: use for rank, own in processes.items() if (use := use_of(devices, own)) is not None}

    def _read(self) -> Sequence[Device]:
        return guarded("the use of devices", partial(_read_recent, self._nvml), ())


def _read_recent(nvml: Nvml) -> Sequence[Device]:
    try:
        with open_nvml(nvml) as opened:
            since = int((time.time() - RECENT) * 1e6)
            return read_devices(opened, dict.fromkeys(range(opened.nvmlDeviceGetCount()), since))
    except (NvmlUnavailable, ImportError):
        return ()


def use_of(devices: Sequence[Device], pids: Collection[int]) -> DeviceUse | None:
    """What the processes of a worker use of the device that they use most; None if the driver names them on none.
    Pure."""
    used = used_by(devices, pids)
    if not used:
        return None
    most = max(used, key=lambda one: (one.share or 0.0, one.memory or 0))
    own, whole = most.share, most.busy
    shares = [
        one.share or 0.0 for device in devices if device.whole.index == most.index for one in device.processes.values()
    ]
    if whole is not None and whole > 0.5 and not any(shares):
        # The driver has no samples of processes.
        own = None
    return DeviceUse(
        own=None if own is None else round(own * 100),
        whole=None if whole is None else round(whole * 100),
        watts=None if most.power is None else min(round(most.power), 1_000_000),
    )
