"""What NVML says against the GPUs of this machine, before anything has tried them.

All is read at once and nothing is waited for. Only NVML is loaded, and only where there is an NVIDIA driver.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dlrover_run.devices import NodeProblem
from dlrover_run.devices.count import DeviceId, Nvml, PhysicalGpu, means_absent, read_gpu, select_devices
from dlrover_run.failures.oom_kills import format_bytes

MAX_MEMORY_IN_USE = 0.5
"""Share of a GPU's memory that may be taken while no worker of this node runs. What the driver itself takes is a few
percent. Above this somebody else is on the GPU, and it is told; it is no fault of the node. The memory of a job that
was killed is given back only moments after, a desk machine may be shared on purpose, and two agents may share a GPU:
the node is well all the same. A GPU that is really too full or too busy shows so in what is tried next."""

_VOLATILE, _UNCORRECTED = 0, 1
_RECOVERY_ACTION_FIELD = 230

_NO_ACTION = 0
_MUST = {
    1: "it reset; end all that uses it, then `nvidia-smi --gpu-reset -i {index}`",
    2: "the machine rebooted; do so",
    3: "nobody to use its links to other GPUs; end all that uses it, then `nvidia-smi --gpu-reset -i {index}`",
    6: "its PCIe bus reset; reboot the machine",
    7: "the machine rebooted; do so",
}
"""What the driver wants, by NVML's number of the recovery action, where a program that starts now would fail. Others
(4: reset it when it is convenient; 5: recover the domain of linked nodes) leave the GPU usable."""

_DRIVER_FILES = ("nvidiactl", "dxg")

MAX_LOG_BYTES = 1 << 20
"""Bytes of the kernel's log that are read, its latest: more than most kernels keep, and read in some milliseconds."""

_SYSLOG_ACTION_READ_ALL = 3

PROGRAM_XIDS = frozenset({13, 31, 43, 45, 68, 69, 109})
"""Errors that a program's own defect causes, or its end: they say nothing of the GPU. They are those that NVIDIA's own
device plugin for Kubernetes passes over, and 69, the like of 13."""

NOTE_XIDS = frozenset({63, 154})
"""Notes rather than errors: a row will be remapped, and what the driver asks to be done. NVML says how that is now."""

# NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
_LINE = re.compile(r"(?:\[ *(\d+\.\d+)\] )?NVRM: Xid \((?:PCI:)?([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)[^)]*\): (\d+)")


@dataclass(frozen=True)
class XidErrors:
    """The errors of one GPU: how many there were, the number of the last one, and when that was, in seconds since the
    machine started; None where the kernel writes no times."""

    count: int
    last: int
    at: float | None


def read_kernel_log() -> str:
    """The kernel's log, or nothing where this process may not read it."""
    libc = ctypes.CDLL(None)
    buffer = ctypes.create_string_buffer(MAX_LOG_BYTES)
    size = libc.klogctl(_SYSLOG_ACTION_READ_ALL, buffer, MAX_LOG_BYTES)
    return buffer.raw[:size].decode(errors="replace") if size > 0 else ""


def parse_xids(log: str) -> dict[str, XidErrors]:
    """The errors that are not a program's own, by the PCI address of the GPU without its function (`0000:3b:00`)."""
    found: dict[str, XidErrors] = {}
    for line in log.splitlines():
        match = _LINE.search(line)
        if match is None or int(match[3]) in PROGRAM_XIDS | NOTE_XIDS:
            continue
        domain, bus, device = match[2].lower().split(":")
        name = f"{int(domain, 16):04x}:{bus}:{device}"
        before = found.get(name)
        at = float(match[1]) if match[1] else None
        found[name] = XidErrors(1 + (before.count if before else 0), int(match[3]), at)
    return found


class HealthNvml(Nvml, Protocol):
    """The part of the module `pynvml` that is asked here, under its own names."""

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Sequence[Any]: ...
    def nvmlDeviceGetTotalEccErrors(self, handle: Any, error_type: int, counter_type: int) -> int: ...
    def nvmlDeviceGetRemappedRows(self, handle: Any) -> Sequence[int]: ...
    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: Any) -> int: ...
    def nvmlDeviceGetFieldValues(self, handle: Any, fields: Sequence[int]) -> Sequence[Any]: ...


