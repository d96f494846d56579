"""What nodes meet at, as a process of its own: here the built-in master and torch's store."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from comparison.lost import Lost
from comparison.memory import read_pss

from dlrover_run.process_tree.tree import die_with_parent

READY_TIMEOUT = 60.0
"""Seconds for the process to say where it listens; importing torch takes some of them. Then the trial is lost."""

END_TIMEOUT = 10.0
"""Seconds in which a killed process must be gone; longer means that the kernel holds it, and the benchmark stops."""


class MeetingPlace:
    """A running server, `address` HOST:PORT. Leaving it kills it, as every trial has a fresh one."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self._process = process
        self.address = address

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

    def requests(self) -> Counter[str]:
        """Requests that nodes have begun so far, by method; none where the server does not count them."""
        return Counter()

    def close(self) -> None:
        """Kill it."""
        kill(self._process)


def announce(command: Sequence[str]) -> MeetingPlace:
    """Start a server of ours or torch's. To its `command` comes the descriptor to which it writes where it listens.

    Raises Lost when it does not.
    """
    ready, its_end = os.pipe()
    with open(ready) as lines:
        process = subprocess.Popen(
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
        kill(process)
        raise Lost(said.get("error", f"{' '.join(command)} did not say where it listens"))
    return MeetingPlace(process, f"{said['address']}:{said['port']}")


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process with SIGKILL, and wait for that."""
    process.kill()
    process.wait(END_TIMEOUT)
