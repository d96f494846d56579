"""The machine of the master is lost, with the node on it: the job goes on with a master on another machine.

Each machine has a network of its own, so that the addresses are those of a cluster.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from clusters.machines import Machine, Machines, machines
from support.etcd_server import openssl
from support.harness import WAIT, until

NAMES = ("n0", "n1", "n2")

WORKER = """
import os, sys, time
with open(f"{sys.argv[1]}/{os.uname().nodename}", "a") as out:
    print(os.environ["WORLD_SIZE"], os.environ["RANK"], file=out)
while not os.path.exists(f"{sys.argv[1]}/fail"):
    time.sleep(0.1)
sys.exit(3)
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


def silence(made: Machines) -> None:
    """Its connections do not end, and no packet of it arrives any more; its processes run on."""
    made["n0"].set_link("down")


@dataclass
class Cluster:
    """Three machines, and the launchers on them."""

    folder: Path
    made: Machines
    flags: Callable[[Path, int], Flags]
    nodes: str = "2:3"
    conf: str = "last_call_timeout=30"
    launchers: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def dlrover_run(self, number: int, *words: str | Path) -> list[str]:
        given, variables = self.flags(self.folder, number)
        command = [sys.executable, "-m", "dlrover_run", *words[:1], *given, *words[1:]]
        return self.made[NAMES[number]].command(command, self.folder, variables)

    def begin(self, number: int) -> None:
        script = self.folder / "worker.py"
        script.write_text(WORKER)
        size = [f"--nnodes={self.nodes}", "--nproc-per-node=1", "--max-restarts=3"]
        command = self.dlrover_run(number, f"--rdzv-conf={self.conf}", *size, script, str(self.folder))
        with (self.folder / f"log-{NAMES[number]}").open("a") as log:
            started = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, text=True)
        self.launchers[number] = started

    def log(self, name: str) -> str:
        path = self.folder / f"log-{name}"
        return path.read_text() if path.exists() else ""

    def until(self, holds: Callable[[], bool], what: str) -> None:
        until(holds, lambda: "\n".join([what, *(f"--- {name}\n{self.log(name)}" for name in NAMES)]))

    def until_world(self, size: int, *names: str) -> None:
        """Wait until the last worker of each of these machines is in a world of that size."""

        def holds() -> bool:
            files = [self.folder / name for name in names]
            worlds = [file.read_text().split("\n")[-2:-1] for file in files if file.exists()]
            return len(worlds) == len(names) and all(world and world[0].split()[0] == str(size) for world in worlds)

        self.until(holds, f"no world of {size} workers")


@contextlib.contextmanager
def cluster(folder: Path, flags: Callable[[Path, int], Flags], **more: str) -> Iterator[Cluster]:
    with machines(NAMES, folder) as made:
        yield (found := Cluster(folder, made, flags, **more))
    for launcher in found.launchers.values():
        launcher.wait(WAIT)


@pytest.mark.parametrize(
    ("flags", "lose"),
    [
        pytest.param(by_endpoint, kill_all, id="endpoint, killed"),
        pytest.param(by_host_file, kill_all, id="host file, killed", marks=pytest.mark.long),
        pytest.param(by_slurm, kill_all, id="Slurm's variables, killed", marks=pytest.mark.long),
        pytest.param(by_host_file, lose_power, id="host file, power", marks=pytest.mark.long),
        pytest.param(by_host_file, silence, id="host file, silence", marks=pytest.mark.long),
    ],
)
def test_the_job_goes_on_without_the_first_machine(
    tmp_path: Path, flags: Callable[[Path, int], Flags], lose: Callable[[Machines], None]
) -> None:
    with cluster(tmp_path, flags) as job:
        for number in range(3):
            job.begin(number)
        job.until_world(3, *NAMES)
        lose(job.made)
        # nsenter stops itself with its child, and would never collect it.
        job.launchers[0].send_signal(signal.SIGCONT)
        job.until_world(2, "n1", "n2")
        assert "the master of the job is now at" in job.log("n2")
        if lose is kill_all:
            # The node of the endpoint comes back, finds no master there, and is sent to the one that has the job.
            job.begin(0)
        if lose is silence:
            # Its node lives, and its master is sent to the one that has the job.
            job.made["n0"].set_link("up")
        if lose is not lose_power:
            job.until_world(3, *NAMES)
        if flags is by_endpoint:
            asked = subprocess.run(job.dlrover_run(1, "status"), capture_output=True, text=True, check=False)
            assert "3 of 2:3 nodes" in asked.stdout, asked
            stopped = subprocess.run(job.dlrover_run(2, "stop"), capture_output=True, text=True, check=False)
            assert stopped.returncode == 0, stopped
            for launcher in job.launchers.values():
                launcher.wait(WAIT)
            psutil.wait_procs([each for name in NAMES for each in jobs_processes(job.made[name])], WAIT)
            assert [each for name in NAMES for each in jobs_processes(job.made[name])] == []


