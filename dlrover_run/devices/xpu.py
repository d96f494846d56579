"""How many Intel GPUs torch would see, found in sysfs as Level Zero finds them, without loading either.

The roots of sysfs and of the device files are arguments, and so is the environment with its filters.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrover_run.spec import SpecError

GIVE_NUMBER = "give the number of workers instead, e.g. --nproc-per-node=2"
"""What always helps when workers cannot be counted."""

_INTEL_VENDOR = "0x8086"
_INTEL_DRIVERS = ("i915", "xe")
_INTEGRATED_ADDRESS = "0000:00:02.0"


@dataclass(frozen=True)
class IntelGpu:
    """One Intel GPU: `tiles` are what Level Zero shows as devices of their own unless it is told otherwise."""

    pci_bus_id: str
    tiles: int

    @property
    def integrated(self) -> bool:
        """Whether it is the graphics inside the processor, which always has this one address."""
        return self.pci_bus_id == _INTEGRATED_ADDRESS


def read_intel_gpus(sysfs: Path, dev: Path) -> list[IntelGpu]:
    """The Intel GPUs that this process can open, in order of PCI address.

    A container sees the sysfs of the whole machine, so a GPU counts only when its node in `dev/dri` is here too.
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
            # The xe driver lists tiles; for i915 each tile of a discrete card is one of its graphics units (gt).
            tiles = len(list(device.glob("tile[0-9]*"))) or len(list(device.glob("drm/card*/gt/gt[0-9]*"))) or 1
            address = device.resolve().name
            found.append(IntelGpu(address, 1 if address == _INTEGRATED_ADDRESS else tiles))
    return sorted(found, key=lambda gpu: gpu.pci_bus_id)


def select_xpus(environ: Mapping[str, str], gpus: Sequence[IntelGpu]) -> int:
    """How many devices torch sees: the discrete ones, else the integrated ones, cut down by `ZE_AFFINITY_MASK`.

    Level Zero shows tiles unless `ZE_FLAT_DEVICE_HIERARCHY` is COMPOSITE. In the mask, indices that do not exist and
    repeated ones change nothing, and `1.0` names a tile of card 1, which only COMPOSITE knows.
    """
    cards = environ.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT").upper() == "COMPOSITE"
    shown = [gpu for gpu in gpus for _ in range(1 if cards else gpu.tiles)]
    mask = environ.get("ZE_AFFINITY_MASK", "")
    if mask and mask != "default":
        entries = [entry.strip().partition(".") for entry in mask.split(",")]
        wanted = {int(card) for card, dot, _ in entries if card.isdecimal() and (cards or not dot)}
        shown = [gpu for index, gpu in enumerate(shown) if index in wanted]
    return len([gpu for gpu in shown if not gpu.integrated]) or len(shown)


def count_xpus(environ: Mapping[str, str], sysfs: Path, dev: Path) -> int:
    """The number of Intel GPUs, at least 1. Raises `SpecError` when there is none or they cannot be counted."""
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


def xpus_for_auto(environ: Mapping[str, str], sysfs: Path, dev: Path) -> int:
    """The number of discrete Intel GPUs, perhaps 0. Raises `SpecError` when there are some that cannot be counted."""
    discrete = [gpu for gpu in read_intel_gpus(sysfs, dev) if not gpu.integrated]
    if discrete:
        _check_selector("auto", environ)
    return select_xpus(environ, discrete)


def _check_selector(kind: str, environ: Mapping[str, str]) -> None:
    """SYCL's own filter has a grammar with backends and wildcards; a wrong guess at it would start wrong workers."""
    selector = environ.get("ONEAPI_DEVICE_SELECTOR", "")
    if selector.lower() not in ("", "*:*", "*:gpu", "level_zero:*", "level_zero:gpu"):
        raise SpecError(
            f"--nproc-per-node={kind}: Intel GPUs cannot be counted under ONEAPI_DEVICE_SELECTOR={selector!r}; "
            f"choose them with ZE_AFFINITY_MASK, or {GIVE_NUMBER}."
        )
