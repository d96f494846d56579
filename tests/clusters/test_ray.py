"""`examples/ray/train.py` on a real Ray with a head and three nodes, each with its own network and processes.

`make test-ray` installs Ray into a separate environment and runs only these tests. TRANSCRIPT=FILE writes the commands
and their output to that file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Machines, machines
from support.harness import WAIT, WORKERS, until

from dlrover_run.features.local_nodes.network import why_not

pytestmark = [pytest.mark.long, pytest.mark.alone]

ROOT = Path(__file__).parents[2]
RAY = ROOT / ".venv-ray" / "bin"
NODES = ["n1", "n2", "n3", "n4"]
PORT = 6379

VARIABLES = {
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "200",
    # A node that loses power is declared dead after three seconds, not thirty.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "RAY_DEDUP_LOGS": "0",
    "PYTHONUNBUFFERED": "1",
}


class Ray:
    """A Ray cluster of a head, which runs no actors, and three nodes with one CPU each."""

    def __init__(self, machines: Machines, directory: Path, sessions: str) -> None:
        self.machines = machines
        self.directory = directory
        self.transcript: list[str] = []
        # Ray keeps the token of a cluster in the home directory, where that of another one may be.
        self.variables = VARIABLES | {"HOME": str(directory)}
        for name in NODES:
            is_head = name == "n1"
            place = ["--head", f"--port={PORT}", "--include-dashboard=false"] if is_head else [f"--address=n1:{PORT}"]
            flags = [f"--node-ip-address={machines[name].address}", f"--num-cpus={0 if is_head else 1}"]
            if is_head:
                flags.append(f"--temp-dir={sessions}")
            flags += ["--object-store-memory=100000000", "--disable-usage-stats"]
            # Each node needs its own folder of sessions, or each shows the lines of all workers.
            start = f'mount -t tmpfs tmpfs {sessions} && exec "$0" start --block "$@"'
            with (directory / f"{name}.log").open("w") as log:
                machines[name].start(
                    ["sh", "-c", start, RAY / "ray", *place, *flags], directory, self.variables, stdout=log, stderr=log
                )
            self._until_started(directory / f"{name}.log")

    def _until_started(self, log: Path) -> None:
        until(lambda: "Ray runtime started" in log.read_text(), self.logs)

    def start(self, *flags: str | Path, nodes: int = 2) -> subprocess.Popen[str]:
        """Start the example on the head."""
        example = ROOT / "examples" / "ray" / "train.py"
        argv = [
            RAY / "python",
            example,
            f"--nodes={nodes}",
            f"--address={self.machines['n1'].address}:{PORT}",
            "--",
            *flags,
        ]
        shown = (
            " ".join(map(str, argv)).replace(f"{RAY}/", "").replace(f"{ROOT}/", "").replace(str(self.directory), ".")
        )
        self.transcript.append("\n$ " + re.sub(r"/\S*/test_\w+", "FOLDER", shown))
        return self.machines["n1"].start(
            argv, self.directory, self.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Wait for its end. Return the exit code and the output."""
        output, _ = process.communicate(timeout=WAIT)
        output = re.sub(r"\x1b\[\d+m", "", output)
        lines = [line for line in output.splitlines() if "dlrover-run" in line or "rank " in line or "exit" in line]
        self.transcript.append(
            "\n".join(lines).replace(str(self.directory), ".") + f"\n$ echo $?\n{process.returncode}"
        )
        return process.returncode, output

    def logs(self) -> str:
        """The output of `ray start` on each node."""
        return "".join(f"\n--- {log.name}\n{log.read_text()}" for log in self.directory.glob("*.log"))

    def nodes_with(self, process_name: str) -> set[str]:
        """The nodes on which a process of that name runs."""
        return {
            name for name in NODES if any(process.name() == process_name for process in self.machines[name].processes())
        }


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ray]:
    """A Ray for all tests of this module."""
    if not (RAY / "ray").exists():
        pytest.skip("no Ray: `make test-ray` installs it")
    if why := why_not():
        pytest.skip(f"no machines for Ray's nodes: {why}")
    directory = tmp_path_factory.mktemp("ray")
    # The paths of Ray's sockets would be too long below pytest's directory.
    with tempfile.TemporaryDirectory(prefix="ray-") as sessions, machines(NODES, directory) as made:
        cluster = Ray(made, directory, sessions)
        yield cluster
        if path := os.environ.get("TRANSCRIPT"):
            Path(path).write_text("\n".join(cluster.transcript).lstrip() + "\n")


def test_actors_train_as_one_world(ray: Ray) -> None:
    code, output = ray.finish(ray.start("--nproc-per-node=2", WORKERS / "prove_world.py"))
    assert code == 0, output
    assert output.count("all-reduce 15 of 4 ranks") == 4, output


def test_the_exit_code_of_a_worker_is_that_of_the_driver(ray: Ray, tmp_path: Path) -> None:
    (tmp_path / "fail-1").touch()
    code, output = ray.finish(ray.start(WORKERS / "shared_folder.py", tmp_path))
    assert code == 7, output


def test_a_driver_that_is_killed_leaves_no_launcher(ray: Ray, tmp_path: Path) -> None:
    driver = ray.start(WORKERS / "shared_folder.py", tmp_path)
    until(lambda: len(list(tmp_path.glob("start-*-0.json"))) == 2, ray.logs)
    for process in ray.machines["n1"].processes():
        if any(argument.endswith("examples/ray/train.py") for argument in process.cmdline()):
            process.kill()
    assert driver.wait(WAIT) != 0
    ray.transcript.append("(the driver is killed by SIGKILL: no launcher is left on any node)")
    assert driver.stdout is not None
    driver.stdout.close()
    until(lambda: not ray.nodes_with("dlrover-agent"), ray.logs)


def test_a_node_that_loses_power_is_replaced(ray: Ray, tmp_path: Path) -> None:
    """The node does not return, so this test is the last."""
    driver = ray.start("--rdzv-conf=lost_after=5", WORKERS / "shared_folder.py", tmp_path)
    until(lambda: len(list(tmp_path.glob("start-*-0.json"))) == 2, ray.logs)
    before = ray.nodes_with("dlrover-agent")
    (lost,) = before - ray.nodes_with("dlrover-master")
    ray.machines[lost].lose_power()
    ray.transcript.append(f"({lost} loses its power)")
    until(lambda: len(list(tmp_path.glob("start-*-1.json"))) == 2, ray.logs)
    left = [name for name in NODES if name != lost]
    hosts = {json.loads(file.read_text())["host"] for file in tmp_path.glob("start-*-1.json")}
    assert hosts == {*left[1:]}
    (tmp_path / "end").touch()
    code, output = ray.finish(driver)
    assert code == 0, output
