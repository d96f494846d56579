"""Who competes: launchers that are a command line, and the floor, which is what no launcher at all would take.

A rival is one line in the table at the end.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from launch_bench.room import Report, Room, still_alive

WORKERS = Path(__file__).resolve().parents[1] / "workers"

DEATH_TIMEOUT = 30.0
"""Seconds in which a worker that the driver killed must be gone."""

PROBE_TIMEOUT = 60.0
"""Seconds for a rival to answer `--help` when the driver asks whether it is installed."""


@dataclass(frozen=True)
class Job:
    """What a case asks a rival to run: on each node `workers` processes of one script of `benchmarks/workers`.

    Several nodes meet at `port` of `address`, which is the loopback interface unless nodes have networks of their own;
    `own_address` is then the address of the node to start. `nnodes` is how many there may be, as the command line says
    it, and `conf` the value of --rdzv-conf. `node` is the one node to start now, None all of them.
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
    node: int | None = None

    @property
    def path(self) -> str:
        """The script as a command line names it."""
        return str(WORKERS / self.script)


class Rival(Protocol):
    """One contender."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    def absent(self) -> str | None:
        """Why it cannot run here, in a few words; None when it can."""

    def start(self, room: Room, job: Job) -> int:
        """Start the job; when, in nanoseconds of the monotonic clock."""

    def start_parent(self, room: Room, job: Job) -> int:
        """Start the job under a process of the rival, even where `start` needs none; for the memory cases."""

    def start_help(self, room: Room) -> int:
        """Start `--help`, or for the floor the smallest process there is."""

    def after_kill(self, room: Room, job: Job, killed: Report) -> None:
        """What the driver itself must do for a recovery: nothing, unless there is no launcher."""


@dataclass(frozen=True)
class CommandRival:
    """A launcher that understands torchrun's command line."""

    name: str
    prefix: tuple[str, ...]
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def commands(self, job: Job) -> list[list[str]]:
        """The command line of each launcher that is to be started now; all nodes have the same."""
        flags = [f"--nproc-per-node={job.workers}", f"--max-restarts={job.max_restarts}"]
        if job.nodes > 1:
            meeting = [f"--rdzv-endpoint={job.address}:{job.port}", "--rdzv-backend=c10d", "--rdzv-id=launch-bench"]
            flags += [f"--nnodes={job.nnodes}", *meeting, *([f"--rdzv-conf={job.conf}"] if job.conf else [])]
            flags += [f"--local-addr={job.own_address}"] if job.own_address else []
        return [[*self.prefix, *flags, *self.options, job.path]] * (job.nodes if job.node is None else 1)

    def absent(self) -> str | None:
        """Why it cannot run here: its `--help` fails."""
        try:
            probe = subprocess.run(
                [*self.prefix, "--help"], capture_output=True, text=True, timeout=PROBE_TIMEOUT, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        lines = probe.stderr.strip().splitlines() or ["no message"]
        return None if probe.returncode == 0 else f"--help ended with {probe.returncode}: {lines[-1]}"

    def start(self, room: Room, job: Job) -> int:
        """Start every node's launcher; the time of the first."""
        return min(room.start(command, dict(self.environment)) for command in self.commands(job))

    def start_parent(self, room: Room, job: Job) -> int:
        """As `start`: a launcher is such a parent."""
        return self.start(room, job)

    def start_help(self, room: Room) -> int:
        """Start `--help`."""
        return room.start([*self.prefix, "--help"], dict(self.environment))

    def after_kill(self, room: Room, job: Job, killed: Report) -> None:
        """Nothing: this is what the launcher is for."""


@dataclass(frozen=True)
class Floor:
    """No launcher: the driver starts the workers with `subprocess.Popen`, and starts them again after a kill."""

    name: str = "bare Popen"

    def absent(self) -> str | None:
        """It can always run."""
        return None

    def start(self, room: Room, job: Job) -> int:
        """Start each worker; the time of the first."""
        return self._start(room, job, attempt=0)

    def start_parent(self, room: Room, job: Job) -> int:
        """Start them from an interpreter that does nothing else, as there is no launcher to measure."""
        command = [sys.executable, str(WORKERS / "bare_parent.py"), str(job.workers), job.path]
        return room.start(command, {})

    def start_help(self, room: Room) -> int:
        """An interpreter that starts and ends."""
        return room.start([sys.executable, "-c", "pass"], {})

    def after_kill(self, room: Room, job: Job, killed: Report) -> None:
        """Do by hand the least that a launcher must: see the death, end the others, start all anew on another port."""
        old = [launcher.pid for launcher in room.launchers]
        still_alive([killed.pid], DEATH_TIMEOUT)
        for launcher in room.launchers:
            if launcher.pid != killed.pid:
                os.kill(launcher.pid, signal.SIGTERM)
        still_alive(old, DEATH_TIMEOUT)
        self._start(room, job, attempt=killed.attempt + 1)

    def _start(self, room: Room, job: Job, attempt: int) -> int:
        port = free_port()
        return min(
            room.start(
                [sys.executable, "-u", job.path],
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(job.workers),
                    "LOCAL_WORLD_SIZE": str(job.workers),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "TORCHELASTIC_RESTART_COUNT": str(attempt),
                },
            )
            for rank in range(job.workers)
        )


def free_port() -> int:
    """A port that was free a moment ago. Another process may take it before rank 0 does; the floor lives with that."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


OURS = (sys.executable, "-m", "dlrover_run")
THEIRS = (sys.executable, "-m", "torch.distributed.run")

OURS_SPAWN = CommandRival("dlrover-run spawn", OURS, ("--start-method=spawn",))
OURS_FORKSERVER = CommandRival("dlrover-run forkserver", OURS, ("--start-method=forkserver",))
TORCHRUN = CommandRival("torchrun", THEIRS)
TORCHRUN_UNSHARED = CommandRival("torchrun, own store", THEIRS, environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
FLOOR = Floor()
