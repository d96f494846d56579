"""A save in memory copies a state from its device straight into memory that serves again. The device is pretended: its
storages are those of the processor, and nothing arrives before it is waited for."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.harness import WAIT

from dlrover_run.features.checkpoints.copies import Copies
from dlrover_run.features.checkpoints.memory import HeldMemory
from dlrover_run.features.checkpoints.worker_line import WorkerLine
from dlrover_run.features.checkpoints.write_behind import WriteBehind
from dlrover_run.training.checkpoint import CheckpointDirectory
from dlrover_run.training.device_copies import TorchCopies
from dlrover_run.training.memory_line import LINE_VARIABLE, TOKEN_VARIABLE, MemoryLine
from dlrover_run.training.saved_steps import SavedFile

torch = pytest.importorskip("torch")


class Device(TorchCopies):
    """Copies a storage when it is waited for."""

    def __init__(self, problem: str = "") -> None:
        self.calls: list[str] = []
        self.on_wait: Callable[[], None] = lambda: None
        self._problem = problem
        self._flying: list[tuple[memoryview, Any]] = []

    def is_remote(self, storage: Any) -> bool:
        return True

    def register(self, address: int, size: int, device: Any) -> str:
        self.calls.append("register")
        return self._problem

    def unregister(self, address: int) -> None:
        self.calls.append("unregister")

    def copy_async(self, target: memoryview, storage: Any) -> None:
        self.calls.append("copy")
        self._flying.append((target, storage))

    def synchronize(self, storages: Sequence[Any]) -> None:
        self.calls.append("wait")
        self.on_wait()
        while self._flying:
            super().copy_async(*self._flying.pop())


class Node:
    """The process that holds checkpoints, as a thread."""

    def __init__(self) -> None:
        self.memory = HeldMemory(1 << 30, lambda: 1 << 40, lambda figures: None)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._name = f"dlrover-test-{os.getpid()}-{os.urandom(8).hex()}"
        self._listener.bind(f"\0{self._name}")
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self._writer: threading.Thread | None = None
        self._lines: list[MemoryLine] = []

    def directory(self, path: Path, device: TorchCopies) -> CheckpointDirectory:
        """The directory of a worker of this node."""
        found = CheckpointDirectory(path)
        found._memory = MemoryLine({LINE_VARIABLE: f"@{self._name}", TOKEN_VARIABLE: "token"}, device)
        self._lines.append(found._memory)
        return found

    def write(self) -> None:
        """Write to the disk from now on."""
        self._writer = threading.Thread(target=WriteBehind(self.memory, pytest.fail).run)
        self._writer.start()

    def drain(self) -> None:
        """Write all to the disk."""
        if self._writer is None:
            self.write()
        self.memory.drain()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for line in self._lines:
            prepared(line)
            if line._socket is not None:
                line._socket.close()
        for thread in self._threads:
            thread.join(WAIT)
        self._listener.close()
        self.drain()

    def _accept(self) -> None:
        copies = Copies(self.memory, "", pytest.fail)
        try:
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(
                    threading.Thread(target=WorkerLine(connection, self.memory, copies, "token").serve)
                )
                self._threads[-1].start()
        except OSError:
            pass


def prepared(line: MemoryLine) -> None:
    """Return when the memory of the next save is ready."""
    for thread in threading.enumerate():
        if thread.name == "dlrover-run memory":
            thread.join(WAIT)


@pytest.fixture
def node() -> Iterator[Node]:
    one = Node()
    yield one
    one.close()


class Traced(torch.Tensor):  # type: ignore[misc,name-defined]  # torch is imported late
    """A class of its own."""


def state() -> dict[str, Any]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "base": base,
        "alias": base[1:3],
        "columns": base.t()[::2],
        "single": torch.tensor(7),
        "nothing": torch.empty(0, 3),
        "half": torch.full((5,), 1.5, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "complex": torch.tensor([1 + 2j]),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "sparse": torch.eye(3).to_sparse(),
        "large": torch.arange(300_000),
        "numbers": [1, 2.5, "three", (None, True)],
    }


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        dense = (each.to_dense() if each.is_sparse else each for each in (found, expected))
        return found.dtype == expected.dtype and type(found) is type(expected) and torch.equal(*dense)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    return bool(found == expected)


@pytest.mark.parametrize("device", [TorchCopies, Device])
def test_what_was_copied_is_what_torch_saves(tmp_path: Path, node: Node, device: type[TorchCopies]) -> None:
    directory = node.directory(tmp_path, device())
    for step in range(1, 6):
        directory.save(step, {**state(), "large": torch.arange(300_000) + step, "step": 10**step}, memory=True)
    expected = {**state(), "large": torch.arange(300_000) + 5, "step": 10**5}
    found = directory.load_latest()
    assert found is not None
    assert same(found.state, expected)
    assert found.state["base"].untyped_storage().data_ptr() == found.state["alias"].untyped_storage().data_ptr()
    assert found.state["columns"].stride() == state()["columns"].stride()
    node.drain()
    from_disk = CheckpointDirectory(tmp_path).load_latest()
    assert from_disk is not None
    assert same(from_disk.state, expected)


def test_what_is_in_flight_is_neither_held_nor_counted(tmp_path: Path, node: Node) -> None:
    device = Device()
    directory = node.directory(tmp_path, device)
    seen: list[tuple[list[str], int]] = []
    device.on_wait = lambda: seen.append((node.memory.names(tmp_path), node.memory.figures.waiting))
    directory.save(1, state(), memory=True)
    directory.save(2, state(), memory=True)
    assert seen == [([], 0), ([SavedFile(1).name], 1)]
    calls = [call for call in device.calls if call != "register"]
    assert calls == [*["copy"] * (len(calls) // 2 - 1), "wait"] * 2, "all copies begin before one is waited for"


def test_a_copy_that_fails_is_not_held_and_its_memory_serves_no_more(tmp_path: Path, node: Node) -> None:
    device = Device()
    directory = node.directory(tmp_path, device)
    directory.save(1, {"a": torch.zeros(9)}, memory=True)
    prepared(directory._memory)

    def fail() -> None:
        device._flying.clear()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device.on_wait = fail
    with pytest.raises(RuntimeError, match="illegal memory access"):
        directory.save(2, {"a": torch.ones(9)}, memory=True)
    assert node.memory.names(tmp_path) == [SavedFile(1).name]
    assert "unregister" in device.calls
    device.on_wait = lambda: None
    directory.save(3, {"a": torch.ones(9)}, memory=True)
    found = directory.load_latest()
    assert found is not None
    assert (found.step, found.state["a"].sum()) == (3, 9)


def test_memory_is_pinned_once_and_serves_again(tmp_path: Path, node: Node) -> None:
    device = Device()
    directory = node.directory(tmp_path, device)
    node.write()
    for step in range(1, 20):
        directory.save(step, state(), memory=True)
        assert node.memory.wait_until_written(tmp_path, SavedFile(step), WAIT)
        prepared(directory._memory)
    assert device.calls.count("register") == 3, "two steps are held, and one is filled"
    assert "unregister" not in device.calls
    del directory._memory
    node._lines.clear()
    assert device.calls.count("unregister") == 3


def test_memory_that_cannot_be_pinned_costs_one_warning(
    tmp_path: Path, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device("cudaHostRegister: error 2")
    directory = node.directory(tmp_path, device)
    for step in range(1, 4):
        directory.save(step, state(), memory=True)
    prepared(directory._memory)
    assert device.calls.count("register") == 1
    assert ["ulimit -l" in message for message in caplog.messages] == [True]
    found = directory.load_latest()
    assert found is not None
    assert same(found.state, state())


def permissions() -> Counter[str]:
    """How this process has the memory files of checkpoints mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    # Those of what was loaded are private.
    return Counter(line.split()[1] for line in lines if "dlrover-run checkpoint" in line and "s" in line.split()[1])