@pytest.mark.long
@pytest.mark.parametrize("names", ["address", "name"])
def test_the_next_master_is_trusted_by_a_certificate_for_its_address(tmp_path: Path, names: str) -> None:
    """Each machine has a certificate of its own; one for its host name alone is not for what the others know of it."""
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(tmp_path, "req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    with cluster(tmp_path, by_host_file) as job:
        for name in NAMES:
            openssl(tmp_path, "req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            address = f",IP:{job.made[name].address}" if names == "address" else ""
            (tmp_path / "names").write_text(f"subjectAltName=DNS:{name}{address}")
            signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
            openssl(tmp_path, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
        for number, name in enumerate(NAMES):
            tls = f"tls_ca={tmp_path}/ca.pem,tls_cert={tmp_path}/{name}.pem,tls_key={tmp_path}/{name}.key"
            job.conf = f"last_call_timeout=30,{tls}"
            job.begin(number)
        job.until_world(3, *NAMES)
        kill_all(job.made)
        job.launchers[0].send_signal(signal.SIGCONT)
        if names == "address":
            job.until_world(2, "n1", "n2")
        else:
            address = job.made["n1"].address
            line = f"the next master, on {address}, is not trusted: with TLS its certificate has to be for {address} or"
            job.until(lambda: all(line in job.log(name) for name in ("n1", "n2")), "no line of the certificate")


@pytest.mark.long
@pytest.mark.parametrize("flags", [by_host_file, by_slurm])
def test_a_job_begins_without_the_first_machine_of_its_list(
    tmp_path: Path, flags: Callable[[Path, int], Flags]
) -> None:
    with cluster(tmp_path, flags, conf="last_call_timeout=2") as job:
        job.made["n0"].set_link("down")
        job.begin(1)
        job.begin(2)
        job.until_world(2, "n1", "n2")
        assert "was not found within 30 s; this node starts one in its place" in job.log("n1")
        job.made["n0"].set_link("up")
        job.begin(0)
        job.until_world(3, *NAMES)


@pytest.mark.long
@pytest.mark.parametrize("lost", [(0,), (0, 1)], ids=["the first", "two"])
def test_with_a_minimum_of_one_the_nodes_that_are_left_by_silent_ones_end_in_time(
    tmp_path: Path, lost: tuple[int, ...]
) -> None:
    """The silent ones could train without them, so they may not."""
    with cluster(tmp_path, by_host_file, nodes="1:3", conf="last_call_timeout=30,master_timeout=15") as job:
        for number in range(3):
            job.begin(number)
        job.until_world(3, *NAMES)
        for number in lost:
            job.made[NAMES[number]].set_link("down")
        (tmp_path / "fail").touch()
        for number in set(range(3)) - set(lost):
            job.launchers[number].wait(WAIT)
        if lost == (0,):
            # The next master is found, and forms no round.
            needed = "3 are needed, because the others may train with the master before this one"
            assert all(needed in job.log(name) for name in ("n1", "n2"))
            assert {job.launchers[number].returncode for number in (1, 2)} == {75}
        else:
            log = job.log("n2")
            assert "this node waits for it, at most 15 s" in log
            assert "reaches 1 of 3 machines of the job, too few to start the next master" in log
            assert job.launchers[2].returncode == 72
