"""The check process, controlled through its pipes as by an agent. A plug-in for an accelerator injects faults."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.harness import only_long

from dlrover_run.features.node_check.check.accelerators import select_accelerator
from dlrover_run.features.node_check.check.link import Offer, agreed
from dlrover_run.features.node_check.check.turns import turn
from dlrover_run.features.node_check.node.check_workers import check_environments
from dlrover_run.processes.ports import HeldPort
from dlrover_run.spec import Entrypoint, JobSpec

pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "dlrover_run" / "features" / "node_check" / "check"
PLUGIN = Path(__file__).parents[1] / "workers" / "check_plugin.py"
TIMEOUT = 240


class CheckProcess:
    """One real check process."""

    def __init__(self, directory: Path, rank: int, workers: int, env: dict[str, str]) -> None:
        self.errors = directory / f"{len(list(directory.glob('*.err')))}.err"
        with open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-u", str(FOLDER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={
                    **os.environ,
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(workers),
                    "OMP_NUM_THREADS": "1",
                    **env,
                },
            )

    def order(self, **order: Any) -> None:
        self.write(json.dumps(order).encode() + b"\n")

    def write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def compute(self, seconds: float = 0.1) -> dict[str, Any]:
        """Order a computation, and return the answer."""
        self.order(do="compute", seconds=seconds)
        return self.answer()

    def end(self) -> tuple[int, str, str]:
        """Close the orders. Return the exit code, the remaining answers, and the error output."""
        rest, _ = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, rest.decode(), self.errors.read_text()


class Starter:
    """Starts check processes, and ends them after the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = HeldPort()
        self.started: list[CheckProcess] = []

    def start(self, rank: int = 0, workers: int = 1, **env: str) -> CheckProcess:
        process = CheckProcess(self.directory, rank, workers, env)
        self.started.append(process)
        return process

    def start_faulty(self, fault: str, **env: str) -> CheckProcess:
        """Start a process with a plug-in that only it can import."""
        place = self.directory / "site"
        if not place.exists():
            info = place / "abacus-1.0.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: abacus\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text("[dlrover_run.accelerators]\nabacus = check_plugin:find\n")
            shutil.copy(PLUGIN, place)
        return self.start(PYTHONPATH=str(place), CHECK_FAULT=fault, **env)

    def start_without_torch(self) -> CheckProcess:
        """Start a process that cannot import torch."""
        place = self.directory / "site"
        place.mkdir()
        (place / "torch.py").write_text("raise ImportError('libtorch.so is missing')\n")
        return self.start(PYTHONPATH=str(place))

    def link(self, name: str, *processes: CheckProcess, timeout: float = 60.0, world: int | None = None) -> None:
        """Order a link between processes, the first of which hosts the store; `world` if some of them are not given."""
        for rank, process in enumerate(processes):
            process.order(**self.link_order(name, rank, world or len(processes), timeout))

    def link_order(self, name: str, rank: int, world: int, timeout: float) -> dict[str, Any]:
        return {
            "do": "link",
            "name": name,
            "address": "127.0.0.1",
            "port": self.port.number,
            "host": rank == 0,
            "rank": rank,
            "world": world,
            "timeout": timeout,
        }


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    starter.port.release()
    for member in starter.started:
        member.process.kill()
        member.process.communicate()


def passes(name: str, *processes: CheckProcess) -> None:
    for process in processes:
        answer = process.answer()
        assert answer.keys() == {"done", "name", "gigabytes"}, (answer, process.errors.read_text())
        assert (answer["done"], answer["name"]) == ("link", name)
        assert 0.0001 < answer["gigabytes"] < 1000


@pytest.mark.parametrize("threads", ["1", *only_long("3")])
def test_computing_reports_a_plausible_speed(starter: Starter, threads: str) -> None:
    process = starter.start(OMP_NUM_THREADS=threads)
    for _ in range(2):
        answer = process.compute()
        assert (answer["done"], answer["device"]) == ("compute", "cpu")
        assert 0.0001 < answer["tflops"] < 100
    assert process.end() == (0, "", "")


@pytest.mark.parametrize("number", [signal.SIGRTMIN, *only_long(signal.SIGQUIT, signal.SIGXCPU)])
def test_a_signal_of_a_scheduler_to_the_job_step_does_not_end_the_check(starter: Starter, number: int) -> None:
    process = starter.start()
    process.compute()
    process.process.send_signal(number)
    assert process.end()[0] == 0


