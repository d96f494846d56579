"""Starts the process of the relay: a fresh interpreter that imports little.

The agent starts it before it imports its own modules, so that a launch does not wait for it, and must not fork one: it
may have threads later, and its memory has the job's token.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from dlrover_run.processes import signals

# `site` is left out (-S): it takes as long as all else, and runs what the user's environment has for training scripts.
# So the directory of this project is added, which a finder of `site` may have found.
PROGRAM = "import sys; sys.path[:] = {path}; from dlrover_run.output.relay.main import run; run()"


class StartedRelay(NamedTuple):
    """A relay that runs, and the agent's end of its socket."""

    pid: int
    control: socket.socket


def start_relay(console: tuple[int, int], *, shared: bool, successor: bool = False) -> StartedRelay:
    """Start a relay that writes to `console`. Raises OSError.

    `shared`: relays of other nodes write there too. `successor`: another relay has written there before and was killed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    arguments = (theirs.fileno(), os.getpid(), int(shared), int(successor))
    try:
        with theirs, signals.held_back():
            process = subprocess.Popen(
                [*_command(), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=console[0],
                stderr=console[1],
                pass_fds=(theirs.fileno(),),
            )
    except OSError:
        ours.close()
        raise
    # Reaped through a pidfd; with a return code set, Popen does not warn that the process is still running.
    process.returncode = 0
    return StartedRelay(process.pid, ours)


def _command() -> list[str]:
    path = [each for each in sys.path if isinstance(each, str)]
    project = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-S", "-c", PROGRAM.format(path=[*path, project])]
