"""What the driver says of the state of one GPU, by NVML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dlrover_run.devices.count import Nvml

_VOLATILE, _UNCORRECTED = 0, 1
_RECOVERY_ACTION_FIELD = 230

REQUIRED_ACTIONS = {
    1: "it reset; end all that uses it, then `nvidia-smi --gpu-reset -i {index}`",
    2: "the machine rebooted; do so",
    3: "that its links to other GPUs are not used; end all that uses it, then `nvidia-smi --gpu-reset -i {index}`",
    6: "its PCIe bus reset; reboot the machine",
    7: "the machine rebooted; do so",
}
"""The recovery actions of NVML that mean that a program started now would fail. With the others (4: reset when it is
convenient; 5: recover the domain of linked nodes) the GPU stays usable."""


class GpuState(msgspec.Struct, frozen=True):
    """One GPU by its NVML index. `problem` is NVML's error if it does not answer. `action` is the recovery action that
    the driver requires, 0 for none, and `memory_errors` the uncorrected ones since the driver was loaded; each None if
    this GPU or driver does not report it."""

    index: int
    problem: str = ""
    action: int | None = None
    memory_errors: int | None = None

    @property
    def required_action(self) -> str:
        """What the driver requires before a program can use the GPU, to follow "requires"; empty for nothing."""
        return REQUIRED_ACTIONS.get(self.action or 0, "").format(index=self.index)


def read_state(nvml: Nvml, index: int) -> GpuState:
    """Read it now; NVML must be initialised. A GPU that is lost has a `problem`."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        # A GPU that is lost may have kept its handle.
        nvml.nvmlDeviceGetUUID(handle)
    except nvml.NVMLError as error:
        return GpuState(index, str(error))
    return GpuState(index, "", recovery_action(nvml, handle), uncorrected_errors(nvml, handle))


def recovery_action(nvml: Nvml, handle: Any) -> int | None:
    """The recovery action that the driver requires, 0 for none; None if the driver is too old to report it."""
    values = query(nvml, lambda: nvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_ACTION_FIELD]))
    if not values or values[0].nvmlReturn != 0:
        return None
    return int(values[0].value.uiVal)


def uncorrected_errors(nvml: Nvml, handle: Any) -> int | None:
    """Uncorrected memory errors (ECC) since the driver was loaded; None if the GPU does not count them."""
    errors = query(nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _VOLATILE))
    return None if errors is None else int(errors)


def query(nvml: Nvml, question: Callable[[], Any]) -> Any:
    """The result of a query, or None if this GPU or driver does not support it, as many do not."""
    try:
        return question()
    except nvml.NVMLError:
        return None
