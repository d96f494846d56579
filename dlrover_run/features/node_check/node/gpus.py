"""Problems of this machine's GPUs according to NVML and the kernel log, before any program has used them.

Everything is read at once, without waiting. NVML is loaded only if there is an NVIDIA driver.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrover_run.devices import NodeProblem
from dlrover_run.devices.count import (
    DeviceId,
    Nvml,
    NvmlUnavailable,
    PhysicalGpu,
    open_nvml,
    read_gpu,
    select_devices,
    sysfs_address,
)
from dlrover_run.devices.gpu_state import REQUIRED_ACTIONS, query, recovery_action, uncorrected_errors
from dlrover_run.devices.xids import XidClass, classify
from dlrover_run.words.text import counted, format_bytes

MAX_MEMORY_IN_USE = 0.5
"""Share of a GPU's memory that may be in use while no worker of this node runs. The driver itself uses a few percent.
Above this another program uses the GPU, which is reported and is not severe: the memory of a killed job is released
only moments later, a workstation may be shared on purpose, and two agents may share a GPU. A GPU that is really too
full or too busy shows that in the measurements that follow."""

_DRIVER_FILES = ("nvidiactl", "dxg")

MAX_LOG_BYTES = 1 << 20
"""Bytes of the end of the kernel log that are read: more than most kernels keep, and read in a few milliseconds."""

_SYSLOG_ACTION_READ_ALL = 3

# NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
_LINE = re.compile(r"(?:\[ *(\d+\.\d+)\] )?NVRM: Xid \((?:PCI:)?((?:[0-9a-fA-F]+:){2}[0-9a-fA-F]+)[^)\n]*\): (\d+)")


@dataclass(frozen=True)
class XidErrors:
    """The Xid errors of one GPU: their count, the number of the last one, and its time in seconds since the machine
    started (None if the kernel logs no times)."""

    count: int
    last: int
    at: float | None


def read_kernel_log() -> str:
    """The end of the kernel log; empty if this process may not read it, as in most containers.

    The ring buffer holds what has happened since the machine started, as far as it has room. A line stays there after a
    reset of the GPU, so it proves nothing about the present.
    """
    libc = ctypes.CDLL(None)
    buffer = ctypes.create_string_buffer(MAX_LOG_BYTES)
    size = libc.klogctl(_SYSLOG_ACTION_READ_ALL, buffer, MAX_LOG_BYTES)
    return buffer.raw[:size].decode(errors="replace") if size > 0 else ""


def parse_xids(log: str) -> dict[str, XidErrors]:
    """The errors that no program causes, without notes, by the PCI address of the GPU without its function
    (`0000:3b:00`)."""
    found: dict[str, XidErrors] = {}
    for at, address, number in _LINE.findall(log):
        if classify(int(number)).kind not in (XidClass.PROGRAM, XidClass.NOTE):
            name = sysfs_address(address)
            count = found[name].count if name in found else 0
            found[name] = XidErrors(count + 1, int(number), float(at) if at else None)
    return found


@dataclass(frozen=True)
class _Gpu:
    """One GPU of the machine by its NVML index; `problem` is NVML's error if it cannot be read."""

    index: int
    gpu: PhysicalGpu
    problem: str = ""

    @property
    def name(self) -> str:
        return f"GPU {self.index}" + (f" ({self.gpu.device.pci_bus_id})" if self.gpu.device.pci_bus_id else "")


