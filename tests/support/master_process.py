"""Shared by the tests of real master processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.harness import WAIT, environment

COMMAND = (sys.executable, "-m", "dlrover_run.master")


@dataclass(frozen=True)
class Master:
    """A listening master. `address` is HOST:PORT."""

    process: subprocess.Popen[str]
    address: str

    def finish(self, timeout: float = WAIT) -> tuple[int, str]:
        """Wait for its end, and return the exit code and its output."""
        _, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, err


def read_line(fd: int) -> dict[str, Any]:
    """Return the line of JSON that a master writes once it listens."""
    if not select.select([fd], [], [], WAIT)[0]:
        raise AssertionError(f"the master wrote nothing within {WAIT} s")
    with open(fd) as file:
        answer: dict[str, Any] = json.loads(file.read())
    return answer


@contextlib.contextmanager
def master(
    *args: str | Path,
    listen: str = "127.0.0.1:0",
    env: dict[str, str | None] | None = None,
    program: Sequence[str] = COMMAND,
    **popen: Any,
) -> Iterator[Master]:
    """A master process, which is killed at the end if it is still running."""
    ready, theirs = os.pipe()
    options: dict[str, Any] = {"stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **popen}
    fds = (theirs, *options.pop("pass_fds", ()))
    command = [*program, "--listen", listen, "--ready-fd", str(theirs), *map(str, args)]
    process = subprocess.Popen(command, env=environment(env), text=True, pass_fds=fds, **options)
    os.close(theirs)
    try:
        answer = read_line(ready)
        assert "port" in answer, answer
        yield Master(process, f"{answer['address']}:{answer['port']}")
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