def test_this_process_cannot_change_what_is_held_and_its_children_do_not_have_it(tmp_path: Path, node: Node) -> None:
    gc.collect()
    before = permissions()
    directory = node.directory(tmp_path, Device())
    directory.save(1, state(), memory=True)
    prepared(directory._memory)
    assert permissions() - before == Counter(["r--s", "rw-s"]), "one file is held, and one is ready for the next save"
    if (child := os.fork()) == 0:
        os._exit(permissions().total())
    assert os.waitpid(child, 0)[1] == 0


def test_what_was_loaded_stays_as_it_is(tmp_path: Path, node: Node) -> None:
    directory = node.directory(tmp_path, Device())
    node.write()
    directory.save(1, {"a": torch.full((100_000,), 1.0)}, memory=True)
    found = directory.load_latest()
    assert found is not None
    for step in range(2, 8):
        directory.save(step, {"a": torch.full((100_000,), float(step))}, memory=True)
        assert node.memory.wait_until_written(tmp_path, SavedFile(step), WAIT)
    assert (found.state["a"] == 1.0).all()


def test_a_state_of_another_size_gets_other_memory(tmp_path: Path, node: Node) -> None:
    device = Device()
    directory = node.directory(tmp_path, device)
    for step, size in enumerate((1_000, 3_000_000, 10, 3_000_000), 1):
        directory.save(step, {"a": torch.full((size,), float(step))}, memory=True)
        found = directory.load_latest()
        assert found is not None
        assert (found.state["a"] == float(step)).all()
        assert found.state["a"].numel() == size
