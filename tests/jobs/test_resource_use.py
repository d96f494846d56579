"""What the workers of real jobs use, as `status`, the event log and `why` have it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from support.harness import OURS, Finished, Mailbox, finish, launch, run

HOLDS = """
import os
rank = int(os.environ["RANK"])
held = bytearray(b"x") * ((300 if rank == 1 else 1) << 20)
post(rank=rank)
wait_for_signals()
"""

FAILS = """
import os
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
held = bytearray(b"x") * (300 << 20)
if restart == 0:
    os.kill(os.getpid(), 9)
post(restart=restart)
wait_for_signals()
"""

MIB = 2**20


def ask(here: Path, *words: str) -> Finished:
    return run(OURS, words, cwd=here, env={"XDG_STATE_HOME": str(here / "state")})


def test_status_has_the_memory_of_each_worker(tmp_path: Path, mailbox: Mailbox) -> None:
    name = f"use-{os.getpid()}"
    flags = ["--nproc-per-node=2", f"--rdzv-id={name}"]
    job = launch(mailbox, *flags, mailbox.script("holds.py", HOLDS), env={"XDG_STATE_HOME": str(tmp_path / "state")})
    try:
        mailbox.gather(2)
        node: dict[str, Any] = {}
        while node.get("use") is None:
            # A sample that takes long on a loaded machine counts when it is done.
            found = ask(tmp_path, "status", "--json", name)
            assert found.code == 0
            (node,) = json.loads(found.out)["nodes"]
        workers: list[dict[str, Any]] = node["use"]["tasks"]
        assert [one["name"] for one in workers] == ["rank 0", "rank 1"]
        assert workers[1]["memory"] > 300 * MIB > workers[0]["memory"] > 0
        assert node["use"]["memory_limit"] > node["use"]["memory"] == sum(one["memory"] for one in workers)
        text = ask(tmp_path, "status", name).out
        assert [line.split()[:3] for line in text.splitlines()[-3:]] == [
            ["WORKER", "NODE", "CPU"],
            ["rank", "0", "0"],
            ["rank", "1", "0"],
        ]
    finally:
        job.send_signal(signal.SIGTERM)
        finish(job)


def test_why_says_how_much_memory_a_worker_used_that_was_killed(tmp_path: Path, mailbox: Mailbox) -> None:
    """Its peak is what the kernel counted: the worker lived for less than the time between two samples."""
    name = f"used-{os.getpid()}"
    flags = ["--max-restarts=1", f"--rdzv-id={name}"]
    job = launch(mailbox, *flags, mailbox.script("fails.py", FAILS), env={"XDG_STATE_HOME": str(tmp_path / "state")})
    try:
        mailbox.gather(1)
        why = ask(tmp_path, "why", "--last-restart", name)
        assert why.code == 0
        assert "after its start; it used up to 0.3 of " in why.out
        events = ask(tmp_path, "events", "--json", name).out
        (figures,) = [event for event in map(json.loads, events.splitlines()) if event.get("ended")]
        assert figures["event"] == "dlrover.worker.resources"
        assert figures["peak"] > 300 * MIB
    finally:
        job.send_signal(signal.SIGTERM)
        finish(job)


UNTIL_SAID = """
import os, subprocess, sys, time
job = os.environ["JOB"]
end = time.monotonic() + 60
found = ""
while time.monotonic() < end and "watch.failed" not in found:
    command = [sys.executable, "-m", "dlrover_run", "events", job]
    found = subprocess.run(command, capture_output=True, text=True).stdout
status = subprocess.run([sys.executable, "-m", "dlrover_run", "status", job], capture_output=True, text=True).stdout
post(found=found, status=status)
"""


def test_a_node_that_cannot_read_the_use_says_so_once_and_reports_all_else(tmp_path: Path, mailbox: Mailbox) -> None:
    site = mailbox.directory / "site"
    site.mkdir()
    (site / "psutil.py").write_text("raise ImportError('no psutil here')\n")
    name = f"unread-{os.getpid()}"
    env = {"PYTHONPATH": str(site), "XDG_STATE_HOME": str(tmp_path / "state"), "JOB": name}
    script = mailbox.script("said.py", UNTIL_SAID)
    ended = finish(launch(mailbox, "--nproc-per-node=1", f"--rdzv-id={name}", script, env=env))
    assert ended.code == 0, ended.err
    (seen,) = mailbox.gather(1)
    problem = "what workers use of processors, memory and devices"
    assert f"{problem}: ImportError('no psutil here')" in seen["found"]
    assert ended.err.count(f"warning: {problem} cannot be read: internal error: ImportError('no psutil here')") == 1
    assert "training" in seen["status"]
    assert "CPU" not in seen["status"]