@pytest.mark.parametrize(
    ("fault", "threads"), [("wrong", "3"), *only_long(("wrong", "1"), ("nan", "1"), ("skipped", "1"))]
)
def test_one_wrong_element_in_some_product_is_reported_as_wrong(starter: Starter, fault: str, threads: str) -> None:
    answer = starter.start_faulty(fault, OMP_NUM_THREADS=threads).compute(seconds=1)
    assert answer["wrong"] is True
    assert re.fullmatch(r"abacus multiplied matrices wrongly: 1 of \d+ rows of a product are wrong", answer["problem"])


def test_too_little_memory_is_a_problem_and_not_a_wrong_result(starter: Starter) -> None:
    process = starter.start_faulty("memory")
    problem = "abacus has too little free memory: tried to allocate 3 beads"
    assert process.compute() == {"done": "compute", "problem": problem, "wrong": False}
    assert process.end()[0] == 0


def test_a_failing_driver_is_a_problem_of_each_order(starter: Starter) -> None:
    process = starter.start_faulty("driver")
    words = "no device could be used: the accelerator plug-in abacus failed: the abacus does not answer"
    assert process.compute() == {"done": "compute", "problem": words, "wrong": False}
    starter.link("a", process, world=2)
    assert process.answer() == {"done": "link", "name": "a", "problem": words}


