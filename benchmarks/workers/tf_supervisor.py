"""What a user does without tf-ps-run: plain processes, and a small program that starts them again when one has died.

    python tf_supervisor.py PYTHON SCRIPT SERVERS all|one

With `all`, all processes are killed when one has died, and started again with a new `TF_CONFIG`. With `one`, only that
process is started again, at its address, and the rest is left to TensorFlow. A number written to the FIFO `change` in
the run's directory stops the job by a file, so that its script saves, and starts it with that number of servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core.launchers import DEATH_TIMEOUT, free_port
from core.processes import wait_for_end

STOP_TIMEOUT = 60.0
"""Seconds in which chief and worker must save and end; then they are killed."""

Task = tuple[str, int]


class Supervisor:
    """The processes that run now, and their ports."""

    def __init__(self, directory: Path, python: str, script: str) -> None:
        self.stop_file = directory / "stop"
        self.command = [python, "-u", script]
        self.ports: dict[Task, int] = {}
        self.running: dict[Task, subprocess.Popen[bytes]] = {}

    def start_all(self, servers: int) -> None:
        """Start all processes at new addresses."""
        self.stop_file.unlink(missing_ok=True)
        tasks = [*(("ps", rank) for rank in range(servers)), ("chief", 0), ("worker", 0)]
        self.ports = {task: free_port() for task in tasks}
        self.start(tasks)

    def start(self, tasks: Iterable[Task]) -> None:
        """Start these at their addresses."""
        cluster: dict[str, list[str]] = {}
        for (role, _), port in sorted(self.ports.items()):
            cluster.setdefault(role, []).append(f"127.0.0.1:{port}")
        for role, index in tasks:
            config = json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})
            environment = os.environ | {"TF_CONFIG": config, "STOP_FILE": str(self.stop_file)}
            # A session for each process, as with tf-ps-run: the kernel shares processors among sessions.
            self.running[role, index] = subprocess.Popen(
                self.command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def kill_all(self) -> None:
        """Kill all processes."""
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait(DEATH_TIMEOUT)
        self.running.clear()

    def stop(self) -> None:
        """Let the script save and end, and then kill the servers, which never end by themselves."""
        self.stop_file.touch()
        wait_for_end((process.pid for task, process in self.running.items() if task[0] != "ps"), STOP_TIMEOUT)
        self.kill_all()

    def wait(self, change: int) -> list[Task]:
        """Wait until processes have died, and return them, or until `change` can be read."""
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as descriptors:
            selector.register(change, selectors.EVENT_READ)
            for task, process in self.running.items():
                descriptor = os.pidfd_open(process.pid)
                descriptors.callback(os.close, descriptor)
                selector.register(descriptor, selectors.EVENT_READ, task)
            return [key.data for key, _ in selector.select() if key.data is not None]


def main(python: str, script: str, servers: str, again: str) -> None:
    """Keep a job alive until this program is killed."""
    directory = Path(os.environ["BENCHMARK_RUN"])
    os.mkfifo(directory / "change")
    # Opened for reading and writing: as there is always a writer, there is no end of file when the benchmark closes it.
    change = os.open(directory / "change", os.O_RDWR)
    number = int(servers)
    supervisor = Supervisor(directory, python, script)
    supervisor.start_all(number)
    while True:
        dead = supervisor.wait(change)
        if not dead:
            number = int(os.read(change, 64))
            supervisor.stop()
            supervisor.start_all(number)
        elif again == "all":
            supervisor.kill_all()
            supervisor.start_all(number)
        else:
            for task in dead:
                supervisor.running.pop(task).wait(DEATH_TIMEOUT)
            supervisor.start(dead)


if __name__ == "__main__":
    main(*sys.argv[1:])
