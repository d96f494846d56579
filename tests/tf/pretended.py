"""Jobs of fake tasks: scripts that stand in for TensorFlow's, under the real launcher."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from support.harness import WAIT, Launcher, Mailbox, finish, launch

PRETEND = Path(__file__).parent / "workers" / "pretend.py"
SERVERS = Launcher("tf-ps-run", (sys.executable, "-m", "tf_ps_runner"))

Post = dict[str, Any]
"""What a task has posted to the test."""


class Job:
    """A running job of fake tasks. It keeps their posts, so that a test can wait for them in any order."""

    def __init__(self, mailbox: Mailbox, *flags: str, args: tuple[str, ...] = (), script: Path = PRETEND) -> None:
        self._mailbox = mailbox
        self.folder = mailbox.directory / "pipes"
        self.folder.mkdir(exist_ok=True)
        self._posts: list[Post] = []
        self.run_id = f"pretend-{mailbox.name}"
        command = ["--start-method=spawn", f"--rdzv-id={self.run_id}", *flags, str(script), *args]
        # The launcher refuses an interpreter without TensorFlow; no process imports this module.
        stand_in = mailbox.directory / "installed" / "tensorflow"
        stand_in.mkdir(parents=True, exist_ok=True)
        (stand_in / "__init__.py").write_text("raise ImportError('this is only a name')\n")
        env: dict[str, str | None] = {"PRETEND": str(self.folder), "PYTHONPATH": str(stand_in.parent)}
        self.process = launch(mailbox, *command, launcher=SERVERS, env=env, stderr=subprocess.STDOUT)

    def receive(self, what: Callable[[Post], bool]) -> Post:
        """Return the first post for which the condition is true; it is not returned again."""
        while not (found := [post for post in self._posts if what(post)]):
            self._posts.append(self._mailbox.receive())
        self._posts.remove(found[0])
        return found[0]

    def received_more(self, at: str) -> bool:
        """Whether there is another such post; call it after the end of the job."""
        return any(post["at"] == at for post in (*self._posts, *self._mailbox.pending()))

    def up(self, name: str) -> Post:
        """Wait until that task waits for commands, or serves."""
        return self.receive(lambda post: post["name"] == name and post["at"] in ("up", "serving"))

    def ordered(self, name: str, **order: bool) -> Post:
        """Wait until that task has received this order."""
        return self.receive(lambda post: {"name": name, "at": "ordered", **order}.items() <= post.items())

    def do(self, name: str, command: str) -> None:
        """Have a task do something."""
        with open(self.folder / name, "w") as pipe:
            pipe.write(command + "\n")

    def send(self, name: str, **fields: object) -> None:
        """Send a message of a task to its agent, and return when it was sent."""
        self.send_last(name, **fields)
        self.receive(lambda post: post["name"] == name and post["at"] == "sent")

    def send_last(self, name: str, **fields: object) -> None:
        """Send a message of a task for which the agent kills it: the task may die before it reports that."""
        self.do(name, f"send {json.dumps(fields)}")

    def train(self, chief: str = "chief-0", how: str = "fresh", step: int = 0, path: str | None = None) -> None:
        """Let the chief report that it has a complete model."""
        self.send(chief, type="restored", step=step, how=how, path=path)

    def finish(self, chief: str, code: int = 0) -> str:
        """Let the chief exit, and so the job. Return the console output."""
        self.do(chief, "exit 0")
        return self.ended(code)

    def ended(self, code: int) -> str:
        """Wait for the end of the job. Return the console output."""
        end = finish(self.process)
        assert end.code == code, end.out
        return end.out


def is_of(process: psutil.Process, job: Job) -> bool:
    """Whether a process belongs to that job and lives."""
    environ = process.info["environ"] or {}
    if environ.get("PRETEND") != str(job.folder):
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def scale(job: Job, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*SERVERS.command, "scale", f"--rdzv-id={job.run_id}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)
