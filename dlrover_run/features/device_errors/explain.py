"""Which error of a GPU explains the end of a worker, and whether its node can go on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dlrover_run.devices.count import PhysicalGpu, select_devices
from dlrover_run.devices.gpu_state import GpuState
from dlrover_run.devices.xids import XidClass, classify, is_error_of_device
from dlrover_run.failures.worker_exit import DeviceError
from dlrover_run.features.device_errors.messages import WatchedGpu, XidSeen

EXPLAINS_FOR = 30.0
"""Seconds after an error in which the end of a worker may be its consequence: CUDA reports most errors at the next
call, and NCCL aborts a little later. A GPU that has to be reset explains any later end in its round."""

REPORTED_WITHIN = 1.0
"""Seconds after the end of a worker in which the driver may still report the error that has ended it."""

OFF_THE_BUS = 79
"""The one error after which no answer of the driver about the GPU counts: there is no GPU any more."""


def gpu_of(
    gpus: Sequence[WatchedGpu], visible: str | None, local_rank: int, error: XidSeen | None, pids: Iterable[int]
) -> int | None:
    """The index of the GPU that a worker uses; None if that cannot be known.

    `visible` is its CUDA_VISIBLE_DEVICES. An `error` names the processes that used its GPU: if the worker's `pids` are
    among them it is that GPU, whatever the local rank.
    """
    if error is not None and not set(error.pids).isdisjoint(pids):
        return error.index
    physical: list[PhysicalGpu] = [gpu.physical for gpu in gpus]
    indices = {gpu.pci_bus_id: gpu.index for gpu in gpus}
    seen = select_devices(visible, physical)
    if len(seen) != 1 and local_rank >= len(seen):
        return None
    # A worker that sees one GPU uses it; else that of its local rank, as scripts for torchrun do.
    return indices.get(seen[0 if len(seen) == 1 else local_rank].pci_bus_id)


def explain(
    index: int, ended_at: float, errors: Iterable[XidSeen], state: GpuState | None, memory_errors: int | None
) -> DeviceError | None:
    """What the driver reported of the GPU with this index that explains the end of a worker at that Unix time; None for
    nothing. `state` is that of the GPU now, None if the driver did not answer in time, and `memory_errors` its
    uncorrected memory errors when the round began."""
    name = f"GPU {index}"
    found = [error for error in errors if error.index == index and _may_explain(error, ended_at)]
    if found:
        error = min(found, key=_order)
        kind, text, _ = classify(error.number)
        clause = f"{_after(ended_at - error.at)}Xid {error.number} of {name} ({text}): {kind}"
        return DeviceError(clause, is_error_of_device(kind), remedy(error, state))
    if state is None:
        return None
    if state.problem:
        text = f"and {name} does not answer the driver (NVML: {state.problem}): {XidClass.HARDWARE}"
        return DeviceError(text, True, remedy(None, state))
    if state.required_action:
        text = f"and the driver reports that {name} has failed: {XidClass.HARDWARE}"
        return DeviceError(text, True, remedy(None, state))
    if memory_errors is not None and state.memory_errors is not None and state.memory_errors > memory_errors:
        more = state.memory_errors - memory_errors
        errors_text = "an uncorrected memory error" if more == 1 else f"{more} uncorrected memory errors"
        text = f"and {name} has had {errors_text} (ECC) since the round began: {XidClass.MEMORY}"
        return DeviceError(text, True, remedy(None, state))
    return None


def remedy(error: XidSeen | None, state: GpuState | None) -> str:
    """What has to be done before a program can use the GPU again; empty if it can be used now.

    The driver decides, as far as it reports an action. Else, and for a GPU that is no longer there, the table does.
    """
    if error is not None and error.number == OFF_THE_BUS:
        return "reboot the machine, and replace the GPU if it happens again"
    if state is not None and state.problem:
        return f"`nvidia-smi --gpu-reset -i {state.index}`, or reboot the machine"
    if state is not None and state.required_action:
        return f"the driver requires {state.required_action}"
    if (state is None or state.action is None) and error is not None and classify(error.number).needs_reset:
        return f"end all that uses it, then `nvidia-smi --gpu-reset -i {error.index}`, or reboot the machine"
    return ""


def memory_errors_of(states: Mapping[int, GpuState], index: int) -> int | None:
    """The uncorrected memory errors of a GPU in earlier states."""
    return states[index].memory_errors if index in states else None


def _may_explain(error: XidSeen, ended_at: float) -> bool:
    kind, _, needs_reset = classify(error.number)
    since = ended_at - error.at
    return kind is not XidClass.NOTE and since >= -REPORTED_WITHIN and (since <= EXPLAINS_FOR or needs_reset)


def _order(error: XidSeen) -> tuple[bool, bool, bool, float]:
    """The error that explains most comes first: one error often has others as its consequences."""
    kind, _, needs_reset = classify(error.number)
    return not needs_reset, not is_error_of_device(kind), kind is XidClass.UNKNOWN, error.at


def _after(seconds: float) -> str:
    if seconds < 0.0005:
        return "with "
    return f"{seconds * 1000:.0f} ms after " if seconds < 0.9995 else f"{seconds:.1f} s after "
