"""Which processes hold the memory of the devices that workers see, by NVML and `/proc`."""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from dlrover_run.background import TimeLimit, begin_in_thread
from dlrover_run.devices.count import Nvml, NvmlUnavailable, open_nvml, read_gpu, select_devices
from dlrover_run.devices.gpu_state import query
from dlrover_run.failures.guard import guarded
from dlrover_run.processes import tree
from dlrover_run.words.text import format_bytes

ASK_TIMEOUT = 2.0
"""Seconds for the answer of NVML, for which a restart waits. A driver that is stuck gives none."""

MAX_NAMED = 5
"""Processes that one line names."""

MAX_IN_USE = 0.1
"""Share of a GPU's memory that may be in use while none of its processes is known: the driver itself takes a part."""


def describe_left(pids: Sequence[int]) -> list[str]:
    """A line on processes that have been killed and still hold a device; none without any."""
    if not pids:
        return []
    return [f"{_names(pids)} still holds a device and cannot be ended: workers may lack its memory"]


def find_others(nvml: Nvml, environ: Mapping[str, str], ours: Collection[int], alone: bool) -> list[str]:
    """A line for each GPU that workers with this environment see and that a process uses which is not one of `ours`.
    With `alone`, none of ours uses a GPU, so what is in use without a known process counts too: in a container the
    driver names none of other containers. NVML must be initialised. Raises NVMLError."""
    gpus, indices = [], {}
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = query(nvml, partial(read_gpu, nvml, index))
        if gpu is not None:
            gpus.append(gpu)
            indices[gpu.device.pci_bus_id] = index
    lines = []
    for index in sorted({indices[one.pci_bus_id] for one in select_devices(environ.get("CUDA_VISIBLE_DEVICES"), gpus)}):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = query(nvml, partial(nvml.nvmlDeviceGetMemoryInfo, handle))
        users = query(nvml, partial(nvml.nvmlDeviceGetComputeRunningProcesses, handle)) or ()
        others = [one.pid for one in users if one.pid not in ours]
        if memory is None or not (others or (alone and memory.used > MAX_IN_USE * memory.total)):
            continue
        by = _names(others) if others else "a process that this container does not show"
        lines.append(
            f"GPU {index} has {format_bytes(memory.used)} of {format_bytes(memory.total)} in use by {by}, which is not "
            "of this job: workers may lack memory"
        )
    return lines


async def ask_nvml(environ: Mapping[str, str], ours: Collection[int], alone: bool, nvml: Nvml = None) -> list[str]:
    """What `find_others` returns; nothing without a driver that answers within ASK_TIMEOUT. It asks in a thread of its
    own, because a driver that is stuck never returns."""

    def ask() -> list[str]:
        try:
            with open_nvml(nvml) as opened:
                return find_others(opened, environ, ours, alone)
        except (NvmlUnavailable, ImportError):
            return []

    def work() -> list[str]:
        return guarded("the memory of devices", ask, [])

    answer, _ = begin_in_thread(work, "device-memory")
    try:
        async with TimeLimit(ASK_TIMEOUT):
            return await answer
    except TimeoutError:
        return []


def _names(pids: Sequence[int]) -> str:
    named = ", ".join(_name(pid) for pid in pids[:MAX_NAMED])
    more = f" and {len(pids) - MAX_NAMED} more" if len(pids) > MAX_NAMED else ""
    return f"process {named}{more}" if len(pids) == 1 else f"processes {named}{more}"


def _name(pid: int) -> str:
    try:
        name = tree.read_stat(pid)[0].decode(errors="replace")
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return str(pid)
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = f"user {uid}"
    return f"{pid} ({name} of {user})"
