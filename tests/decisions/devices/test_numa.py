"""`--numa-binding` on simulated machines."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlrover_run.devices.count import DeviceId
from dlrover_run.devices.numa import Mode, cpus_for_rank, parse_ranges
from dlrover_run.spec import SpecError

MODES: tuple[Mode, ...] = ("node", "socket", "exclusive", "core-complex")


class Machine:
    """A sysfs tree; each CPU is given with its node, socket, core mates and the CPUs that share its last cache."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes: dict[int, set[int]] = {}
        self.gpus: list[DeviceId] = []

    def cpus(
        self, cpus: Sequence[int], node: int, socket: int, cores: Sequence[set[int]], caches: Sequence[set[int]]
    ) -> None:
        for cpu in cpus:
            base = self.root / "devices/system/cpu" / f"cpu{cpu}"
            core = next(group for group in cores if cpu in group)
            cache = next(group for group in caches if cpu in group)
            self._write(base / "topology/physical_package_id", str(socket))
            self._write(base / "topology/thread_siblings_list", ",".join(map(str, sorted(core))))
            levels = [("Data", 1, core), ("Instruction", 1, core), ("Unified", 2, core), ("Unified", 3, cache)]
            for index, (kind, level, shared) in enumerate(levels):
                self._write(base / f"cache/index{index}/type", kind)
                self._write(base / f"cache/index{index}/level", str(level))
                self._write(base / f"cache/index{index}/shared_cpu_list", ",".join(map(str, sorted(shared))))
            # An instruction cache is no place to share data, whatever level it claims.
            self._write(base / "cache/index9/type", "Instruction")
            self._write(base / "cache/index9/level", "4")
            self._write(base / "cache/index9/shared_cpu_list", str(cpu))
        self.node(node, set(cpus))

    def node(self, node: int, cpus: set[int]) -> None:
        self.nodes[node] = cpus
        self._write(self.root / f"devices/system/node/node{node}/cpulist", ",".join(map(str, sorted(cpus))))
        self._write(self.root / "devices/system/node/online", ",".join(map(str, sorted(self.nodes))))

    def gpu(self, node: int) -> None:
        address = f"0000:{0x10 + len(self.gpus):02x}:00.0"
        self._write(self.root / "bus/pci/devices" / address / "numa_node", str(node))
        # NVML's spelling of the same address must do too.
        self.gpus.append(DeviceId(f"GPU-{len(self.gpus)}", "0000" + address.upper()))

    def with_gpu(self, node: int) -> Machine:
        """This machine with one more GPU."""
        machine = Machine(self.root)
        machine.nodes, machine.gpus = self.nodes, [*self.gpus]
        machine.gpu(node)
        return machine

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def bind(self, mode: Mode, local_rank: int, allowed: set[int] | None = None) -> set[int]:
        usable = set().union(*self.nodes.values()) if allowed is None else allowed
        return set(cpus_for_rank(mode, local_rank, self.gpus, self.root, usable))


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """Two sockets, two nodes a socket, three cores a node with two threads each (N and N+12); GPUs on nodes 0, 0, 1, 3.

    In each node the first two cores share one last-level cache and the third has its own. Node 4 is memory only.
    All tests share its hundreds of files.
    """
    machine = Machine(tmp_path_factory.mktemp("sys"))
    for node in range(4):
        low = range(node * 3, node * 3 + 3)
        cores = [{cpu, cpu + 12} for cpu in low]
        caches = [cores[0] | cores[1], cores[2]]
        machine.cpus([*low, *(cpu + 12 for cpu in low)], node, node // 2, cores, caches)
    machine.node(4, set())
    for node in (0, 0, 1, 3):
        machine.gpu(node)
    return machine


NODE_0, NODE_1 = {0, 1, 2, 12, 13, 14}, {3, 4, 5, 15, 16, 17}
NODE_3 = {9, 10, 11, 21, 22, 23}


@pytest.mark.parametrize(
    ("mode", "rank", "allowed", "bound"),
    [
        ("node", 0, None, NODE_0),
        ("node", 1, None, NODE_0),
        ("node", 3, None, NODE_3),
        ("socket", 0, None, NODE_0 | NODE_1),
        ("socket", 2, None, NODE_0 | NODE_1),
        ("socket", 3, None, {6, 7, 8, 18, 19, 20} | NODE_3),
        ("socket", 0, NODE_0, NODE_0),
        # Whole cores, and the first one gets the odd one.
        ("exclusive", 0, None, {0, 12, 1, 13}),
        ("exclusive", 1, None, {2, 14}),
        ("exclusive", 2, None, NODE_1),
        ("exclusive", 0, {0, 1, 13}, {0}),
        ("exclusive", 1, {0, 1, 13}, {1, 13}),
        # The largest cache first, by its allowed CPUs, and again from the first.
        ("core-complex", 0, None, {0, 1, 12, 13}),
        ("core-complex", 1, None, {2, 14}),
        ("core-complex", 4, None, {0, 1, 12, 13}),
        ("core-complex", 0, {1, 2, 14}, {2, 14}),
        ("core-complex", 1, {1, 2, 14}, {1}),
    ],
)
def test_a_rank_is_bound_to_cpus_near_its_gpu(
    big: Machine, mode: Mode, rank: int, allowed: set[int] | None, bound: set[int]
) -> None:
    machine = big.with_gpu(0) if rank == 4 else big
    assert machine.bind(mode, rank, allowed) == bound


@pytest.mark.parametrize(
    ("mode", "rank", "allowed", "words"),
    [
        ("exclusive", 0, {0, 12}, "--numa-binding=exclusive: NUMA node 0 has 1 usable physical cores for 2 GPUs"),
        ("node", 3, {0}, "no CPU of NUMA node 3"),
        *((mode, 4, None, rf"--numa-binding={mode}: local rank 4 has no GPU .* \(4 visible\)") for mode in MODES),
    ],
)
def test_what_cannot_be_bound_is_an_error(
    big: Machine, mode: Mode, rank: int, allowed: set[int] | None, words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        big.bind(mode, rank, allowed)


def test_a_cpu_without_caches_is_an_error(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.cpus([0, 1], 0, 0, [{0}, {1}], [{0, 1}])
    machine.gpu(0)
    assert machine.bind("core-complex", 0) == {0, 1}
    for kind in (machine.root / "devices/system/cpu/cpu0/cache").glob("index*/type"):
        kind.write_text("Instruction\n")
    with pytest.raises(SpecError, match="no data cache is listed"):
        machine.bind("core-complex", 0)


@pytest.mark.parametrize("mode", MODES)
def test_an_unnamed_node_is_node_0(mode: Mode, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.cpus([0, 1], 0, 0, [{0}, {1}], [{0, 1}])
    machine.gpu(-1)
    assert machine.bind(mode, 0) == {0, 1}


@pytest.mark.parametrize(
    ("mode", "lost"),
    [
        ("node", "bus/pci/devices/0000:10:00.0/numa_node"),
        ("node", "devices/system/node/node0/cpulist"),
        ("socket", "devices/system/cpu/cpu0/topology/physical_package_id"),
        ("socket", "devices/system/node/online"),
        ("exclusive", "devices/system/cpu/cpu13/topology/thread_siblings_list"),
        ("core-complex", "devices/system/cpu/cpu2/cache/index3/shared_cpu_list"),
    ],
)
def test_a_missing_file_is_named(mode: Mode, lost: str, big: Machine) -> None:
    file = big.root / lost
    kept = file.rename(file.with_name("kept"))
    try:
        with pytest.raises(SpecError, match="topology cannot be read") as raised:
            big.bind(mode, 0)
    finally:
        kept.rename(file)
    assert lost in str(raised.value)


def test_ranges() -> None:
    assert parse_ranges("0-2,4, 6-6\n") == {0, 1, 2, 4, 6}
    assert parse_ranges("\n") == frozenset()


@pytest.mark.torchrun
@pytest.mark.parametrize("allowed", [None, {0, 1, 13, 4, 9}], ids=["all", "some"])
@pytest.mark.parametrize("mode", MODES)
def test_the_cpus_are_those_that_torch_takes(
    mode: Mode, allowed: set[int] | None, big: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    binding = pytest.importorskip("torch.numa.binding")
    usable = set().union(*big.nodes.values()) if allowed is None else allowed
    # torch fails on a node of which no CPU may be used, ours passes over it, so these are hidden from torch.
    nodes = {node for node, cpus in big.nodes.items() if cpus & usable}

    def moved(path: str) -> str:
        return str(path).replace("/sys", str(big.root), 1)

    monkeypatch.setattr(binding, "open", lambda path: io.StringIO(Path(moved(path)).read_text()), raising=False)
    monkeypatch.setattr(binding, "os", SimpleNamespace(listdir=lambda path: os.listdir(moved(path)), path=os.path))
    monkeypatch.setattr(binding, "_get_allowed_cpu_indices_for_current_thread", lambda: usable)
    monkeypatch.setattr(binding, "_get_systemwide_numa_node_indices", lambda: nodes)
    monkeypatch.setattr(binding, "_get_gpu_count", lambda: len(big.gpus))
    monkeypatch.setattr(binding, "_get_numa_node_index_for_gpu_index", lambda *, gpu_index: (0, 0, 1, 3)[gpu_index])
    for rank in range(len(big.gpus)):
        options = binding.NumaOptions(binding.AffinityMode(mode))
        theirs = binding._get_logical_cpus_to_bind_to(gpu_index=rank, numa_options=options)
        assert big.bind(mode, rank, usable) == theirs
