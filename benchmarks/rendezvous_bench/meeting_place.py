"""What nodes meet at: the built-in master or torch's store, each as a process of its own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from comparison.lost import Lost
from comparison.memory import read_pss

from dlrover_run.descent.lineage import die_with_parent

READY_TIMEOUT = 60.0
"""Seconds for the process to say where it listens; importing torch takes some of them. Then the trial is lost."""

END_TIMEOUT = 10.0
"""Seconds in which a killed process must be gone; longer means that the kernel holds it, and the benchmark stops."""


class MeetingPlace:
    """A running server. To its `command` comes the descriptor to which it writes where it listens."""

    def __init__(self, command: Sequence[str]) -> None:
        ready, its_end = os.pipe()
        with open(ready) as lines:
            self._process = subprocess.Popen(
                [*command, str(its_end)],
                pass_fds=[its_end],
                cwd=Path(__file__).resolve().parents[1],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
            os.close(its_end)
            came = select.select([lines], [], [], READY_TIMEOUT)[0]
            said = json.loads((came and lines.readline()) or "{}")
        if "port" not in said:
            self.close()
            raise Lost(said.get("error", f"{' '.join(command)} did not say where it listens"))
        self.address = f"{said['address']}:{said['port']}"

    def __enter__(self) -> MeetingPlace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def cpu_seconds(self) -> float:
        """Seconds of processor time that it has used so far. Raises Lost when it has ended."""
        import psutil

        try:
            used = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            raise Lost("the server has ended") from None
        return float(used.user + used.system)

    def memory(self) -> float:
        """PSS in bytes. Raises Lost when it has ended."""
        try:
            return float(read_pss([self._process.pid])[self._process.pid])
        except KeyError:
            raise Lost("the server has ended") from None

    def cpu_share(self, seconds: float) -> float:
        """Percent of one processor that it uses over the next `seconds`."""
        before, began = self.cpu_seconds(), time.monotonic()
        # Nothing is waited for here but the time itself, which is what is measured.
        time.sleep(seconds)
        return 100 * (self.cpu_seconds() - before) / (time.monotonic() - began)

    def close(self) -> None:
        """Kill it, as every trial has a fresh one."""
        self._process.kill()
        self._process.wait(END_TIMEOUT)
