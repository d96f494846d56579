"""Jobs of pretended tasks: scripts that stand in for TensorFlow's, under the launcher as it is."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from harness import WAIT, Launcher, Mailbox, finish, launch

PRETEND = Path(__file__).parent / "workers" / "pretend.py"
SERVERS = Launcher("tf-ps-run", (sys.executable, "-m", "tf_ps_runner"))

Told = dict[str, Any]


class Job:
    """A running job of pretended tasks. What they tell is kept, so that a test may ask in any order."""

    def __init__(self, mailbox: Mailbox, *flags: str, args: tuple[str, ...] = (), script: Path = PRETEND) -> None:
        self._mailbox = mailbox
        self.folder = mailbox.directory / "pipes"
        self.folder.mkdir(exist_ok=True)
        self._told: list[Told] = []
        self.run_id = f"pretend-{mailbox.name}"
        command = ["--start-method=spawn", f"--rdzv-id={self.run_id}", *flags, str(script), *args]
        # The launcher refuses an interpreter that has no TensorFlow; nobody imports this one.
        stand_in = mailbox.directory / "installed" / "tensorflow"
        stand_in.mkdir(parents=True, exist_ok=True)
        (stand_in / "__init__.py").write_text("raise ImportError('this is only a name')\n")
        env: dict[str, str | None] = {"PRETEND": str(self.folder), "PYTHONPATH": str(stand_in.parent)}
        self.process = launch(mailbox, *command, launcher=SERVERS, env=env, stderr=subprocess.STDOUT)

    def hear(self, what: Callable[[Told], bool]) -> Told:
        """The first that was told of which that is true; it is not told again."""
        for told in self._told:
            if what(told):
                self._told.remove(told)
                return told
        while True:
            told = self._mailbox.receive()
            if what(told):
                return told
            self._told.append(told)

    def heard_more(self, what: str) -> bool:
        """Whether a task has told this and it was not heard yet; to be asked after the end of the job."""
        return any(told["at"] == what for told in (*self._told, *self._mailbox.pending()))

    def up(self, name: str) -> Told:
        """Wait until that task obeys, or serves."""
        return self.hear(lambda told: told["name"] == name and told["at"] in ("up", "serving"))

    def told(self, name: str, **order: bool) -> Told:
        """Wait until that task was told this."""
        return self.hear(
            lambda told: (
                told["name"] == name
                and told["at"] == "told"
                and all(told[key] == value for key, value in order.items())
            )
        )

    def do(self, name: str, command: str) -> None:
        """Have a task do something."""
        with open(self.folder / name, "w") as pipe:
            pipe.write(command + "\n")

    def send(self, name: str, **fields: object) -> None:
        """Have a task send a message to its agent; it has been sent when this returns."""
        self.send_last(name, **fields)
        self.hear(lambda told: told["name"] == name and told["at"] == "said")

    def send_last(self, name: str, **fields: object) -> None:
        """Have a task send a message for which the agent kills it: the task may not live to report that it was sent."""
        self.do(name, f"send {json.dumps(fields)}")

    def train(self, chief: str = "chief-0", how: str = "fresh", step: int = 0, path: str | None = None) -> None:
        """Have the chief say that it has a whole model."""
        self.send(chief, type="restored", step=step, how=how, path=path)

    def finish(self, chief: str, code: int = 0) -> str:
        """Have the chief end well, and the job with it; what stood on the console."""
        self.do(chief, "exit 0")
        return self.ended(code)

    def ended(self, code: int) -> str:
        """Wait for the end of the job; what stood on the console."""
        end = finish(self.process)
        assert end.code == code, end.out
        return end.out


def agent_of(job: Job) -> psutil.Process:
    """The agent of a running launch."""
    return next(p for p in psutil.Process(job.process.pid).children() if p.name().startswith("tf-ps-agent"))


def is_of(process: psutil.Process, job: Job) -> bool:
    """Whether a process belongs to that job, and lives."""
    environ = process.info["environ"] or {}
    if environ.get("PRETEND") != str(job.folder):
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def scale(job: Job, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*SERVERS.command, "scale", f"--rdzv-id={job.run_id}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)
