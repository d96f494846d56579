"""The number of workers for `--nproc-per-node=auto|gpu|cpu|xpu` on this machine, without importing torch.

NVIDIA GPUs are counted through NVML, with `CUDA_VISIBLE_DEVICES` interpreted as by the CUDA driver. Intel GPUs are
counted in sysfs as Level Zero finds them, without loading it. NVML, the environment and the file system roots are
arguments.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrover_run.spec import SpecError
from dlrover_run.words.text import counted

# These two NVML errors mean that the machine has no NVIDIA GPU. Any other one means that there is a GPU that cannot be
# queried, and then `auto` must not silently use the CPUs.
_NVML_DRIVER_NOT_LOADED = 9
_NVML_LIBRARY_NOT_FOUND = 12

GIVE_NUMBER = "give the number of workers instead, e.g. --nproc-per-node=2"
"""The remedy that always works if workers cannot be counted."""

_INTEL_VENDOR = "0x8086"
_INTEL_DRIVERS = ("i915", "xe")
_INTEGRATED_ADDRESS = "0000:00:02.0"


Nvml = Any
"""The module `pynvml`, which has no type hints."""


@dataclass(frozen=True)
class DeviceId:
    """One device as CUDA programs see it: its UUID (`GPU-...` or `MIG-...`) and its PCI address as in sysfs."""

    uuid: str
    pci_bus_id: str


@dataclass(frozen=True)
class PhysicalGpu:
    """One GPU of the machine. `mig` is None if MIG mode is off, else the UUIDs of its MIG devices; may be empty."""

    device: DeviceId
    mig: tuple[str, ...] | None = None


class NvmlUnavailable(Exception):
    """NVML could not be queried; `absent`: because there is no NVIDIA driver on this machine."""

    def __init__(self, reason: str, absent: bool) -> None:
        super().__init__(reason)
        self.absent = absent


def count_workers(
    kind: str,
    environ: Mapping[str, str],
    nvml: Nvml = None,
    sysfs: Path = Path("/sys"),
    dev: Path = Path("/dev"),
    cpu_count: Callable[[], int] | None = None,
) -> int:
    """The number of workers for `kind`: `auto`, `gpu`, `cpu` or `xpu`.

    `auto` is the number of visible NVIDIA GPUs, else of discrete Intel GPUs, else of CPUs. Integrated Intel graphics
    count only for `xpu`: most desktops have one, and torchrun with an ordinary torch starts one worker per CPU there.
    Raises SpecError if the kind is unknown, cannot be counted, or the machine has none.
    """
    # As torch counts: the CPUs that this process may use, not all CPUs of the machine.
    cpus = cpu_count or (lambda: len(os.sched_getaffinity(0)))
    if kind == "cpu":
        return cpus()
    if kind == "gpu":
        return _count_gpus(environ, nvml)
    if kind == "xpu":
        return _count_xpus(environ, sysfs, dev)
    if kind != "auto":
        raise SpecError(f"--nproc-per-node={kind}: not a known kind; give a number, auto, gpu, cpu or xpu.")
    try:
        gpus = len(visible_devices(environ, nvml))
    except NvmlUnavailable as problem:
        if not problem.absent:
            raise SpecError(f"--nproc-per-node=auto: {problem}; repair that, or {GIVE_NUMBER}.") from None
        gpus = 0
    if gpus:
        return gpus
    discrete = [gpu for gpu in read_intel_gpus(sysfs, dev) if not gpu.integrated]
    if discrete:
        _check_selector("auto", environ)
    return select_xpus(environ, discrete) or cpus()


def _count_gpus(environ: Mapping[str, str], nvml: Nvml) -> int:
    try:
        gpus = read_gpus(nvml)
    except NvmlUnavailable as problem:
        raise SpecError(f"--nproc-per-node=gpu: {problem}; {GIVE_NUMBER} or --nproc-per-node=cpu.") from None
    visible = select_devices(environ.get("CUDA_VISIBLE_DEVICES"), gpus)
    if visible:
        return len(visible)
    if not gpus:
        raise SpecError(f"--nproc-per-node=gpu: the NVIDIA driver shows no GPU; {GIVE_NUMBER} or --nproc-per-node=cpu.")
    setting = environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        raise SpecError(
            f"--nproc-per-node=gpu: this machine has {counted(len(gpus), 'GPU')} in MIG mode and without a MIG device; "
            f"make one (nvidia-smi mig -cgi), or {GIVE_NUMBER}."
        )
    raise SpecError(
        f"--nproc-per-node=gpu: CUDA_VISIBLE_DEVICES={setting!r} shows none of the {counted(len(gpus), 'GPU')} of this "
        f"machine; unset it or name GPUs in it, or {GIVE_NUMBER}."
    )


def visible_devices(environ: Mapping[str, str], nvml: Nvml = None) -> list[DeviceId]:
    """The NVIDIA devices that a program started with this environment sees, in the order of `cuda:0`, `cuda:1`, ...

    NVML orders by PCI address. CUDA does so too among equal GPUs. If the models differ and `CUDA_DEVICE_ORDER` is not
    `PCI_BUS_ID`, CUDA puts the fastest first, which cannot be determined here: the number is right, the order may be
    wrong. Raises NvmlUnavailable.
    """
    return select_devices(environ.get("CUDA_VISIBLE_DEVICES"), read_gpus(nvml))


def read_gpus(nvml: Nvml = None) -> list[PhysicalGpu]:
    """All GPUs of NVML, in its order. Raises NvmlUnavailable."""
    try:
        with open_nvml(nvml) as nvml:
            return [read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except ImportError as problem:
        raise NvmlUnavailable(f"GPUs cannot be counted because nvidia-ml-py is missing ({problem})", True) from None


@contextlib.contextmanager
def open_nvml(nvml: Nvml = None) -> Iterator[Nvml]:
    """NVML, initialised; None imports `pynvml`. Raises NvmlUnavailable, also for an NVMLError in the block."""
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        absent = getattr(problem, "value", None) in (_NVML_DRIVER_NOT_LOADED, _NVML_LIBRARY_NOT_FOUND)
        what = "no NVIDIA driver was found" if absent else "the NVIDIA driver does not answer"
        raise NvmlUnavailable(f"{what} (NVML: {problem})", absent) from None
    try:
        yield nvml
    except nvml.NVMLError as problem:
        raise NvmlUnavailable(f"the NVIDIA driver cannot list its GPUs (NVML: {problem})", False) from None
    finally:
        nvml.nvmlShutdown()


def read_gpu(nvml: Nvml, index: int) -> PhysicalGpu:
    """Read one GPU; NVML must be initialised. Raises its NVMLError."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    address = sysfs_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    device = DeviceId(_text(nvml.nvmlDeviceGetUUID(handle)), address)
    try:
        mig_on = nvml.nvmlDeviceGetMigMode(handle)[0] == 1
    except nvml.NVMLError:  # GPUs without MIG return "not supported".
        mig_on = False
    if not mig_on:
        return PhysicalGpu(device)
    parts = []
    for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        # An empty slot returns "not found", and a later one may be in use.
        with contextlib.suppress(nvml.NVMLError):
            parts.append(_text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot))))
    return PhysicalGpu(device, tuple(parts))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def sysfs_address(bus_id: str) -> str:
    """A PCI address as in sysfs: NVML has `00000000:1B:00.0` for `0000:1b:00.0`."""
    domain, _, rest = bus_id.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def select_devices(setting: str | None, gpus: Sequence[PhysicalGpu]) -> list[DeviceId]:
    """The devices that CUDA selects by `CUDA_VISIBLE_DEVICES`; `setting` None is an unset variable.

    The first entry decides whether the list is of `GPU-` UUIDs, of `MIG-` UUIDs or of indices. The list ends before the
    first entry that names no device (so an empty entry, `-1` and `NoDevFiles` select none), and a device that is named
    twice makes the whole list empty. A UUID may be abbreviated as long as it is unique.

    A CUDA process sees at most one MIG device, and no whole GPU beside it.
    """
    if setting is None:
        return _with_mig_rule(gpus)
    kind = next((prefix for prefix in ("GPU-", "MIG-") if setting.startswith(prefix)), "")
    names = [DeviceId(uuid, gpu.device.pci_bus_id) for gpu in gpus for uuid in gpu.mig or ()]
    if kind == "MIG-":
        return _chosen(setting, lambda entry: _by_uuid(entry, kind, [name.uuid for name in names]), names)[:1]
    uuids = [gpu.device.uuid for gpu in gpus]
    if kind == "GPU-":
        return _with_mig_rule(_chosen(setting, lambda entry: _by_uuid(entry, kind, uuids), gpus))
    return _with_mig_rule(_chosen(setting, lambda entry: _by_index(entry, len(gpus)), gpus))


