"""What workers use, in the families of `/metrics`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from dlrover_run.coordination.records.resource_use import DeviceUse, NodeUse, TaskUse
from dlrover_run.job_status.shown import JOB, Family, Sample
from dlrover_run.job_status.status import JobStatus

T = TypeVar("T")
Labels = dict[str, str]


def families(statuses: Sequence[JobStatus]) -> Iterable[Family]:
    """The families; a figure that is not known has no sample. The label `worker` is `rank 3`, or the name of a task."""
    nodes: list[tuple[Labels, NodeUse]] = [
        ({JOB: status.job, "node": node.host if node.node is None else str(node.node)}, node.use)
        for status in statuses
        for node in status.nodes
        if node.use is not None
    ]
    tasks = [({**labels, "worker": task.name}, task) for labels, use in nodes for task in use.tasks]
    on_devices = [({**labels, "device": str(one.index)}, one) for labels, task in tasks for one in task.devices]
    devices = _devices(nodes)
    yield _gauge("dlrover_node_memory_limit_bytes", "Bytes that the workers of a node may use.", nodes, _limit)
    yield _gauge("dlrover_worker_processors", "Processors that a worker keeps busy.", tasks, _processors)
    yield _gauge("dlrover_worker_memory_bytes", "Resident bytes of a worker and its children.", tasks, _memory)
    yield _gauge(
        "dlrover_worker_device_use_ratio",
        "The share of the time in which a worker has a device compute.",
        on_devices,
        lambda device: device.share,
    )
    yield _gauge(
        "dlrover_worker_device_memory_bytes", "Bytes of a worker on a device.", on_devices, lambda device: device.memory
    )
    yield _gauge(
        "dlrover_device_use_ratio",
        "The share of the time in which a device computes.",
        devices,
        lambda device: device.busy,
    )
    yield _gauge("dlrover_device_memory_bytes", "Bytes used on a device.", devices, lambda device: device.used)
    yield _gauge("dlrover_device_memory_limit_bytes", "Bytes that a device has.", devices, lambda device: device.total)
    yield _gauge(
        "dlrover_device_temperature_celsius", "The temperature of a device.", devices, lambda device: device.temperature
    )
    yield _gauge("dlrover_device_power_watts", "What a device draws.", devices, lambda device: device.power)


def _devices(nodes: Iterable[tuple[Labels, NodeUse]]) -> list[tuple[Labels, DeviceUse]]:
    """Each device that a worker uses, once: several workers may use one."""
    found = {}
    for labels, use in nodes:
        for device in (device for task in use.tasks for device in task.devices):
            found[tuple(labels.values()), device.index] = ({**labels, "device": str(device.index)}, device)
    return list(found.values())


def _gauge(name: str, text: str, known: Sequence[tuple[Labels, T]], figure: Callable[[T], float | None]) -> Family:
    samples: list[Sample] = [(labels, float(value)) for labels, one in known if (value := figure(one)) is not None]
    return name, "gauge", text, samples


def _limit(use: NodeUse) -> float:
    return use.memory_limit


def _processors(task: TaskUse) -> float | None:
    return task.processors


def _memory(task: TaskUse) -> float:
    return task.memory
