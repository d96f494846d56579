"""The machine of the master is lost, with the node on it: the job goes on with a master on another machine.

Each machine has a network of its own, so that the addresses are those of a cluster.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from clusters.machines import Machine, Machines, machines
from harness import WAIT

NAMES = ("n0", "n1", "n2")

WORKER = """
import os, sys, time
with open(f"{sys.argv[1]}/{os.uname().nodename}", "a") as out:
    print(os.environ["WORLD_SIZE"], os.environ["RANK"], file=out)
time.sleep(600)
"""

Flags = tuple[list[str], Mapping[str, str]]


def by_host_file(folder: Path, number: int) -> Flags:
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{name}\n" for name in NAMES))
    return [f"--hostfile={hosts}"], {}


def by_endpoint(folder: Path, number: int) -> Flags:
    return ["--rdzv-backend=c10d", "--rdzv-endpoint=n0:29400", "--rdzv-id=job"], {}


def by_slurm(folder: Path, number: int) -> Flags:
    step = {"SLURM_STEP_NODELIST": "n[0-2]", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3"}
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NNODES": "3", "SLURM_NTASKS": "3"}
    own = {"SLURM_NODEID": str(number), "SLURM_PROCID": str(number), "SLURM_LOCALID": "0"}
    lists = {"SLURM_JOB_NODELIST": "n[0-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURMD_NODENAME": NAMES[number]}
    return [], {**step, **job, **own, **lists}


def jobs_processes(machine: Machine) -> list[psutil.Process]:
    """All processes of a machine but that which keeps it."""
    found = []
    for process in machine.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() != "sleep":
                found.append(process)
    return found


def kill_all(made: Machines) -> None:
    """The machine stays, and refuses connections."""
    # None of them may act on the end of another one.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in jobs_processes(made["n0"]):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def lose_power(made: Machines) -> None:
    made["n0"].lose_power()


@pytest.mark.parametrize(
    ("flags", "lose"),
    [
        pytest.param(by_endpoint, kill_all, id="endpoint, killed"),
        pytest.param(by_host_file, kill_all, id="host file, killed", marks=pytest.mark.long),
        pytest.param(by_slurm, kill_all, id="Slurm's variables, killed", marks=pytest.mark.long),
        pytest.param(by_host_file, lose_power, id="host file, power", marks=pytest.mark.long),
    ],
)
def test_the_job_goes_on_without_the_first_machine(
    tmp_path: Path, flags: Callable[[Path, int], Flags], lose: Callable[[Machines], None]
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    made: Machines
    launchers: list[subprocess.Popen[str]] = []

    def dlrover_run(number: int, *words: str | Path) -> list[str]:
        given, variables = flags(tmp_path, number)
        command = [sys.executable, "-m", "dlrover_run", *words[:1], *given, *words[1:]]
        return made[NAMES[number]].command(command, tmp_path, variables)

    def begin(number: int) -> None:
        size = ["--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=3"]
        log = (tmp_path / f"log-{NAMES[number]}").open("a")
        command = dlrover_run(number, "--rdzv-conf=last_call_timeout=30", *size, script, str(tmp_path))
        launchers.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, text=True))

    def until_world(size: int, *names: str) -> None:
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            worlds = [(tmp_path / name).read_text().split("\n")[-2:-1] for name in names if (tmp_path / name).exists()]
            if len(worlds) == len(names) and all(world and world[0].split()[0] == str(size) for world in worlds):
                return
            time.sleep(0.1)
        logs = "\n".join(f"--- {name}\n{(tmp_path / f'log-{name}').read_text()}" for name in NAMES)
        raise AssertionError(f"no world of {size} workers\n{logs}")

    with machines(NAMES, tmp_path) as made:
        for number in range(3):
            begin(number)
        until_world(3, *NAMES)
        lose(made)
        # nsenter stops itself with its child, and would never collect it.
        launchers[0].send_signal(signal.SIGCONT)
        until_world(2, "n1", "n2")
        assert "the master of the job is now at" in (tmp_path / "log-n2").read_text()
        if lose is kill_all:
            # The node of the endpoint comes back, finds no master there, and is sent to the one that has the job.
            begin(0)
            until_world(3, *NAMES)
        if flags is by_endpoint:
            asked = subprocess.run(dlrover_run(1, "status"), capture_output=True, text=True, check=False)
            assert "3 of 2:3 nodes" in asked.stdout, asked
            stopped = subprocess.run(dlrover_run(2, "stop"), capture_output=True, text=True, check=False)
            assert stopped.returncode == 0, stopped
            for launcher in launchers[1:]:
                launcher.wait(WAIT)
            psutil.wait_procs([each for name in NAMES for each in jobs_processes(made[name])], WAIT)
            assert [each for name in NAMES for each in jobs_processes(made[name])] == []
    for launcher in launchers:
        launcher.wait(WAIT)