def _chosen(setting: str, find: Callable[[str], int | None], devices: Sequence[Any]) -> list[Any]:
    found: list[int] = []
    for entry in setting.split(","):
        index = find(entry)
        if index is None:
            break
        if index in found:
            return []
        found.append(index)
    return [devices[index] for index in found]


def _by_uuid(entry: str, prefix: str, uuids: Sequence[str]) -> int | None:
    if not entry.startswith(prefix):
        return None
    fits = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return fits[0] if len(fits) == 1 else None


def _by_index(entry: str, count: int) -> int | None:
    """The number at the start of an entry: CUDA parses it like C's strtoul, so `1gpu` is 1."""
    entry = entry.strip()
    digits = entry[1:] if entry[:1] == "+" else entry
    number = digits[: len(digits) - len(digits.lstrip("0123456789"))]
    return int(number) if number and int(number) < count else None


def _with_mig_rule(gpus: Sequence[PhysicalGpu]) -> list[DeviceId]:
    parts = [DeviceId(gpu.mig[0], gpu.device.pci_bus_id) for gpu in gpus if gpu.mig]
    return parts[:1] or [gpu.device for gpu in gpus if gpu.mig is None]


@dataclass(frozen=True)
class IntelGpu:
    """One Intel GPU: Level Zero shows each of its `tiles` as a device by default."""

    pci_bus_id: str
    tiles: int

    @property
    def integrated(self) -> bool:
        """Whether it is the graphics unit of the CPU, which always has this address."""
        return self.pci_bus_id == _INTEGRATED_ADDRESS


