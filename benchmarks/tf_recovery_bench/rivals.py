"""Who takes part: tf-ps-run in its ways, plain processes that are all started again, and TensorFlow by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from comparison.lost import Lost
from launch_bench.rivals import PROBE_TIMEOUT, WORKERS
from launch_bench.room import Room

from tf_recovery_bench.supervisor import CHANGE

GRAPH = "tf_graph.py"
STRATEGY = "tf_strategy.py"

SUPERVISOR = Path(__file__).with_name("supervisor.py")

MAX_RESTARTS = 10
"""More than a run needs: what is compared is the time, and not how soon somebody gives up."""

FOREIGN = ("TF_", "STOP_FILE", "MODEL_DIR", "DATA_SHARDS", "PYTHON_EXEC")
"""Variables of the caller's shell, beside those that the room leaves out, that would change what a rival does."""


class Rival(Protocol):
    """One contender."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    @property
    def script(self) -> str:
        """What it trains, a file of `benchmarks/workers`."""

    @property
    def begins_with_most(self) -> bool:
        """Whether a job that may have fewer servers begins with as many as it may have."""

    def absent(self) -> str | None:
        """Why it cannot run here; None when it can."""

    def start(self, room: Room, least: int, most: int) -> None:
        """Start a job of a chief, a worker and from `least` to `most` servers."""

    def change(self, room: Room, servers: int) -> None:
        """Ask for another number of servers."""


def roles_of(script: str) -> tuple[str, ...]:
    """Who makes steps: with the strategy the worker serves the chief, and runs nothing of the script."""
    return ("chief",) if script == STRATEGY else ("chief", "worker")


def missing_tensorflow(python: str) -> str | None:
    """Why an interpreter cannot train, in a few words; TensorFlow is looked for, not imported."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tensorflow') is None)"
    try:
        done = subprocess.run([python, "-c", look], capture_output=True, timeout=PROBE_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else f"{python} has no TensorFlow (`make .venv-tf/.made`)"


def furnish(room: Room) -> None:
    """Give the processes a place for the model, and nothing of the caller's shell that is not meant for them."""
    for name in [name for name in room.environment if name.startswith(FOREIGN)]:
        del room.environment[name]
    room.environment |= {"MODEL_DIR": str(room.directory / "model"), "TF_CPP_MIN_LOG_LEVEL": "1"}


@dataclass(frozen=True)
class TfPsRun:
    """tf-ps-run, with an interpreter of its own for the script."""

    name: str
    python: str
    script: str = GRAPH
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    begins_with_most: bool = True

    def absent(self) -> str | None:
        """Why it cannot run here: there is no TensorFlow."""
        return missing_tensorflow(self.python)

    def start(self, room: Room, least: int, most: int) -> None:
        """Start the job under the name of the room."""
        furnish(room)
        servers = f"--ps={most}" if least == most else f"--ps={least}:{most}"
        command = [sys.executable, "-m", "tf_ps_runner", servers, "--workers=1", f"--max-restarts={MAX_RESTARTS}"]
        command += [f"--rdzv-id={room.directory.name}", f"--checkpoint-dir={room.directory / 'model'}", *self.options]
        room.start([*command, str(WORKERS / self.script)], {"PYTHON_EXEC": self.python, **self.environment})

    def change(self, room: Room, servers: int) -> None:
        """Start `tf-ps-run scale`."""
        command = [sys.executable, "-m", "tf_ps_runner", "scale", f"--ps={servers}"]
        room.start([*command, f"--rdzv-id={room.directory.name}"], {})


@dataclass(frozen=True)
class PlainProcesses:
    """No launcher: `supervisor.py` starts again `all` processes, or only the `one` that has died."""

    name: str
    python: str
    script: str = GRAPH
    again: str = "all"
    begins_with_most: bool = False

    def absent(self) -> str | None:
        """Why it cannot run here: there is no TensorFlow."""
        return missing_tensorflow(self.python)

    def start(self, room: Room, least: int, most: int) -> None:
        """Start the supervisor."""
        furnish(room)
        words = [self.python, str(WORKERS / self.script), str(least), self.again]
        room.start([sys.executable, "-u", str(SUPERVISOR), *words], {})

    def change(self, room: Room, servers: int) -> None:
        """Tell the supervisor. Lost when it has ended."""
        try:
            change = os.open(room.directory / CHANGE, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            raise Lost(f"nobody is there to change the number of servers ({error.strerror})") from None
        os.write(change, f"{servers}\n".encode())
        os.close(change)
