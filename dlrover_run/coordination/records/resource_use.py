"""What the workers of a node use of its processors, memory and devices, for people: no decision depends on it. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from dlrover_run.coordination.records.bounds import Count, Name, Total

MAX_TASKS = 64
"""Tasks of one node whose use is reported one by one; the sums of the node are those of all."""

MAX_DEVICES = 8
"""Devices of one task that are reported."""

Ratio = Annotated[float, Meta(ge=0, le=1)]
Processors = Annotated[float, Meta(ge=0, le=1e6)]
Celsius = Annotated[int, Meta(ge=-300, le=1000)]
Watts = Annotated[float, Meta(ge=0, le=1e6)]


class DeviceFigures(msgspec.Struct, frozen=True, omit_defaults=True):
    """One accelerator that a worker uses. `index` is its number on the node as NVML counts. `share` is the part of the
    time in which this worker had it compute, and `memory` the bytes that this worker has allocated there; `busy`,
    `used` and `total` are those of the whole device, as are its temperature in degrees Celsius and its power in watts.
    Each is None where the driver does not report it: in a container it names no processes, so that only the whole
    device is known. An event log has it in this form: what reads one ignores fields that it does not know."""

    index: Count
    share: Ratio | None = None
    memory: Total | None = None
    busy: Ratio | None = None
    used: Total | None = None
    total: Total | None = None
    temperature: Celsius | None = None
    power: Watts | None = None


class DeviceUse(DeviceFigures, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The same as a node reports it: unknown fields are refused."""


class TaskUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one task uses, together with the processes below it. `processors` is the number of processors that it kept
    busy since the sample before, None in the first one, and `memory` its resident bytes."""

    name: Name
    memory: Total
    processors: Processors | None = None
    processes: Count = 1
    devices: Annotated[tuple[DeviceUse, ...], Meta(max_length=MAX_DEVICES)] = ()


class NodeUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the tasks of one node use together, and each of the first MAX_TASKS. `memory_limit` are the bytes that this
    container, or the machine, lets them use."""

    memory: Total
    memory_limit: Total
    processors: Processors | None = None
    tasks: Annotated[tuple[TaskUse, ...], Meta(max_length=MAX_TASKS)] = ()


def rounded(use: NodeUse) -> NodeUse:
    """The figures as they are sent: to two or three digits, so that a job whose use does not change sends nothing."""
    return msgspec.structs.replace(
        use,
        memory=_digits(use.memory, 3),
        processors=None if use.processors is None else _share(use.processors),
        tasks=tuple(map(_rounded_task, use.tasks)),
    )


def _rounded_task(task: TaskUse) -> TaskUse:
    return msgspec.structs.replace(
        task,
        memory=_digits(task.memory, 3),
        processors=None if task.processors is None else _share(task.processors),
        devices=tuple(map(_rounded_device, task.devices)),
    )


def _rounded_device(device: DeviceUse) -> DeviceUse:
    return msgspec.structs.replace(
        device,
        memory=None if device.memory is None else _digits(device.memory, 3),
        used=None if device.used is None else _digits(device.used, 3),
        power=None if device.power is None else float(_digits(round(device.power), 2)),
    )


def _share(number: float) -> float:
    return float(f"{number:.2g}") if number >= 0.1 else round(number, 2)


def _digits(number: int, digits: int) -> int:
    return int(float(f"{number:.{digits}g}"))