def read_intel_gpus(sysfs: Path, dev: Path) -> list[IntelGpu]:
    """The Intel GPUs that this process can open, in order of PCI address.

    A container sees the sysfs of the whole machine, so a GPU counts only if its node in `dev/dri` is accessible too.
    """
    found: list[IntelGpu] = []
    for node in sorted((sysfs / "class" / "drm").glob("renderD*")):
        device = node / "device"
        try:
            vendor = (device / "vendor").read_text().strip()
            driver = (device / "driver").resolve(strict=True).name
        except OSError:
            continue
        usable = os.access(dev / "dri" / node.name, os.R_OK | os.W_OK)
        if usable and vendor == _INTEL_VENDOR and driver in _INTEL_DRIVERS:
            # The xe driver lists tiles; with i915 each tile of a discrete card is one of its graphics units (gt).
            tiles = len(list(device.glob("tile[0-9]*"))) or len(list(device.glob("drm/card*/gt/gt[0-9]*"))) or 1
            address = device.resolve().name
            found.append(IntelGpu(address, 1 if address == _INTEGRATED_ADDRESS else tiles))
    return sorted(found, key=lambda gpu: gpu.pci_bus_id)


def select_xpus(environ: Mapping[str, str], gpus: Sequence[IntelGpu]) -> int:
    """The number of devices that torch sees: the discrete ones, else the integrated ones, limited by
    `ZE_AFFINITY_MASK`.

    Level Zero shows tiles unless `ZE_FLAT_DEVICE_HIERARCHY` is COMPOSITE. In the mask, unknown and repeated indices
    have no effect, and `1.0` is a tile of card 1, which exists only with COMPOSITE.
    """
    cards = environ.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT").upper() == "COMPOSITE"
    shown = [gpu for gpu in gpus for _ in range(1 if cards else gpu.tiles)]
    mask = environ.get("ZE_AFFINITY_MASK", "")
    if mask and mask != "default":
        entries = [entry.strip().partition(".") for entry in mask.split(",")]
        wanted = {int(card) for card, dot, _ in entries if card.isdecimal() and (cards or not dot)}
        shown = [gpu for index, gpu in enumerate(shown) if index in wanted]
    return len([gpu for gpu in shown if not gpu.integrated]) or len(shown)


def _count_xpus(environ: Mapping[str, str], sysfs: Path, dev: Path) -> int:
    gpus = read_intel_gpus(sysfs, dev)
    if not gpus:
        raise SpecError(
            "--nproc-per-node=xpu: no Intel GPU with the driver i915 or xe was found that this process may open in "
            f"{dev / 'dri'}; {GIVE_NUMBER} or --nproc-per-node=cpu."
        )
    _check_selector("xpu", environ)
    count = select_xpus(environ, gpus)
    if count == 0:
        raise SpecError(
            f"--nproc-per-node=xpu: ZE_AFFINITY_MASK={environ['ZE_AFFINITY_MASK']!r} shows none of this machine's "
            f"Intel GPUs ({len(gpus)} found); unset it, or {GIVE_NUMBER}."
        )
    return count


def _check_selector(kind: str, environ: Mapping[str, str]) -> None:
    """Reject SYCL's own filter, whose grammar has backends and wildcards: a wrong guess would start wrong workers."""
    selector = environ.get("ONEAPI_DEVICE_SELECTOR", "")
    if selector.lower() not in ("", "*:*", "*:gpu", "level_zero:*", "level_zero:gpu"):
        raise SpecError(
            f"--nproc-per-node={kind}: Intel GPUs cannot be counted under ONEAPI_DEVICE_SELECTOR={selector!r}; "
            f"choose them with ZE_AFFINITY_MASK, or {GIVE_NUMBER}."
        )
