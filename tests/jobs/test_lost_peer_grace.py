"""A worker that holds a device and has lost a peer does not delay the restart by the grace period."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from support.harness import Launcher, Mailbox, finish, launch
from support.nvml_stub import LAUNCHER

# The main thread runs no Python, as in a collective of NCCL: no handler, and no end.
SCRIPT = """\
import os, signal, sys
device = open(os.environ["TEST_DEVICE"])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
post()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    sys.exit(0)
signal.sigwait([signal.SIGUSR2])
"""


CHILD = """\
import os, signal, sys
from pathlib import Path
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    post(child_runs=Path("/proc", Path("child").read_text()).exists())
    sys.exit(0)
ready, ended = os.pipe()
if (child := os.fork()) == 0:
    device = open(os.environ["TEST_DEVICE"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(ended, b"1")
    while True:
        signal.pause()
os.read(ready, 1)
Path("child").write_text(str(child))
post()
signal.pause()
"""


def start(mailbox: Mailbox, script: str, workers: int) -> subprocess.Popen[str]:
    device = mailbox.directory / "device0"
    device.touch()
    return launch(
        mailbox,
        str(mailbox.directory / "device"),
        f"--nproc-per-node={workers}",
        "--max-restarts=1",
        # Longer than this test waits.
        "--shutdown-timeout=3600",
        mailbox.script("script.py", script),
        launcher=Launcher("with a device", (sys.executable, "-c", LAUNCHER)),
        env={"TEST_DEVICE": str(device)},
    )


def test_it_gets_a_second(mailbox: Mailbox) -> None:
    job = start(mailbox, SCRIPT, 2)
    first = mailbox.gather(2)
    try:
        os.kill(first[1]["pid"], signal.SIGKILL)
        assert [one["restart"] for one in mailbox.gather(2)] == [1, 1]
    finally:
        # If the test fails, it still waits.
        with contextlib.suppress(ProcessLookupError):
            os.kill(first[0]["pid"], signal.SIGKILL)
        ended = finish(job)
    assert ended.code == 0, ended.err


def test_a_child_of_a_worker_that_holds_a_device_has_ended_before_the_next_worker_starts(mailbox: Mailbox) -> None:
    job = start(mailbox, CHILD, 1)
    os.kill(mailbox.receive()["pid"], signal.SIGKILL)
    assert mailbox.receive()["child_runs"] is False
    assert finish(job).code == 0
