"""Finds the device of a local rank and the backend of its workers: that of a plug-in, CUDA, or the CPU.

A plug-in is an entry point of the group `dlrover_run.accelerators` in a package of the user's interpreter:

    [project.entry-points."dlrover_run.accelerators"]
    npu = "my_package.check:find"

It names a callable that takes the local rank and the number of local ranks among which the visible devices are divided
(0 and 1 if each rank sees only its own device). It returns None if this machine has no such device, else an object
with the attributes of `Accelerator`. Plug-ins are tried first, in the order of their names, and the first device is
taken. An exception makes the check of this local rank fail with its message, because a device that exists and cannot be
used is a fault. A plug-in runs before anything else uses torch, so it may import a module that registers its backend
with torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import NamedTuple

import torch

GROUP = "dlrover_run.accelerators"
"""The group of entry points of accelerators."""


class Accelerator(NamedTuple):
    """One device. `name` is for the user, such as "NVIDIA H200"; `device` has its index if there is one. `dtype` is
    the number format of the matrices: floating point, exact for integers up to 256, as bfloat16 is. `backend` is the
    name in torch.distributed of the library that connects such devices, such as "nccl"; "gloo" connects their processes
    through the memory of the machine. `synchronize` waits until the device has finished all submitted work. `uuid` is
    the same in all processes that use the device, and empty if it is not known; a plug-in may leave it out."""

    name: str
    device: torch.device
    dtype: torch.dtype
    backend: str
    synchronize: Callable[[], None]
    uuid: str = ""


def select_accelerator(local_rank: int, workers: int) -> Accelerator:
    """The device of one of `workers` local ranks that see the same devices; a rank that sees only a device of its own
    is 0 of 1. Raises what a driver raises, and RuntimeError if a plug-in fails, or if there are several GPUs and none
    for this rank."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            offered: Accelerator | None = entry.load()(local_rank, workers)
        except Exception as error:
            raise RuntimeError(f"the accelerator plug-in {entry.name} failed: {error}") from error
        if offered is not None:
            return offered
    if not torch.cuda.is_available():
        return Accelerator("cpu", torch.device("cpu"), torch.float32, "gloo", lambda: None)
    present = torch.cuda.device_count()
    if present > 1 and local_rank >= present:
        # A workstation has one GPU that all ranks share; with several GPUs, one is missing.
        raise RuntimeError(f"local rank {local_rank} has no GPU: {present} are visible")
    device = torch.device("cuda", local_rank % present)
    torch.cuda.set_device(device)
    return Accelerator(
        torch.cuda.get_device_name(device),
        device,
        torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32,
        # NCCL refuses two ranks on one device, and where there are fewer devices than workers they do not use it.
        "nccl" if workers <= present else "gloo",
        lambda: torch.cuda.synchronize(device),
        # Older versions of torch do not have it.
        str(getattr(torch.cuda.get_device_properties(device), "uuid", "")),
    )
