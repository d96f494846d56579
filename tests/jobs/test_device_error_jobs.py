"""What the driver of a GPU reports goes into the cause of a failure: whole launches with a stand-in for its library."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cluster import SETTINGS
from support.harness import (
    WAIT,
    Finished,
    Launcher,
    Mailbox,
    agent_of,
    child_named,
    finish,
    launch,
    only_long,
    still_alive,
    watched,
)
from support.nvml_stub import LAUNCHER, NvmlStub

from dlrover_run import exit_codes
from dlrover_run.failures.causes import Cause

SCRIPT = """
import os, signal
device = open(os.environ["TEST_DEVICE"])
post()
if os.environ["WORLD_SIZE"] == "2" and os.environ["TORCHELASTIC_RESTART_COUNT"] in os.environ["TEST_STAYS"]:
    signal.pause()
"""


def seen(file: Path, text: str) -> None:
    """Return once a file has that text."""
    deadline = time.monotonic() + WAIT
    while not file.exists() or text not in file.read_text():
        assert time.monotonic() < deadline, f"{file} never had {text!r}"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _no_job_is_left() -> Iterator[None]:
    """The workers wait for a kill, so a test that fails would leave its jobs."""
    yield
    while started:
        started.pop().kill()


started: list[subprocess.Popen[str]] = []


class Node:
    """A launcher on a machine with two GPUs, whose workers hold a device."""

    def __init__(
        self,
        mailbox: Mailbox,
        *flags: str,
        name: str = "node",
        workers: int = 2,
        gpus: int = 2,
        refused: bool = False,
        stays: str = "0",
    ) -> None:
        self.directory = mailbox.directory / name
        self.driver = NvmlStub(self.directory / "driver", gpus)
        for index in range(gpus):
            self.driver.set(index, refused=int(refused))
        self._device = self.directory / "nvidia0"
        self._device.touch()
        self.log = self.directory / "logs"
        self.job = launch(
            mailbox,
            str(self.directory / "nvidia"),
            f"--nproc-per-node={workers}",
            f"--log-dir={self.log}",
            *flags,
            mailbox.script("train.py", SCRIPT),
            launcher=Launcher("with a device", (sys.executable, "-c", LAUNCHER)),
            env={"TEST_DEVICE": str(self._device), "TEST_STAYS": stays, **self.driver.environment},
        )
        started.append(self.job)

    def report(self, gpu: int, xid: int) -> None:
        """Have the driver report an error, and return once the agent knows it."""
        seen(self.driver.directory / "registered", f" {gpu}\n")
        self.driver.report(gpu, xid)
        seen(self.log / "latest/events.jsonl", f'"device":{gpu},"number":{xid},')

    def events(self, name: str) -> list[dict[str, Any]]:
        log = (self.log / "latest/events.jsonl").read_text()
        return [event for line in log.splitlines() if (event := json.loads(line))["event"] == name]

    def finish(self) -> Finished:
        return finish(self.job)


def kill(message: dict[str, Any]) -> None:
    os.kill(message["pid"], signal.SIGKILL)


def test_a_gpu_that_fell_off_the_bus_is_the_cause_and_the_node_leaves(mailbox: Mailbox) -> None:
    node = Node(mailbox, "--max-restarts=3")
    workers = mailbox.gather(2)
    node.report(1, 79)
    kill(workers[1])
    ended = node.finish()
    assert ended.code == exit_codes.FAULTY_NODE
    said = r"rank 1 was killed by SIGKILL, [\d.]+ m?s after Xid 79 of GPU 1 \(fell off the bus\): hardware; this node"
    assert re.search(said, ended.err), ended.err
    (failed,) = node.events("dlrover.worker.failed")
    assert failed["cause"] == Cause.DEVICE


def test_an_error_of_the_program_does_not_blame_the_node(mailbox: Mailbox) -> None:
    node = Node(mailbox, "--max-restarts=1")
    workers = mailbox.gather(2)
    node.report(1, 31)
    kill(workers[1])
    assert [one["restart"] for one in mailbox.gather(2)] == [1, 1]
    ended = node.finish()
    assert ended.code == 0, ended.err
    assert re.search(r"after Xid 31 of GPU 1 \(the program's own address\): program", " ".join(ended.err.split()))
    (failed,) = node.events("dlrover.worker.failed")
    assert failed["cause"] == Cause.SIGNAL


@pytest.mark.long
def test_an_error_of_another_gpu_explains_nothing(mailbox: Mailbox) -> None:
    node = Node(mailbox, "--max-restarts=1")
    workers = mailbox.gather(2)
    node.report(0, 79)
    kill(workers[1])
    assert [one["restart"] for one in mailbox.gather(2)] == [1, 1]
    ended = node.finish()
    assert ended.code == 0, ended.err
    (failed,) = node.events("dlrover.worker.failed")
    assert "Xid" not in failed["what"]


def test_the_other_nodes_go_on_without_a_charge(mailbox: Mailbox, free_port: int) -> None:
    conf = ",".join(f"{name}={value}" for name, value in SETTINGS.items())
    flags = ["--nnodes=1:2", "--max-restarts=0", "--rdzv-backend=c10d", f"--rdzv-conf={conf}"]
    flags.append(f"--rdzv-endpoint=localhost:{free_port}")
    # The one that stays has the master.
    stays = Node(mailbox, *flags, name="stays", workers=1, gpus=1)
    leaves = Node(mailbox, *flags, name="leaves", workers=1, gpus=1)
    workers = mailbox.gather(2)
    agent = agent_of(leaves.job)
    (worker,) = [one for one in workers if psutil.Process(one["pid"]).ppid() == agent.pid]
    leaves.report(0, 95)
    kill(worker)
    assert leaves.finish().code == exit_codes.FAULTY_NODE
    assert [one["restart"] for one in mailbox.gather(1)] == [0]
    ended = stays.finish()
    assert ended.code == 0, ended.err


@pytest.mark.long
def test_the_process_that_listens_has_a_successor_if_it_is_killed(mailbox: Mailbox) -> None:
    node = Node(mailbox, "--max-restarts=2", stays="01")
    workers = mailbox.gather(2)
    agent = agent_of(node.job)
    first = child_named(agent, "dlrover-devices")
    first.kill()
    kill(workers[0])
    workers = mailbox.gather(2)
    second = child_named(agent, "dlrover-devices")
    assert second.pid != first.pid
    with watched(second.pid) as pidfds:
        kill(workers[0])
        mailbox.gather(2)
        ended = node.finish()
        assert ended.code == 0, ended.err
        assert still_alive(pidfds, 0) == 0


@pytest.mark.parametrize("gone", ["agent", *only_long("watchdog")])
def test_it_ends_with_a_launcher_that_is_killed(mailbox: Mailbox, gone: str) -> None:
    node = Node(mailbox)
    mailbox.gather(2)
    agent = agent_of(node.job)
    listener = child_named(agent, "dlrover-devices")
    with watched(listener.pid) as pidfds:
        os.kill(agent.pid if gone == "agent" else node.job.pid, signal.SIGKILL)
        assert still_alive(pidfds, WAIT) == 0
    node.finish()


@pytest.mark.long
def test_a_driver_that_refuses_its_events_is_named_once(mailbox: Mailbox) -> None:
    node = Node(mailbox, "--max-restarts=1", refused=True)
    kill(mailbox.gather(2)[0])
    mailbox.gather(2)
    ended = node.finish()
    assert ended.code == 0, ended.err
    text = " ".join(ended.err.split())
    assert text.count("reports no errors of GPU 0, 1 to this user (NVML: Insufficient Permissions)") <= 1


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"lost": 1}, "GPU 1 does not answer the driver (NVML: GPU is lost): hardware"),
        *only_long(({"action": 2}, "the driver reports that GPU 1 has failed: hardware")),
    ],
    ids=["lost", "failed"],
)
def test_the_state_of_a_gpu_explains_what_no_error_does(mailbox: Mailbox, state: dict[str, int], said: str) -> None:
    node = Node(mailbox, "--max-restarts=3")
    workers = mailbox.gather(2)
    # A note, by which the agent looks at its workers.
    node.report(1, 154)
    node.driver.set(1, **state)
    kill(workers[1])
    ended = node.finish()
    assert ended.code == exit_codes.FAULTY_NODE
    assert f"rank 1 was killed by SIGKILL, and {said}; this node leaves" in " ".join(ended.err.split())
