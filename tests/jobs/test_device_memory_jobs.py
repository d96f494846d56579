"""No worker starts while a process of the last round holds a device: launches with a file in place of the device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import Launcher, Mailbox, finish, launch
from support.nvml_stub import LAUNCHER, NvmlStub

LOADERS = """
import os, signal, sys
from pathlib import Path

def holds(pid):
    try:
        names = os.listdir(f"/proc/{pid}/fd")
        return any(os.readlink(f"/proc/{pid}/fd/{name}") == os.environ["TEST_DEVICE"] for name in names)
    except OSError:
        return False

started = Path("loaders")
known = started.read_text().split() if started.exists() else []
held = [pid for pid in known if holds(pid)]
device = open(os.environ["TEST_DEVICE"])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ["TEST_KILLS"]:
    post(held=held)
    sys.exit(0)
# A loader, one that has a session of its own, and a child of a child whose parent has ended.
ready, ended = os.pipe()
for kind in ("child", "session", "orphan"):
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if kind != "child":
            os.setsid()
        if kind == "orphan" and os.fork():
            os._exit(0)
        os.write(ended, b"%d\\n" % os.getpid())
        while True:
            signal.pause()
pids = b""
while pids.count(b"\\n") < 3:
    pids += os.read(ready, 64)
with started.open("a") as file:
    file.write(pids.decode())
post(held=held)
signal.pause()
"""


@pytest.fixture(autouse=True)
def _no_job_is_left() -> Iterator[None]:
    """The workers wait for a kill, so a test that fails would leave its job."""
    yield
    while started:
        started.pop().kill()


started: list[subprocess.Popen[str]] = []


def start(mailbox: Mailbox, kills: int, driver: NvmlStub) -> subprocess.Popen[str]:
    device = mailbox.directory / "device0"
    device.touch()
    job = launch(
        mailbox,
        str(mailbox.directory / "device"),
        f"--max-restarts={kills}",
        "--rdzv-conf=early_failure_limit=0",
        f"--log-dir={mailbox.directory / 'logs'}",
        mailbox.script("script.py", LOADERS),
        launcher=Launcher("with a device", (sys.executable, "-c", LAUNCHER)),
        env={"TEST_DEVICE": str(device), "TEST_KILLS": str(kills), **driver.environment},
    )
    started.append(job)
    return job


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.long)])
def test_no_worker_starts_while_a_loader_of_the_last_one_holds_the_device(mailbox: Mailbox, kills: int) -> None:
    driver = NvmlStub(mailbox.directory / "driver")
    job = start(mailbox, kills, driver)
    for _ in range(kills):
        message = mailbox.receive()
        assert message["held"] == []
        os.kill(message["pid"], signal.SIGKILL)
    assert mailbox.receive()["held"] == []
    ended = finish(job)
    assert ended.code == 0, ended.err
    assert "warning" not in ended.err
    log = (mailbox.directory / "logs/latest/events.jsonl").read_text()
    freed = [event for line in log.splitlines() if (event := json.loads(line))["event"] == "dlrover.device.freed"]
    assert [event["processes"] for event in freed] == [3] * kills


def test_what_another_job_holds_is_named_once_for_each_restart(mailbox: Mailbox) -> None:
    driver = NvmlStub(mailbox.directory / "driver")
    driver.set(0, used=61 << 30, total=80 << 30, pids=[os.getpid()])
    job = start(mailbox, 1, driver)
    os.kill(mailbox.receive()["pid"], signal.SIGKILL)
    mailbox.receive()
    ended = finish(job)
    assert ended.code == 0, ended.err
    text = " ".join(ended.err.split())
    name = Path("/proc/self/comm").read_text().strip()
    named = f"warning: GPU 0 has 61 GiB of 80 GiB in use by process {os.getpid()} ({name} of "
    assert text.count(named) == 1, ended.err
