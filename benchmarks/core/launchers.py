"""The rivals: launchers with torchrun's command line, and the floor, which is what no launcher at all would take."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from core.processes import wait_for_end
from core.report import REPOSITORY
from core.run import Report, Run
from core.trees import Tree

WORKERS = Path(__file__).resolve().parents[1] / "workers"

DEATH_TIMEOUT = 30.0
"""Seconds in which a process that the benchmark killed must end."""


@dataclass(frozen=True)
class Job:
    """What a rival is to run: on each node `workers` processes of one script of `benchmarks/workers`.

    Several nodes meet at `port` of `address`. `own_address` is the address of the node to start, if nodes have networks
    of their own. `nnodes` and `conf` are the values of --nnodes and --rdzv-conf. `with_parent` asks for a process that
    starts the workers even of a rival that needs none.
    """

    script: str
    workers: int
    max_restarts: int = 0
    nodes: int = 1
    nnodes: str = "1"
    address: str = "127.0.0.1"
    port: int = 0
    own_address: str = ""
    conf: str = ""
    with_parent: bool = False

    @property
    def path(self) -> str:
        """The script as a command line names it."""
        return str(WORKERS / self.script)


@dataclass(frozen=True)
class Launcher:
    """A launcher with torchrun's command line. `script` takes the place of the job's, for what scripts have to do.
    `tree`: it is that of another checkout."""

    name: str
    prefix: tuple[str, ...]
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    script: str = ""
    tree: Tree | None = None

    def command(self, job: Job) -> list[str]:
        """The command line of a node."""
        flags = [f"--nproc-per-node={job.workers}", f"--max-restarts={job.max_restarts}"]
        if job.nodes > 1:
            flags += [f"--nnodes={job.nnodes}", f"--rdzv-endpoint={job.address}:{job.port}"]
            flags += ["--rdzv-backend=c10d", "--rdzv-id=benchmark"]
            flags += [f"--rdzv-conf={job.conf}"] if job.conf else []
            flags += [f"--local-addr={job.own_address}"] if job.own_address else []
        script = replace(job, script=self.script or job.script).path
        if self.tree is not None:
            script = str(self.tree.script(Path(script)))
        return [*self.prefix, *flags, *self.options, script]

    def of_tree(self, tree: Tree) -> Launcher | None:
        """The same launcher of another checkout; None if it is not the project's."""
        if self.prefix != OURS:
            return None
        return replace(self, name=f"{self.name}, {tree.name}", prefix=(tree.python, *OURS[1:]), tree=tree)

    def absent(self) -> str | None:
        """Why it cannot run here; None if it can."""
        program, *arguments = self.prefix
        if arguments[:1] == ["-m"] and program == sys.executable:
            return None if importlib.util.find_spec(arguments[1].partition(".")[0]) else f"there is no {arguments[1]}"
        return None if shutil.which(program) else f"there is no program {program}"

    def start(self, run: Run, job: Job) -> int:
        """Start the launcher of one node; return the time just before."""
        return run.start(self.command(job), self.environment)

    def start_help(self, run: Run) -> int:
        """Start `--help`."""
        return run.start([*self.prefix, "--help"], self.environment)

    def after_kill(self, run: Run, job: Job, killed: Report) -> None:
        """Nothing: recovery is the task of the launcher."""


@dataclass(frozen=True)
class Floor:
    """No launcher: the benchmark starts the workers with `subprocess.Popen`, and starts them again after a kill."""

    name: str = "bare Popen"

    def of_tree(self, tree: Tree) -> None:
        """It belongs to no checkout."""

    def absent(self) -> str | None:
        """It can always run."""
        return None

    def start(self, run: Run, job: Job) -> int:
        """Start each worker; return the time just before the first."""
        if job.with_parent:
            return run.start([sys.executable, str(WORKERS / "bare_parent.py"), str(job.workers), job.path])
        return self._start(run, job, attempt=0)

    def start_help(self, run: Run) -> int:
        """The smallest process there is: an interpreter that starts and ends."""
        return run.start([sys.executable, "-c", "pass"])

    def after_kill(self, run: Run, job: Job, killed: Report) -> None:
        """The least that a launcher must do: see the death, end the other workers, start all on another port."""
        old = [launcher.pid for launcher in run.launchers]
        wait_for_end([killed.pid], DEATH_TIMEOUT)
        for pid in old:
            if pid != killed.pid:
                os.kill(pid, signal.SIGTERM)
        wait_for_end(old, DEATH_TIMEOUT)
        self._start(run, job, attempt=killed.attempt + 1)

    def _start(self, run: Run, job: Job, attempt: int) -> int:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        world = {"WORLD_SIZE": str(job.workers), "LOCAL_WORLD_SIZE": str(job.workers)}
        common = address | world | {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
        return min(
            run.start([sys.executable, "-u", job.path], common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(job.workers)
        )


Rival = Launcher | Floor


def free_port() -> int:
    """A port that is free now. Another process may take it before it is used; the run is lost then."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


OURS = (sys.executable, "-m", "dlrover_run")
THEIRS = (sys.executable, "-m", "torch.distributed.run")

SPAWN = Launcher("dlrover-run spawn", OURS, ("--start-method=spawn",))
FORKSERVER = Launcher("dlrover-run forkserver", OURS, ("--start-method=forkserver",))
LAST_STEP = replace(FORKSERVER, name="forkserver, last step saved", script="saved_steps.py")
NEW_TORCH = "2.15.0"
SURVIVORS = Launcher(
    f"survivors, torch {NEW_TORCH}",
    (str(REPOSITORY / f".venv-torch-{NEW_TORCH}" / "bin" / "python"), "-m", "dlrover_run"),
    ("--start-method=forkserver", "--survivors=keep"),
    script="surviving_steps.py",
)
"""Scripts with a block of `dlrover_run.training`; the second needs `make .venv-torch-2.15.0/.made`."""
TORCHRUN = Launcher("torchrun", THEIRS)
OWN_STORE = Launcher("torchrun, own store", THEIRS, environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
BESIDE_PYTHON = str(Path(sys.executable).with_name("ft_launcher"))
FT_LAUNCHER = Launcher(
    "ft_launcher", (shutil.which(BESIDE_PYTHON) or "ft_launcher",), ("--ignore-missing-fault-tol-cfg",)
)
"""The launcher of nvidia-resiliency-ext. With `--nnodes=MIN:MAX` it trains with MIN nodes and holds the others back, so
it takes no part where a world shrinks or grows."""
FLOOR = Floor()