def find_gpu_problems(
    workers: int,
    environ: Mapping[str, str],
    gpu_each: bool = False,
    nvml: Nvml = None,
    dev: Path = Path("/dev"),
    read_log: Callable[[], str] = read_kernel_log,
) -> Iterator[NodeProblem]:
    """The problems of the GPUs that workers with this environment see. `nvml` None: load `pynvml` if there is a driver.

    GPUs are expected if `gpu_each` (every worker needs one), or if CUDA_VISIBLE_DEVICES names some. Severe is only what
    would affect a program started now: fewer GPUs than expected and than workers, a GPU that is lost or must be reset,
    a GPU whose memory has broken rows that could not be replaced. NVML reports Xid errors only to a process that waits
    for them, so earlier ones are read from the kernel log, if permitted, and are warnings.
    """
    named = _named(environ.get("CUDA_VISIBLE_DEVICES"))
    expected = gpu_each or named > 0
    if nvml is None and not any((dev / name).exists() for name in _DRIVER_FILES):
        if expected:
            names = f"CUDA_VISIBLE_DEVICES names {counted(named, 'GPU')}"
            required = "each worker needs a GPU" if gpu_each else names
            yield NodeProblem(
                f"{required}, and this machine has no NVIDIA driver ({dev / _DRIVER_FILES[0]} is missing): load it "
                "(`modprobe nvidia`), or start the container with its GPUs (--gpus all)",
                severe=gpu_each,
            )
        return
    try:
        with open_nvml(nvml) as nvml:
            gpus = [_read(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
            seen = select_devices(environ.get("CUDA_VISIBLE_DEVICES"), [gpu.gpu for gpu in gpus])
            yield from _count(workers, gpu_each, named, seen, len(gpus))
            xids = parse_xids(read_log()) if seen else {}
            for gpu in gpus:
                # In MIG mode a program sees a part of a GPU, which has the PCI address and the errors of the whole.
                part = next((one for one in seen if one == gpu.gpu.device or one.uuid in (gpu.gpu.mig or ())), None)
                if part is not None:
                    yield from _examine(nvml, gpu, part, xids)
    except NvmlUnavailable as problem:
        if expected or not problem.absent:
            text = f"{problem}: run `nvidia-smi`, then reload the driver or reboot"
            yield NodeProblem(text, severe=expected)


def _named(setting: str | None) -> int:
    """The number of devices that CUDA_VISIBLE_DEVICES names, existing or not; an entry such as `-1` ends the list. CUDA
    shows at most one MIG device to a program, even if several are named."""
    entries: list[str] = []
    for entry in (setting or "").split(","):
        if not entry.strip().startswith(("GPU-", "MIG-", "+", *"0123456789")):
            break
        entries.append(entry.strip())
    return min(1, len(entries)) if entries and entries[0].startswith("MIG-") else len(entries)


def _read(nvml: Nvml, index: int) -> _Gpu:
    try:
        return _Gpu(index, read_gpu(nvml, index))
    except nvml.NVMLError as error:
        # It keeps its index, because CUDA_VISIBLE_DEVICES counts by index. It cannot be named by UUID.
        return _Gpu(index, PhysicalGpu(DeviceId(f"unknown-{index}", "")), str(error))


def _count(workers: int, gpu_each: bool, named: int, seen: Sequence[DeviceId], here: int) -> Iterator[NodeProblem]:
    if len(seen) >= workers:
        return
    if named > len(seen):
        yield NodeProblem(
            f"CUDA_VISIBLE_DEVICES names {counted(named, 'GPU')}, of which {len(seen)} can be used ({here} on this "
            f"machine), for {counted(workers, 'worker')}: look for the others with `nvidia-smi` and `lspci -d 10de:`",
            severe=True,
        )
    elif gpu_each or seen:
        each = "" if gpu_each else "; workers that share a GPU cannot use NCCL"
        yield NodeProblem(
            f"{counted(workers, 'worker')} and {counted(len(seen), 'GPU')} that can be used ({here} on this machine)"
            f"{each}: look for the others with `nvidia-smi` and `lspci -d 10de:`, or start fewer workers "
            "(--nproc-per-node)",
            severe=gpu_each,
        )


def _examine(nvml: Nvml, gpu: _Gpu, part: DeviceId, xids: Mapping[str, XidErrors]) -> Iterator[NodeProblem]:
    if gpu.problem:
        yield NodeProblem(
            f"{gpu.name} does not answer (NVML: {gpu.problem}): `nvidia-smi --gpu-reset -i {gpu.index}`, or reboot",
            severe=True,
        )
        return
    handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
    if action := REQUIRED_ACTIONS.get(recovery_action(nvml, handle) or 0):
        text = f"{gpu.name} has failed: the NVIDIA driver wants {action.format(index=gpu.index)}"
        yield NodeProblem(text, severe=True)
    yield from _memory_errors(nvml, gpu, handle)
    if part == gpu.gpu.device:
        yield from _memory_taken(nvml, gpu, handle)
    if errors := xids.get(gpu.gpu.device.pci_bus_id.partition(".")[0]):
        ago = "" if errors.at is None else f", {max(0.0, time.monotonic() - errors.at) / 3600:.1f} h ago"
        yield NodeProblem(
            f"the kernel log has {counted(errors.count, 'error')} of {gpu.name}, the last one Xid {errors.last}{ago}: "
            "see `dmesg | grep Xid` and https://docs.nvidia.com/deploy/xid-errors"
        )


def _memory_errors(nvml: Nvml, gpu: _Gpu, handle: Any) -> Iterator[NodeProblem]:
    """Uncorrected memory errors. Since Ampere (the first generation that remaps rows, and has MIG) a broken row is
    disabled at once, and a GPU that must be reset first runs no program, so past errors are not severe. On an older GPU
    a program may use the broken row again until the GPU is reset, unless the driver requires no action."""
    errors = uncorrected_errors(nvml, handle) or 0
    rows = query(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    pages_pending = query(nvml, lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
    reset = f"end all that uses it, then `nvidia-smi --gpu-reset -i {gpu.index}`"
    if rows and rows[3]:
        yield NodeProblem(
            f"{gpu.name} has broken rows of memory that could not be replaced ({rows[1]} were): replace the GPU",
            severe=True,
        )
    if errors:
        times = counted(errors, "uncorrected error")
        yield NodeProblem(
            f"{gpu.name} has had {times} of memory (ECC) since its driver was loaded: {reset}; "
            "replace the GPU if they recur",
            severe=rows is None and gpu.gpu.mig is None and recovery_action(nvml, handle) is None,
        )
    elif (rows and rows[2]) or pages_pending:
        yield NodeProblem(f"{gpu.name} needs a reset to disable a worn part of its memory: when convenient, {reset}")


def _memory_taken(nvml: Nvml, gpu: _Gpu, handle: Any) -> Iterator[NodeProblem]:
    memory = query(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    if memory is None or memory.used <= MAX_MEMORY_IN_USE * memory.total:
        return
    users = query(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
    # In a container the driver does not show processes outside, and not always the memory of each one.
    user = max(users, key=lambda one: one.usedGpuMemory or 0, default=None)
    most = "" if user is None else f", most by process {user.pid}"
    yield NodeProblem(
        f"{gpu.name} has {format_bytes(memory.used)} of {format_bytes(memory.total)} in use{most}, and no worker runs "
        "yet: end the process (`nvidia-smi` shows it), or leave the GPU out with CUDA_VISIBLE_DEVICES"
    )
