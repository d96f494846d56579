"""The CPUs to which `--numa-binding` binds a worker, so that it runs near its GPU.

A pure function of a sysfs tree, with torchrun's four modes. The result is for `sched_setaffinity` in the worker, so the
program `numactl` is not needed. Local rank N belongs to the Nth visible GPU. (psutil does not report NUMA topology.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Literal, TypeVar

from dlrover_run.devices.count import DeviceId, Nvml, NvmlUnavailable, sysfs_address, visible_devices
from dlrover_run.spec import SpecError

Mode = Literal["node", "socket", "exclusive", "core-complex"]

T = TypeVar("T")


def binding_gpus(mode: Mode, environ: Mapping[str, str], nvml: Nvml = None) -> list[DeviceId]:
    """The GPUs near which workers are bound, at least one, in the order of local ranks. Raises SpecError."""
    try:
        gpus = visible_devices(environ, nvml)
    except NvmlUnavailable as problem:
        raise SpecError(f"--numa-binding={mode} needs NVIDIA GPUs: {problem}; leave the flag out.") from None
    if not gpus:
        setting = environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if setting is None else f" (CUDA_VISIBLE_DEVICES={setting!r})"
        raise SpecError(f"--numa-binding={mode} needs NVIDIA GPUs: none is visible{shown}; leave the flag out.")
    return gpus


def cpus_for_rank(
    mode: Mode,
    local_rank: int,
    gpus: Sequence[DeviceId],
    sysfs: Path = Path("/sys"),
    allowed_cpus: AbstractSet[int] | None = None,
) -> frozenset[int]:
    """The logical CPUs for one worker: never empty, and only allowed ones.

    - `node`: all CPUs of the NUMA node that holds the worker's GPU.
    - `socket`: all CPUs of every NUMA node of that node's socket.
    - `exclusive`: whole physical cores of the node, divided evenly among its GPUs; the first GPUs get the remaining
      cores, one each.
    - `core-complex`: the CPUs of one last-level cache of the node, a different one for each GPU as long as there are
      enough; the caches with the most allowed CPUs are used first.

    `allowed_cpus` None is this process's own affinity, which a worker inherits. Raises SpecError if there is no such
    GPU, or the topology is unknown or too small.
    """
    machine = _Machine(mode, sysfs, frozenset(os.sched_getaffinity(0) if allowed_cpus is None else allowed_cpus))
    if local_rank >= len(gpus):
        raise machine.error(
            f"local rank {local_rank} has no GPU to be bound near ({len(gpus)} visible)",
            "start at most one worker a GPU, or leave the flag out",
        )
    node = machine.node_of(gpus[local_rank])
    cpus = machine.allowed_cpus_of(node)
    if not cpus:
        raise machine.error(
            f"no CPU of NUMA node {node}, which holds the GPU of local rank {local_rank}, is allowed to this process",
            "widen its CPU affinity (taskset, cpuset), or leave the flag out",
        )
    if mode == "node":
        return cpus
    if mode == "socket":
        return machine.socket_cpus(node)
    neighbours = [index for index, gpu in enumerate(gpus) if machine.node_of(gpu) == node]
    place = neighbours.index(local_rank)
    if mode == "core-complex":
        caches = sorted(_grouped(cpus, machine.cache_of), key=len, reverse=True)
        return caches[place % len(caches)]
    cores = _grouped(cpus, machine.core_of)
    if len(cores) < len(neighbours):
        raise machine.error(
            f"NUMA node {node} has {len(cores)} usable physical cores for {len(neighbours)} GPUs",
            "use --numa-binding=node, which lets workers share cores",
        )
    each, extra = divmod(len(cores), len(neighbours))
    start = place * each + min(place, extra)
    return frozenset().union(*cores[start : start + each + (place < extra)])


def _grouped(cpus: Iterable[int], name_of: Callable[[int], int]) -> list[frozenset[int]]:
    """The CPUs grouped by the id that `name_of` returns, in the order of the ids."""
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(name_of(cpu), set()).add(cpu)
    return [frozenset(groups[name]) for name in sorted(groups)]


class _Machine:
    """Reads one sysfs tree for one flag; every error is a SpecError that names the flag and the file."""

    def __init__(self, mode: Mode, sysfs: Path, allowed: frozenset[int]) -> None:
        self._mode = mode
        self._sysfs = sysfs
        self._cpu_root = sysfs / "devices" / "system" / "cpu"
        self._node_root = sysfs / "devices" / "system" / "node"
        self._allowed = allowed

    def error(self, what: str, remedy: str) -> SpecError:
        return SpecError(f"--numa-binding={self._mode}: {what}; {remedy}.")

    def _unknown(self, path: Path, why: object) -> SpecError:
        return self.error(f"the machine's topology cannot be read ({path}: {why})", "leave the flag out")

    def _read(self, path: Path, parse: Callable[[str], T]) -> T:
        try:
            return parse(path.read_text())
        except (OSError, ValueError) as problem:
            raise self._unknown(path, getattr(problem, "strerror", None) or problem) from None

    def node_of(self, gpu: DeviceId) -> int:
        # The kernel has -1 if the firmware names no node, most often because there is only one.
        return max(0, self._read(self._sysfs / "bus/pci/devices" / sysfs_address(gpu.pci_bus_id) / "numa_node", int))

    def allowed_cpus_of(self, node: int) -> frozenset[int]:
        return self._read(self._node_root / f"node{node}" / "cpulist", parse_ranges) & self._allowed

    def socket_cpus(self, node: int) -> frozenset[int]:
        wanted = self._socket_of(min(self.allowed_cpus_of(node)))
        together: frozenset[int] = frozenset()
        for other in sorted(self._read(self._node_root / "online", parse_ranges)):
            cpus = self.allowed_cpus_of(other)
            # A node may have only memory, or no CPU that this process may use; its socket is then unknown.
            if cpus and self._socket_of(min(cpus)) == wanted:
                together |= cpus
        return together

    def _socket_of(self, cpu: int) -> int:
        return self._read(self._cpu_root / f"cpu{cpu}" / "topology" / "physical_package_id", int)

    def core_of(self, cpu: int) -> int:
        """The id of the physical core: its lowest hardware thread."""
        return min(self._read(self._cpu_root / f"cpu{cpu}" / "topology" / "thread_siblings_list", parse_ranges))

    def cache_of(self, cpu: int) -> int:
        """The id of the last-level cache: the lowest CPU that shares it."""
        root = self._cpu_root / f"cpu{cpu}" / "cache"
        levels: dict[int, Path] = {}
        for index in sorted(root.glob("index[0-9]*")):
            if self._read(index / "type", str.strip) in ("Unified", "Data"):
                levels.setdefault(self._read(index / "level", int), index)
        if not levels:
            raise self._unknown(root, "no data cache is listed")
        return min(self._read(levels[max(levels)] / "shared_cpu_list", parse_ranges))


def parse_ranges(text: str) -> frozenset[int]:
    """The numbers of a sysfs list such as `0-2,4`. Raises ValueError."""
    numbers: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
