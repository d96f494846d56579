"""The columns of `status` and `top` with what nodes and workers use. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dlrover_run.coordination.records.resource_use import DeviceUse, NodeUse, TaskUse
from dlrover_run.job_status.shown import Columns, Table
from dlrover_run.job_status.status import JobStatus, NodeStatus

GIB = 2**30

MAX_ROWS = 32
"""Workers of a job up to which each has a line of its own; of a larger one `status --json` has all."""


def node_cells(node: NodeStatus) -> tuple[str, str] | None:
    """The processors that the workers of a node keep busy, and their memory of what they may have."""
    use = node.use
    if use is None:
        return None
    return _processors(use.processors), f"{size(use.memory)} of {size(use.memory_limit)} GiB"


def worker_table(status: JobStatus) -> Table | None:
    """The head and the rows of the table of the workers; None if there are too many, or only one of which nothing more
    is known than of its node."""
    used = [
        (node.host if node.node is None else str(node.node), task) for node in status.nodes for task in _tasks(node.use)
    ]
    devices = [device for _, task in used for device in task.devices]
    if not used or len(used) > MAX_ROWS or (len(used) == 1 and not devices):
        return None
    head = ["WORKER", "NODE", "CPU", "MEMORY", "PROCESSES"]
    # A column without a figure is left out.
    heat = any(device.temperature is not None or device.power is not None for device in devices)
    if devices:
        head += ["GPU", "GPU USE", "GPU MEMORY", *(["GPU HEAT"] if heat else [])]
    rows = [(task.name, node, *_cells(task), *(_device_cells(task, heat) if devices else ())) for node, task in used]
    return head, rows


def _tasks(use: NodeUse | None) -> Sequence[TaskUse]:
    return () if use is None else use.tasks


def _cells(task: TaskUse) -> Sequence[str]:
    return _processors(task.processors), f"{size(task.memory)} GiB", str(task.processes)


def _device_cells(task: TaskUse, heat: bool) -> Sequence[str]:
    """Which devices it uses, and how much of each."""
    devices = task.devices
    cells = [
        _joined(str(device.index) for device in devices),
        _joined(map(_share, devices)),
        _joined(map(_memory, devices)),
    ]
    return [*cells, _joined(map(_heat, devices))] if heat else cells


def _share(device: DeviceUse) -> str:
    """The time in which the worker had the device compute, of all in which it did."""
    if device.share is None:
        return "?" if device.busy is None else f"? of {100 * device.busy:.0f} %"
    own = f"{100 * device.share:.0f}"
    return f"{own} %" if device.busy is None else f"{own} of {100 * device.busy:.0f} %"


def _memory(device: DeviceUse) -> str:
    own = device.memory if device.memory is not None else device.used
    if own is None:
        return "?"
    return f"{size(own)} GiB" if device.total is None else f"{size(own)} of {size(device.total)} GiB"


def _heat(device: DeviceUse) -> str:
    parts = [
        "" if device.temperature is None else f"{device.temperature} °C",
        "" if device.power is None else f"{device.power:.0f} W",
    ]
    return " ".join(filter(None, parts)) or "?"


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(parts) or "-"


def _processors(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def size(number: int) -> str:
    """Bytes in GiB: with two digits after the point below 10, else with one."""
    gib = number / GIB
    return f"{gib:.2f}" if gib < 10 else f"{gib:.1f}"


COLUMNS = Columns(("CPU", "MEMORY"), node_cells, worker_table)
