"""Who takes part: the launcher without and with `--network-check`, and the check itself without a job."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from comparison.lost import Lost
from launch_bench.rivals import OURS, WORKERS, CommandRival, Job
from launch_bench.room import Report, Room

WITHOUT, WITH, ADDED = "without the check", "with the check", "added by the check"
TASK = "the task itself"


def launcher(checked: bool, *options: str) -> CommandRival:
    """The launcher with these options, and with the check or without."""
    return CommandRival(*((WITH, OURS, (*options, "--network-check")) if checked else (WITHOUT, OURS, options)))


@dataclass(frozen=True)
class Task:
    """The check itself: no launcher, no job, and a template that has read torch before the clock starts."""

    name: str = TASK

    def absent(self) -> str | None:
        """It can always run."""
        return None

    def start(self, room: Room, job: Job) -> int:
        """Check this node with as many workers as the job has on a node."""
        command = [sys.executable, str(WORKERS / "check_task.py"), str(job.workers)]
        return room.start(command, {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"})

    def start_parent(self, room: Room, job: Job) -> int:
        """As `start`."""
        return self.start(room, job)

    def start_help(self, room: Room) -> int:
        """It has none."""
        raise Lost("it has no --help")

    def after_kill(self, room: Room, job: Job, killed: Report) -> None:
        """Nothing: there is nobody to be killed."""