@dataclass(frozen=True)
class _Gpu:
    """One GPU of the machine by its index of NVML; `problem` says why NVML cannot tell more of it."""

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
    nvml: HealthNvml | None = None,
    dev: Path = Path("/dev"),
    read_log: Callable[[], str] = read_kernel_log,
) -> Iterator[NodeProblem]:
    """What ails the GPUs that workers with this environment see. `nvml` None loads `pynvml` where `dev` has a driver.

    GPUs are expected where `gpu_each` says that every worker needs one, or where CUDA_VISIBLE_DEVICES names some.
    Severe is only what a program that starts now would meet: fewer GPUs than expected and than workers, one that is
    lost or that the driver wants reset, one whose memory has broken rows that could not be replaced. Of Xid errors
    NVML tells only who waits for them, so earlier ones come from the kernel's log where that may be read, as warnings.
    """
    named = _named(environ.get("CUDA_VISIBLE_DEVICES"))
    expected = gpu_each or named > 0
    if nvml is None:
        if not any((dev / name).exists() for name in _DRIVER_FILES):
            if expected:
                asked = "each worker needs a GPU" if gpu_each else f"CUDA_VISIBLE_DEVICES names {_gpus(named)}"
                yield NodeProblem(
                    f"{asked}, and there is no NVIDIA driver here ({dev / _DRIVER_FILES[0]} is missing): load it "
                    "(`modprobe nvidia`), or start the container with its GPUs (--gpus all)",
                    severe=gpu_each,
                )
            return
        try:
            import pynvml
        except ImportError as error:
            yield NodeProblem(f"the GPUs cannot be asked ({error}): install nvidia-ml-py")
            return
        nvml = pynvml
    assert nvml is not None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if expected or not means_absent(error):
            yield NodeProblem(
                f"the NVIDIA driver does not answer (NVML: {error}): look at `nvidia-smi`, then load it anew or reboot",
                severe=expected,
            )
        return
    try:
        gpus = [_read(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        seen = select_devices(environ.get("CUDA_VISIBLE_DEVICES"), [gpu.gpu for gpu in gpus])
        yield from _count(workers, gpu_each, named, seen, len(gpus))
        xids = parse_xids(read_log()) if seen else {}
        for gpu in gpus:
            # Of a GPU in MIG mode a program sees a part, which has the whole one's PCI address and errors.
            part = next((one for one in seen if one == gpu.gpu.device or one.uuid in (gpu.gpu.mig or ())), None)
            if part is not None:
                yield from _examine(nvml, gpu, part, xids)
    except nvml.NVMLError as error:
        yield NodeProblem(
            f"the NVIDIA driver cannot list its GPUs (NVML: {error}): look at `nvidia-smi`", severe=expected
        )
    finally:
        nvml.nvmlShutdown()


def _named(setting: str | None) -> int:
    """How many devices CUDA_VISIBLE_DEVICES names, whether they exist or not: an entry such as `-1` ends the list. One
    MIG device is all that CUDA shows to a program, however many are named."""
    entries: list[str] = []
    for entry in (setting or "").split(","):
        if not entry.strip().startswith(("GPU-", "MIG-", "+", *"0123456789")):
            break
        entries.append(entry.strip())
    return min(1, len(entries)) if entries and entries[0].startswith("MIG-") else len(entries)


def _read(nvml: HealthNvml, index: int) -> _Gpu:
    try:
        return _Gpu(index, read_gpu(nvml, index))
    except nvml.NVMLError as error:
        # It keeps its place, as CUDA_VISIBLE_DEVICES counts by place; nobody can name it by UUID.
        return _Gpu(index, PhysicalGpu(DeviceId(f"unknown-{index}", "")), str(error))


def _count(workers: int, gpu_each: bool, named: int, seen: Sequence[DeviceId], here: int) -> Iterator[NodeProblem]:
    if len(seen) >= workers:
        return
    if named > len(seen):
        yield NodeProblem(
            f"CUDA_VISIBLE_DEVICES names {_gpus(named)}, of which {len(seen)} can be used ({here} on this machine), "
            f"for {_workers(workers)}: look for the others with `nvidia-smi` and `lspci -d 10de:`",
            severe=True,
        )
    elif gpu_each or seen:
        each = "" if gpu_each else "; workers that share a GPU cannot use NCCL"
        yield NodeProblem(
            f"{_workers(workers)} and {_gpus(len(seen))} that can be used ({here} on this machine){each}: look for the "
            "others with `nvidia-smi` and `lspci -d 10de:`, or start fewer workers (--nproc-per-node)",
            severe=gpu_each,
        )


def _examine(nvml: HealthNvml, gpu: _Gpu, part: DeviceId, xids: Mapping[str, XidErrors]) -> Iterator[NodeProblem]:
    if gpu.problem:
        yield NodeProblem(
            f"{gpu.name} does not answer (NVML: {gpu.problem}): `nvidia-smi --gpu-reset -i {gpu.index}`, or reboot",
            severe=True,
        )
        return
    handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
    yield from _recovery(nvml, gpu, handle)
    yield from _memory_errors(nvml, gpu, handle)
    if part == gpu.gpu.device:
        yield from _memory_taken(nvml, gpu, handle)
    address = gpu.gpu.device.pci_bus_id.partition(".")[0]
    if address in xids:
        yield _tell_xids(gpu, xids[address])


def _recovery(nvml: HealthNvml, gpu: _Gpu, handle: Any) -> Iterator[NodeProblem]:
    wanted = _MUST.get(_recovery_action(nvml, handle) or _NO_ACTION)
    if wanted is not None:
        yield NodeProblem(
            f"{gpu.name} has failed: the NVIDIA driver wants {wanted.format(index=gpu.index)}", severe=True
        )


def _memory_errors(nvml: HealthNvml, gpu: _Gpu, handle: Any) -> Iterator[NodeProblem]:
    """Since Ampere (the first that remaps rows, and has MIG) a broken row is shut out at once, and a GPU that has to be
    reset first takes no program, so that errors in the past are no reason against it. On an older one a program can
    meet the broken row again until the GPU is reset, unless the driver says that nothing needs to be done."""
    errors = _ask(nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _VOLATILE)) or 0
    rows = _ask(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    pages_pending = _ask(nvml, lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
    reset = f"end all that uses it, then `nvidia-smi --gpu-reset -i {gpu.index}`"
    if rows and rows[3]:
        yield NodeProblem(
            f"{gpu.name} has broken rows of memory that could not be replaced ({rows[1]} were): have the GPU exchanged",
            severe=True,
        )
    if errors:
        times = "1 uncorrected error" if errors == 1 else f"{errors} uncorrected errors"
        yield NodeProblem(
            f"{gpu.name} has had {times} of memory (ECC) since its driver was loaded: {reset}; "
            "exchange the GPU if they come again",
            severe=rows is None and gpu.gpu.mig is None and _recovery_action(nvml, handle) is None,
        )
    elif (rows and rows[2]) or pages_pending:
        yield NodeProblem(
            f"{gpu.name} waits for a reset to shut out a worn part of its memory: when convenient, {reset}"
        )


def _memory_taken(nvml: HealthNvml, gpu: _Gpu, handle: Any) -> Iterator[NodeProblem]:
    memory = _ask(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    if memory is None or memory.used <= MAX_MEMORY_IN_USE * memory.total:
        return
    users = _ask(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
    # From inside a container the driver does not show who is outside it, and not always how much each one has.
    user = max(users, key=lambda one: one.usedGpuMemory or 0, default=None)
    who = "" if user is None else f", most by process {user.pid}"
    yield NodeProblem(
        f"{gpu.name} has {format_bytes(memory.used)} of {format_bytes(memory.total)} taken{who}, and no worker runs "
        "yet: end what uses it (`nvidia-smi` shows it), or leave the GPU out with CUDA_VISIBLE_DEVICES"
    )


def _tell_xids(gpu: _Gpu, xids: XidErrors) -> NodeProblem:
    ago = "" if xids.at is None else f", {max(0.0, time.monotonic() - xids.at) / 3600:.1f} h ago"
    times = "1 error" if xids.count == 1 else f"{xids.count} errors"
    return NodeProblem(
        f"the kernel's log has {times} of {gpu.name}, the last one Xid {xids.last}{ago}: "
        "see `dmesg | grep Xid` and https://docs.nvidia.com/deploy/xid-errors"
    )


def _recovery_action(nvml: HealthNvml, handle: Any) -> int | None:
    """What the driver wants done about the GPU, 0 for nothing; None when it is too old to say."""
    values = _ask(nvml, lambda: nvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_ACTION_FIELD]))
    if not values or values[0].nvmlReturn != 0:
        return None
    return int(values[0].value.uiVal)


def _ask(nvml: HealthNvml, question: Callable[[], Any]) -> Any:
    """The answer, or None where this GPU or this driver cannot give it, as many of them cannot."""
    try:
        return question()
    except nvml.NVMLError:
        return None


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
