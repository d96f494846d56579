"""The laboratory of hangs with the shape of a device: its workers wait as those with NCCL do, and answer as they do."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.harness import until

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from device_lab import build
from device_lab.reports import RasReports
from device_lab.shared import OPERATIONS, Rank, Shared, read_shared

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C compiler")

WAIT = 60.0
PAUSE = 0.05
SPUN = 5
"""Ticks of the processor that a main thread that spins has used."""

SPINS, SLEEPS = range(2)

SCRIPT = """
import ctypes, faulthandler, os, signal, sys
library_path, folder, ras, rank, world, tcp, wait, copies = sys.argv[1:]
faulthandler.register(signal.SIGUSR1, file=open(f"{folder}/stack-{rank}", "w"), all_threads=False)
library = ctypes.CDLL(library_path)
library.device_kernel.argtypes = [ctypes.c_double]
numbers = int(tcp), int(wait), int(copies), 0
assert not library.device_open(folder.encode(), int(rank), int(world), int(rank), b"lo", ras.encode(), *numbers)
library.device_group.argtypes = [ctypes.c_int, ctypes.c_uint64]
library.device_group(1, 0b11)
print("open", flush=True)
for command in sys.stdin:
    what, _, number = command.strip().partition(" ")
    if what == "kernel":
        library.device_kernel(float(number))
    if what == "enqueue":
        library.device_collective(0, int(number), 1 << 20)
    if what == "pair":
        library.device_collective(1, int(number), 1 << 20)
    if what == "wait":
        library.device_synchronize()
    print(what, flush=True)
