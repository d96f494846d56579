"""What one does without tf-ps-run: plain processes, and a small program that starts them again as soon as one has died.

    python supervisor.py PYTHON SCRIPT SERVERS all|one

With `all` whoever dies ends the job: all others are killed at once and all are started anew with a new `TF_CONFIG`.
With `one` only who has died is started again, at the address that it had, and the rest is left to TensorFlow. A number
that is written to the FIFO `change` in the room has the job stopped by a file, saved by its script, and started with so
many servers.
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

from launch_bench.rivals import free_port
from launch_bench.room import still_alive

CHANGE = "change"
"""The FIFO that the driver writes to."""

STOP = "stop"
"""The file at whose appearance the script saves and ends."""

STOP_TIMEOUT = 60.0
"""Seconds that chief and worker have to save and end; who has not by then is killed."""

DEATH_TIMEOUT = 30.0
"""Seconds in which a killed process must be gone; otherwise this program ends, and with it the job."""

Task = tuple[str, int]


def tasks_of(servers: int) -> list[Task]:
    """The processes of a job, as role and rank."""
    return [*(("ps", rank) for rank in range(servers)), ("chief", 0), ("worker", 0)]


def config_of(task: Task, ports: dict[Task, int]) -> str:
    """The `TF_CONFIG` of one process."""
    cluster: dict[str, list[str]] = {}
    for (role, _), port in sorted(ports.items()):
        cluster.setdefault(role, []).append(f"127.0.0.1:{port}")
    return json.dumps({"cluster": cluster, "task": {"type": task[0], "index": task[1]}})


class Supervisor:
    """The processes that run now, and the ports that they were told."""

    def __init__(self, room: Path, python: str, script: str) -> None:
        self.room = room
        self.command = [python, "-u", script]
        self.ports: dict[Task, int] = {}
        self.running: dict[Task, subprocess.Popen[bytes]] = {}

    def start_all(self, servers: int) -> None:
        """Start everything at new addresses."""
        (self.room / STOP).unlink(missing_ok=True)
        self.ports = {task: free_port() for task in tasks_of(servers)}
        self.start(self.ports)

    def start(self, tasks: Iterable[Task]) -> None:
        """Start these at the addresses that they have."""
        for task in tasks:
            environment = os.environ | {"TF_CONFIG": config_of(task, self.ports), "STOP_FILE": str(self.room / STOP)}
            # A session of its own, as tf-ps-run gives each process: the kernel shares processors out among sessions.
            self.running[task] = subprocess.Popen(
                self.command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def kill_all(self) -> None:
        """End everything at once."""
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait(DEATH_TIMEOUT)
        self.running.clear()

    def stop(self) -> None:
        """Have the script save and end, and then end the servers, which never do by themselves."""
        (self.room / STOP).touch()
        still_alive((process.pid for task, process in self.running.items() if task[0] != "ps"), STOP_TIMEOUT)
        self.kill_all()

    def wait(self, change: int) -> list[Task]:
        """Wait until somebody has ended, or the FIFO says something; who has ended."""
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as descriptors:
            selector.register(change, selectors.EVENT_READ)
            for task, process in self.running.items():
                descriptor = os.pidfd_open(process.pid)
                descriptors.callback(os.close, descriptor)
                selector.register(descriptor, selectors.EVENT_READ, task)
            return [key.data for key, _ in selector.select() if key.data is not None]


def main(python: str, script: str, servers: str, again: str) -> None:
    """Keep a job alive until somebody ends this program."""
    room = Path(os.environ["LAUNCH_BENCH_ROOM"])
    os.mkfifo(room / CHANGE)
    # Opened for reading and writing: with a writer always there, no end of file comes when the driver closes.
    change = os.open(room / CHANGE, os.O_RDWR)
    number = int(servers)
    supervisor = Supervisor(room, python, script)
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