Gpus = Callable[[int], None]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Make torch report this number of GPUs."""
    import torch

    def show(count: int) -> None:
        answers = {
            "is_available": count > 0,
            "device_count": count,
            "set_device": None,
            "get_device_name": "NVIDIA H200",
            "is_bf16_supported": True,
            "get_device_properties": SimpleNamespace(uuid="1234"),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)

    return show


@pytest.mark.parametrize(
    ("present", "workers", "backend"), [(8, 8, "nccl"), (8, 2, "nccl"), (1, 4, "gloo"), (1, 1, "nccl")]
)
def test_ranks_that_share_the_one_gpu_of_a_machine_link_through_its_memory(
    gpus: Gpus, present: int, workers: int, backend: str
) -> None:
    gpus(present)
    found = select_accelerator(workers - 1, workers)
    assert (found.device.index, found.backend, found.uuid) == ((workers - 1) % present, backend, "1234")


def test_a_rank_without_a_gpu_of_several_is_reported(gpus: Gpus) -> None:
    gpus(7)
    assert select_accelerator(6, 8).device.index == 6
    with pytest.raises(RuntimeError, match="local rank 7 has no GPU: 7 are visible"):
        select_accelerator(7, 8)


@pytest.mark.long
@pytest.mark.parametrize("own", [False, True])
def test_a_rank_that_sees_only_its_own_device_does_not_share_it(starter: Starter, own: bool) -> None:
    entrypoint = Entrypoint("program", "/bin/true")
    spec = JobSpec(entrypoint, "job", 2, virtual_local_rank=own)
    environment = check_environments(spec, {"CUDA_VISIBLE_DEVICES": "4,5"})[1]
    assert environment["CUDA_VISIBLE_DEVICES"] == ("5" if own else "4,5")
    process = starter.start_faulty("place", **environment)
    assert process.compute()["device"] == ("abacus 0 of 1" if own else "abacus 1 of 2")


@pytest.mark.long
def test_the_store_of_links_listens_before_a_link_is_ordered(starter: Starter) -> None:
    process = starter.start(DLROVER_RUN_CHECK_STORE_PORT=str(starter.port.number))
    process.compute()
    socket.create_connection(("127.0.0.1", starter.port.number)).close()


def test_a_port_that_is_in_use_is_a_problem_of_links_only(starter: Starter) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        process = starter.start(DLROVER_RUN_CHECK_STORE_PORT=str(port))
        assert process.compute()["tflops"] > 0
        process.order(**{**starter.link_order("a", 0, 2, 5.0), "port": port})
        assert process.answer()["problem"].startswith(f"port {port} could not be listened on: ")


def test_an_accelerator_of_a_plugin_is_used_and_output_of_libraries_is_not_an_answer(starter: Starter) -> None:
    process = starter.start_faulty("")
    assert process.compute()["device"] == "abacus"
    code, rest, errors = process.end()
    assert (code, rest) == (0, "")
    assert "a library says hello" in errors
    assert "so does its C part" in errors


def test_a_plugin_without_its_accelerator_is_skipped(starter: Starter) -> None:
    process = starter.start_faulty("not there")
    assert process.compute()["device"] == "cpu"


@pytest.mark.long
@pytest.mark.parametrize("world", [3, *only_long(2, 4)])
def test_successive_links_use_one_store_at_a_held_port(starter: Starter, world: int) -> None:
    processes = [starter.start(rank % 2, 2) for rank in range(world)]
    for name in ("1/1/0/0-1", "1/1/1/0-1"):
        starter.link(name, *processes)
        passes(name, *processes)
    for process in processes:
        assert process.end()[:2] == (0, "")


@pytest.mark.long
def test_a_peer_that_never_joins_is_a_problem_and_the_next_link_works(starter: Starter) -> None:
    one, other = starter.start(0, 2), starter.start(1, 2)
    other.order(**starter.link_order("a", 1, 2, 1.0))
    unreachable = f"no connection to 127.0.0.1:{starter.port.number} within 1 seconds: "
    assert other.answer()["problem"].startswith(unreachable)
    # An order first, so that the timeout does not include the import of torch.
    one.compute()
    # Long enough to create the store and to connect to it on a busy machine: otherwise that would be the problem.
    starter.link("b", one, world=2, timeout=10.0)
    problem = "rank 1 of its 2 processes did not join within 10 seconds"
    assert one.answer() == {"done": "link", "name": "b", "problem": problem}
    starter.link("c", one, other)
    passes("c", one, other)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "own_fault", "timeout"),
    [
        ("die in the link", "", 60.0),
        ("die before the group", "", 2.0),
        ("die before the group", "number groups elsewhere", 2.0),
        ("stop in the link", "", 3.0),
    ],
)
def test_a_peer_that_is_lost_during_a_link_is_a_problem_and_the_next_link_works(
    starter: Starter, fault: str, own_fault: str, timeout: float
) -> None:
    one = starter.start_faulty(own_fault, CHECK_GIVE_UP_AFTER=str(TIMEOUT))
    other, third = starter.start_faulty(fault), starter.start(1, 2)
    for process in (one, other, third):
        # Orders first, so that the timeout does not include the import of torch.
        assert "tflops" in process.compute()
    starter.link("a", one, other, timeout=timeout)
    answer = one.answer()
    assert (answer["done"], answer["name"]) == ("link", "a")
    assert answer["problem"]
    assert "ends" not in answer
    if fault.startswith("die"):
        assert other.process.wait(TIMEOUT) == -signal.SIGKILL
    starter.link("b", one, third)
    passes("b", one, third)


@pytest.mark.long
def test_corrupted_data_is_a_problem_of_the_rank_that_sent_it(starter: Starter) -> None:
    one, other = starter.start(0, 2), starter.start_faulty("bit")
    starter.link("a", one, other)
    passes("a", one)
    problem = "data of rank 1 of its 2 processes is wrong"
    assert other.answer() == {"done": "link", "name": "a", "problem": problem}
    starter.link("b", one, other)
    passes("b", one, other)


@pytest.mark.long
def test_a_failing_accelerator_library_ends_the_process_after_the_answer(starter: Starter) -> None:
    host, other = (starter.start_faulty("", CHECK_BACKEND="beads") for _ in range(2))
    starter.link("a", host, other)
    answer = host.answer()
    assert answer.pop("problem").startswith("beads failed: ")
    assert answer == {"done": "link", "name": "a", "ends": True}
    assert host.process.wait(TIMEOUT) == 3
    answer = other.answer()
    # The store ends with its host, perhaps before the other process has read from it which backend the two agree on.
    if not answer["problem"].startswith("the store at "):
        assert answer.pop("problem").startswith("beads failed: ")
        assert answer == {"done": "link", "name": "a", "ends": True}
        assert other.process.wait(TIMEOUT) == 3


@pytest.mark.long
def test_processes_with_different_accelerators_link_through_gloo(starter: Starter) -> None:
    one, other = starter.start_faulty("", CHECK_BACKEND="beads"), starter.start()
    starter.link("a", one, other)
    passes("a", one, other)


@pytest.mark.parametrize(
    ("offers", "backend", "shared"),
    [
        ([("nccl", "a"), ("nccl", "b")], "nccl", False),
        ([("nccl", "a"), ("nccl", "b"), ("nccl", "a")], "gloo", True),
        ([("gloo", "a"), ("gloo", "a")], "gloo", True),
        ([("nccl", "a"), ("gloo", "")], "gloo", False),
        ([("beads", ""), ("beads", "")], "beads", False),
        ([("gloo", "")], "gloo", False),
    ],
)
def test_processes_with_one_device_link_through_gloo(offers: list[tuple[str, str]], backend: str, shared: bool) -> None:
    assert agreed([Offer(*offer) for offer in offers]) == (backend, shared)


def test_two_nodes_with_one_device_have_a_link_that_works_and_name_the_device(starter: Starter) -> None:
    """The library would refuse two ranks on one device, as NCCL does."""
    one, other = (starter.start_faulty("", CHECK_BACKEND="beads", CHECK_UUID="GPU-1") for _ in range(2))
    starter.link("a", one, other)
    for process in (one, other):
        answer = process.answer()
        assert answer.pop("gigabytes") > 0
        assert answer == {"done": "link", "name": "a", "shared": "abacus"}


def test_one_process_at_a_time_computes_on_a_device() -> None:
    device = f"GPU-{os.getpid()}"

    def is_taken() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
            try:
                name.bind(f"\0dlrover-run-check-{device}")
            except OSError:
                return True
        return False

    with turn(""), turn(device):
        assert is_taken()
        # One that has waited for long enough computes nevertheless.
        with turn(device, max_wait=0.0):
            assert is_taken()
        assert is_taken()
    assert not is_taken()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"garbage\n", "it is not JSON"),
        (b"\xff\xfe\n", "it is not JSON"),
        (b"[" * 60_000 + b"\n", "it is not JSON"),
        (b"x" * 70_000, "it is not JSON"),
        (b"[1]\n", "it is neither for compute nor for link"),
        (b'{"do": "dance"}\n', "it is neither for compute nor for link"),
        (b'{"do": ["compute"]}\n', "it is neither for compute nor for link"),
        (b'{"do": "compute"}\n', "it is neither for compute nor for link"),
        (b'{"do": "compute", "seconds": 1, "more": 2}\n', "it is neither for compute nor for link"),
    ],
)
def test_an_invalid_request_ends_the_process_with_one_line(starter: Starter, line: bytes, why: str) -> None:
    # This test does not use torch, whose import takes the process long.
    process = starter.start_without_torch()
    with contextlib.suppress(
        BrokenPipeError
    ):  # The process may exit before it has read all of a line that is too long.
        process.write(line)
    code, rest, errors = process.end()
    assert (code, rest) == (2, "")
    assert len(errors.splitlines()) == 1
    assert errors.startswith(f"the node check received an invalid request: {why}")


@pytest.mark.parametrize("number", [signal.SIGTERM, *only_long(signal.SIGINT)])
def test_a_signal_ends_it_without_output(starter: Starter, number: signal.Signals) -> None:
    process = starter.start()
    process.compute()
    process.order(do="compute", seconds=600)
    process.process.send_signal(number)
    assert process.process.wait(TIMEOUT) == -number
    assert process.errors.read_text() == ""


def test_it_exits_silently_when_the_reader_of_answers_has_closed(starter: Starter) -> None:
    process = starter.start()
    assert process.process.stdout is not None
    process.process.stdout.close()
    process.order(do="compute", seconds=0.1)
    assert process.process.wait(TIMEOUT) == 0
    assert process.errors.read_text() == ""


def test_without_torch_each_order_has_that_problem(starter: Starter) -> None:
    process = starter.start_without_torch()
    process.order(do="compute", seconds=0.1)
    problem = "torch cannot be imported: libtorch.so is missing"
    assert process.answer() == {"done": "compute", "problem": problem, "wrong": False}
    assert process.end()[0] == 0


@pytest.mark.long
def test_a_process_forked_from_a_template_works_with_a_spawned_one(starter: Starter, tmp_path: Path) -> None:
    spawned = starter.start(1, 2)
    orders = tmp_path / "orders"
    given = [{"do": "compute", "seconds": 0.2}, starter.link_order("a", 0, 2, 60.0)]
    orders.write_text("".join(json.dumps(order) + "\n" for order in given))
    spawned.order(**starter.link_order("a", 1, 2, 60.0))
    out = tmp_path / "out"
    out.mkdir()
    job = {
        "python": sys.executable,
        "kind": "script",
        "target": str(FOLDER),
        "args": [],
        "cwd": str(tmp_path),
        "env": {**os.environ, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
        "preload": ["torch", "torch.distributed"],
        "scan": False,
        "stdin": str(orders),
        "out": str(out),
        "steps": ["fork", "wait"],
        "line_fd": None,
    }
    agent = [sys.executable, str(Path(__file__).with_name("forkserver_agent.py"))]
    done = subprocess.run(agent, input=json.dumps(job), stdout=subprocess.PIPE, text=True, timeout=TIMEOUT)
    result = json.loads(done.stdout)
    assert "torch" in result["prepared"], result
    assert result["workers"][0]["code"] == 0, (out / "0.err").read_text()
    computed, linked = (json.loads(line) for line in (out / "0.out").read_text().splitlines())
    assert computed["tflops"] > 0
    assert linked["gigabytes"] > 0
    passes("a", spawned)
