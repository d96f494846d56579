"""One launcher on each of two machines with the variables of a cluster: an all-reduce proves that they are one world.

No program of these clusters is needed: for a launcher they only start it on each node with variables and files.
`test_slurm.py` and `test_mpirun` use the real programs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from machines import machines
from support.harness import WAIT, WORKERS, environment, only_long, still_alive, watched

from dlrover_run.features.local_nodes.network import why_not

DLROVER_RUN = [sys.executable, "-m", "dlrover_run"]


@dataclass(frozen=True)
class Starter:
    """A program that starts launchers. `variables` returns those of one rank."""

    names: tuple[str, str]
    variables: Callable[[int, Sequence[str], Path], dict[str, str]]
    flags: tuple[str, ...] = ()
    domain: str = ""


def srun(rank: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "job.sh", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NNODES": "2", "SLURM_NTASKS": "2",
        "SLURM_NODEID": str(rank), "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURMD_NODENAME": names[rank],
    }  # fmt: skip


def open_mpi(rank: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
    return {
        "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_NAMESPACE": "93847553", "PMIX_RANK": str(rank),
    }  # fmt: skip


def mpich_in_pbs(rank: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    (folder / "nodes").write_text("".join(f"{name}\n" for name in names for _ in range(2)))
    return {
        "PBS_JOBID": "81.head", "PBS_NODEFILE": str(folder / "nodes"),
        "PMI_SIZE": "2", "PMI_RANK": str(rank), "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0",
    }  # fmt: skip


def ssh(rank: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
    return {}


def lsf(rank: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    hosts = " ".join(f"{name} 2" for name in names)
    return {"LSB_JOBID": "900", "LSB_MCPU_HOSTS": f"batch2 1 {hosts}", "LSF_PM_TASKID": str(rank + 1)}


def sagemaker(rank: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    return {"SM_HOSTS": json.dumps(list(names)), "SM_CURRENT_HOST": names[rank], "TRAINING_JOB_NAME": "llm"}


def vertex(rank: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    pools = {f"workerpool{number}": [f"{name}:2222"] for number, name in enumerate(names)}
    spec = {"cluster": pools, "task": {"type": f"workerpool{rank}", "index": 0}}
    return {
        "CLUSTER_SPEC": json.dumps(spec), "CLOUD_ML_JOB_ID": "6001",
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": names[0], "MASTER_PORT": "3333",
    }  # fmt: skip


def indexed_job(rank: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    return {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(rank)}


def jobset(rank: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    of_set = {"JOBSET_NAME": "llm", "REPLICATED_JOB_NAME": "workers", "JOB_INDEX": "0"}
    return {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(rank), **of_set}


def trainjob(rank: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    return {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(rank),
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "llm-node-0-0.llm", "PET_MASTER_PORT": "29400",
    }  # fmt: skip


def volcano(rank: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    return {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1", "VC_TASK_INDEX": str(rank), "VK_TASK_INDEX": str(rank),
        "VC_WORKER_HOSTS": ",".join(names), "VC_WORKER_NUM": "2",
    }  # fmt: skip


N = ("n1", "n2")
STARTERS = {
    "srun": Starter(N, srun),
    "Open MPI": Starter(N, open_mpi, ("--hostfile=hosts",)),
    "MPICH in PBS": Starter(N, mpich_in_pbs),
    "ssh": Starter(N, ssh, ("--hostfile=hosts",)),
    "LSF": Starter(N, lsf),
    "SageMaker": Starter(("algo-1", "algo-2"), sagemaker),
    "Vertex AI": Starter(("cmle-0", "cmle-1"), vertex),
    "indexed Job": Starter(("train-0", "train-1"), indexed_job, ("--nnodes=2",), "train.ml.svc.cluster.local"),
    "JobSet": Starter(("llm-workers-0-0", "llm-workers-0-1"), jobset, ("--nnodes=2",), "llm.ml.svc.cluster.local"),
    "TrainJob": Starter(("llm-node-0-0", "llm-node-0-1"), trainjob, (), "llm"),
    "Volcano": Starter(("job-worker-0", "job-worker-1"), volcano),
}


@pytest.mark.torchrun
@pytest.mark.parametrize("name", ["srun", *only_long(*(name for name in STARTERS if name != "srun"))])
def test_launchers_become_one_world(name: str, tmp_path: Path) -> None:
    starter = STARTERS[name]
    if why := why_not():
        pytest.skip(f"no machines for the nodes: {why}")
    with machines(starter.names, tmp_path, starter.domain) as made:
        launchers = [
            made[host].start(
                [*DLROVER_RUN, *starter.flags, WORKERS / "prove_world.py"],
                tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment(dict(starter.variables(rank, starter.names, tmp_path))),
            )
            for rank, host in enumerate(starter.names)
        ]
        prints = [launcher.communicate(timeout=WAIT)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], prints
    for rank, host in enumerate(starter.names):
        assert f"rank {rank} on {host}: all-reduce 3 of 2 ranks" in prints[rank], prints


FAKE_SSH = """\
#!/bin/sh
# Open MPI's daemons are started by `ssh [flags] HOST COMMAND`; a machine of the test is entered instead.
while [ "${1#-}" != "$1" ]; do shift; done
pid=$(sed -n "s/^$1 //p" PIDS); shift
exec nsenter --target=$pid --net --uts --pid --mount -- env --chdir=FOLDER sh -c "$*"
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no Open MPI: `make slurm` installs Debian's")
def test_mpirun(tmp_path: Path) -> None:
    """A real `mpirun -N 1 dlrover-run train.py`, whose ssh enters machines of the test."""
    if why := why_not():
        pytest.skip(f"no machines for the nodes: {why}")
    with machines(["head", "n1", "n2"], tmp_path) as made:
        nodes = [made[name] for name in ("n1", "n2")]
        (tmp_path / "hosts").write_text("".join(f"{node.address} slots=1\n" for node in nodes))
        pids = tmp_path / "pids"
        pids.write_text("".join(f"{node.address} {node.pid}\n" for node in nodes))
        agent = tmp_path / "fake_ssh"
        agent.write_text(FAKE_SSH.replace("PIDS", str(pids)).replace("FOLDER", str(tmp_path)))
        agent.chmod(0o755)
        # mpirun is in the network of the head, and sees the processes of this machine, so that it can enter other
        # machines.
        enter = ["nsenter", f"--target={made['head'].pid}", "--net", "--uts", "--"]
        mpirun = ["mpirun", "--allow-run-as-root", "--mca", "plm_rsh_agent", agent, "--hostfile", tmp_path / "hosts"]
        done = subprocess.run(
            [*enter, *map(str, mpirun), "-N", "1", *DLROVER_RUN, "--hostfile=hosts", WORKERS / "prove_world.py"],
            cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT,
        )  # fmt: skip
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.count("all-reduce 3 of 2 ranks") == 2, (done.stdout, done.stderr)


TEST = """
import pathlib, sys
from machines import machines
with machines(["n1", "n2"], pathlib.Path(sys.argv[1])) as made:
    processes = [made[name].start(["sleep", "infinity"], pathlib.Path("/")) for name in ("n1", "n2")]
    while len(made["n2"].processes()) < 2:
        pass
    print(*(process.pid for name in ("n1", "n2") for process in made[name].processes()), flush=True)
    sys.stdin.read()
"""


@pytest.mark.long
def test_a_test_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    if why := why_not():
        pytest.skip(f"no machines for the nodes: {why}")
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{TEST}", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        pids = [int(word) for word in test.stdout.readline().split()]
        assert len(pids) >= 2
        with watched(*pids) as pidfds:
            test.kill()
            assert still_alive(pidfds, WAIT) == 0
