"""Reads what each process uses of NVIDIA GPUs in a thread of its own: a driver that is stuck stops that thread and
nothing else."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Mapping, Sequence

from dlrover_run.coordination.records.resource_use import DeviceUse
from dlrover_run.devices import holders
from dlrover_run.devices.count import Nvml, NvmlUnavailable, open_nvml, read_gpu, select_devices
from dlrover_run.devices.use import Device, read_devices, readable, used_by
from dlrover_run.failures.guard import guarded
from dlrover_run.processes import signals


def visible_indices(nvml: Nvml, environ: Mapping[str, str]) -> list[int]:
    """The GPUs that workers started with this environment see, in the order of `cuda:0`, `cuda:1`; NVML must be
    initialised. Raises NVMLError."""
    gpus = readable(nvml, lambda index: read_gpu(nvml, index))
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
