"""Which device a local rank computes on, and how its workers would talk: CUDA, what a plug-in offers, or the CPU.

A plug-in is an entry point of the group `dlrover_run.accelerators` in a package of the user's interpreter:

    [project.entry-points."dlrover_run.accelerators"]
    npu = "my_package.check:find"

It names a callable that takes the local rank and the number of local ranks among which the devices that this process
sees are divided (0 and 1 where each rank is shown its own device alone), and returns None when this machine has no
such device, else an object with the attributes of `Accelerator`. Plug-ins are asked first, in the order of their names,
and the first device is taken. One that raises makes the check of this local rank fail with its words: a device that is
there and cannot be used is what a check is for. It runs before anything else uses torch, so it may import what
registers its backend with torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

import torch

GROUP = "dlrover_run.accelerators"
"""The group of entry points in which accelerators are offered."""


class Accelerator(Protocol):
    """One device. `dtype` is the number format to multiply matrices in, `backend` what torch.distributed calls the
    library that joins such devices; a backend of "gloo" joins their processes through the memory of the machine."""

    @property
    def name(self) -> str:
        """What a person knows it as, such as "NVIDIA H200"."""

    @property
    def device(self) -> torch.device:
        """Where tensors go; with its index where it has one."""

    @property
    def dtype(self) -> torch.dtype:
        """A floating point format that holds whole numbers up to 256, which bfloat16 does."""

    @property
    def backend(self) -> str:
        """Such as "nccl"."""

    def synchronize(self) -> None:
        """Wait until the device has done all it was told to do."""


@dataclass(frozen=True)
class Device:
    """An accelerator that torch itself knows."""

    name: str
    device: torch.device
    dtype: torch.dtype
    backend: str
    wait: Callable[[], None]

    def synchronize(self) -> None:
        """Wait until the device has done all it was told to do."""
        self.wait()


def find_accelerator(local_rank: int, workers: int) -> Accelerator:
    """The device of one of `workers` local ranks that see the same devices; a rank that is shown a device of its own is
    the only one of 1. Raises whatever a driver or a plug-in raises, and RuntimeError when there are several GPUs and
    none for this rank."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            offered: Accelerator | None = entry.load()(local_rank, workers)
        except Exception as error:
            raise RuntimeError(f"the accelerator plug-in {entry.name} failed: {error}") from error
        if offered is not None:
            return offered
    return _cuda(local_rank, workers) if torch.cuda.is_available() else _cpu()


def _cpu() -> Accelerator:
    return Device("cpu", torch.device("cpu"), torch.float32, "gloo", lambda: None)


def _cuda(local_rank: int, workers: int) -> Accelerator:
    present = torch.cuda.device_count()
    if present > 1 and local_rank >= present:
        # One GPU that all share is what a desk machine has; with several of them, one is missing.
        raise RuntimeError(f"local rank {local_rank} has no GPU: {present} are visible")
    device = torch.device("cuda", local_rank % present)
    torch.cuda.set_device(device)
    return Device(
        torch.cuda.get_device_name(device),
        device,
        torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32,
        # NCCL refuses two ranks on one device, and where there are fewer devices than workers they do not use it.
        "nccl" if workers <= present else "gloo",
        lambda: torch.cuda.synchronize(device),
    )