"""
WAITING_LINE = 1 + SCRIPT.splitlines().index("        library.device_synchronize()")

ALL_GATHER, ALL_REDUCE = map(OPERATIONS.index, ("AllGather", "AllReduce"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.compile_library("device.c", tmp_path_factory.mktemp("device") / "libdevice.so")


class Ranks:
    """Processes that do what they are told, a command at a time."""

    def __init__(
        self, library: Path, base: Path, world: int, *, tcp: int = 0, wait: int = SLEEPS, copies: int = 0
    ) -> None:
        self.folder = base / "round-0"
        self.folder.mkdir()
        script = base / "script.py"
        script.write_text(SCRIPT)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        options = (str(world), str(tcp), str(wait), str(copies))
        common = (sys.executable, str(script), str(library), str(self.folder), f"127.0.0.1:{self.port}")
        self.processes = [
            subprocess.Popen([*common, str(rank), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        for rank in range(world):
            assert self.answer(rank) == "open"

    def send(self, command: str, *ranks: int) -> None:
        for rank in ranks:
            stdin = self.processes[rank].stdin
            assert stdin is not None
            stdin.write(command + "\n")
            stdin.flush()

    def answer(self, rank: int) -> str:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        return stdout.readline().strip()

    def do(self, command: str, *ranks: int) -> None:
        self.send(command, *ranks)
        assert {self.answer(rank) for rank in ranks} == {command.partition(" ")[0]}

    def end(self) -> None:
        for one in self.processes:
            one.kill()
            one.communicate()

    @property
    def shared(self) -> Shared:
        return read_shared(self.folder)

    def rank(self, number: int) -> Rank:
        one: Rank = self.shared.ranks[number]
        return one

    def main_thread(self, number: int) -> tuple[str, int]:
        """The state of the main thread, and the ticks of the processor that it has used."""
        pid = self.processes[number].pid
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])


@contextlib.contextmanager
def ranks_of(*arguments: object, **options: int) -> Iterator[Ranks]:
    ranks = Ranks(*arguments, **options)  # type: ignore[arg-type]
    try:
        yield ranks
    finally:
        ranks.end()


def next_keepalives(ranks: Ranks, number: int, count: int) -> None:
    """Wait until a rank has got that many keep-alives."""
    known = ranks.rank(number).keepalives
    until(lambda: ranks.rank(number).keepalives >= known + count)


def report_of(port: int) -> dict[str, list[dict[str, list[dict[str, int]]]]] | None:
    """What one of the processes answers, None if the kernel has chosen one that is stopped."""
    with contextlib.suppress(TimeoutError), socket.create_connection(("127.0.0.1", port), 3) as client:
        client.sendall(b"TIMEOUT 0.1\nSET FORMAT json\nSTATUS\n")
        with client.makefile("r") as answers:
            assert [answers.readline(), answers.readline()] == ["OK\n", "OK\n"]
            report: dict[str, list[dict[str, list[dict[str, int]]]]] = json.load(answers)
            return report
    return None


@pytest.mark.parametrize("tcp", [0, 1], ids=["by memory", "by connections"])
def test_a_collective_is_over_when_all_have_entered_it(library: Path, tmp_path: Path, tcp: int) -> None:
    with ranks_of(library, tmp_path, 3, tcp=tcp) as ranks:
        for _ in range(5):
            ranks.do("kernel 0.01", 0, 1, 2)
            ranks.do(f"enqueue {ALL_REDUCE}", 0, 1, 2)
            ranks.do(f"pair {ALL_GATHER}", 0, 1)
            ranks.do("wait", 0, 1, 2)
        # Enqueued, and not entered by rank 1: the others wait for it.
        ranks.do(f"enqueue {ALL_REDUCE}", 0, 2)
        until(lambda: [ranks.rank(n).entered[0] for n in range(3)] == [6, 5, 6])
        assert [ranks.rank(n).completed[0] for n in range(3)] == [5, 5, 5]
        ranks.do(f"enqueue {ALL_REDUCE}", 1)
        ranks.do("wait", 0, 1, 2)
        assert [ranks.rank(n).completed[0] for n in range(3)] == [6, 6, 6]
        assert [list(ranks.rank(n).completed[:2]) for n in (0, 2)] == [[6, 5], [6, 0]]
        assert ranks.rank(0).busy > 0.05


@pytest.mark.parametrize("wait", [SPINS, SLEEPS], ids=["spins", "sleeps"])
def test_the_main_thread_waits_in_c_on_the_line_of_the_script(library: Path, tmp_path: Path, wait: int) -> None:
    with ranks_of(library, tmp_path, 2, wait=wait) as ranks:
        ranks.do(f"enqueue {ALL_REDUCE}", 0)
        before = ranks.main_thread(0)[1]
        ranks.send("wait", 0)
        if wait == SPINS:
            until(lambda: ranks.main_thread(0)[1] >= before + SPUN)
        if wait == SLEEPS:
            until(lambda: "futex" in Path(f"/proc/{ranks.processes[0].pid}/wchan").read_text())
        until(lambda: ranks.main_thread(0)[0] == ("S" if wait == SLEEPS else "R"))
        stack = ranks.folder / "stack-0"
        os.kill(ranks.processes[0].pid, signal.SIGUSR1)
        # A signal is handled by the main thread, which need not come back from C for it.
        until(lambda: f"line {WAITING_LINE} in" in stack.read_text())
        assert stack.read_text().count("File") == 1
        ranks.do(f"enqueue {ALL_REDUCE}", 1)
        assert ranks.answer(0) == "wait"


def test_two_that_enter_different_operations_wait_for_ever(library: Path, tmp_path: Path) -> None:
    with ranks_of(library, tmp_path, 2) as ranks:
        ranks.do(f"enqueue {ALL_REDUCE}", 0)
        ranks.do(f"enqueue {ALL_GATHER}", 1)
        until(lambda: [ranks.rank(n).entered[0] for n in (0, 1)] == [1, 1])
        next_keepalives(ranks, 0, 2)
        assert [ranks.rank(n).completed[0] for n in (0, 1)] == [0, 0]


def test_keep_alives_flow_and_background_copies_go_on_whatever_the_training_does(library: Path, tmp_path: Path) -> None:
    with ranks_of(library, tmp_path, 3, copies=1) as ranks:
        ranks.do("kernel -1", 0)
        ranks.send("wait", 0)
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        copies = ranks.rank(0).copies
        # Those of rank 2; rank 1 answers nothing any more.
        next_keepalives(ranks, 0, 3)
        next_keepalives(ranks, 2, 3)
        until(lambda: ranks.rank(0).copies > copies)


def counts_of(report: dict[str, list[dict[str, list[dict[str, int]]]]] | None) -> Sequence[object]:
    assert report is not None
    first = report["communicators"][0]
    return [(one["rank"], one["pid"], one["collective_counts"]["AllReduce"]) for one in first["ranks"]]  # type: ignore[index]


def test_the_processes_answer_as_ras_does_with_what_the_job_has_launched(library: Path, tmp_path: Path) -> None:
    with RasReports(tmp_path) as reports, ranks_of(library, tmp_path, 3) as ranks:
        ranks.do(f"enqueue {ALL_REDUCE}", 0, 1, 2)
        ranks.do("wait", 0, 1, 2)
        ranks.do(f"enqueue {ALL_REDUCE}", 0, 2)
        pids = [one.pid for one in ranks.processes]
        until(lambda: all(one.heard_at for one in ranks.shared.ranks[:3]))
        expected = [(0, pids[0], 2), (1, pids[1], 1), (2, pids[2], 2)]
        until(lambda: counts_of(report_of(ranks.port)) == expected)
        assert reports.asked >= 1
        # A process that is stopped does not answer the others, or is chosen itself and answers nothing.
        os.kill(pids[1], signal.SIGSTOP)

        def missing() -> list[int]:
            report = report_of(ranks.port)
            return [] if report is None else [one["pid"] for one in report["communicators"][0]["missing_ranks"]]

        until(lambda: missing() == [pids[1]])


NVML_SCRIPT = """
import json, pynvml
from dlrover_run.features.resources.devices import read_devices
pynvml.nvmlInit()
devices = read_devices(pynvml, {})
print(json.dumps([(whole.busy, whole.power, {pid: one.share for pid, one in by.items()}) for whole, by in devices]))
"""


def test_nvml_says_which_process_uses_its_device_and_how(library: Path, tmp_path: Path) -> None:
    build.compile_library("nvml.c", tmp_path / "libnvidia-ml.so.1")
    here = {"LD_LIBRARY_PATH": str(tmp_path), "BENCHMARK_NVML": f"{tmp_path} 3"}

    def read() -> list[object]:
        command = [sys.executable, "-c", NVML_SCRIPT]
        text = subprocess.run(command, env={**os.environ, **here}, capture_output=True, text=True, check=True).stdout
        return list(map(tuple, json.loads(text)))

    with ranks_of(library, tmp_path, 2) as ranks:
        pids = [str(one.pid) for one in ranks.processes]
        until(lambda: read() == [(0, 118, {pids[0]: 0}), (0, 118, {pids[1]: 0}), (0, 118, {})])
        ranks.do(f"enqueue {ALL_REDUCE}", 0)
        until(lambda: read()[:2] == [(1, 127, {pids[0]: 0.99}), (0, 118, {pids[1]: 0})])
        ranks.do("kernel -1", 1)
        until(lambda: read()[1] == (1, 420, {pids[1]: 0.99}))


def test_what_is_shared_is_laid_out_as_in_c(library: Path, tmp_path: Path) -> None:
    with ranks_of(library, tmp_path, 2) as ranks:
        assert (ranks.folder / "device").stat().st_size == ctypes.sizeof(Shared)
        assert list(ranks.shared.members[:2]) == [0b11, 0b11]
        assert [one.pid for one in ranks.shared.ranks[:2]] == [one.pid for one in ranks.processes]
