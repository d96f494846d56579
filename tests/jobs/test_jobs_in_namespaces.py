"""`jobs` and `status` for a job in a container beside: in a pid namespace and a user namespace of its own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
from pathlib import Path

import psutil
import pytest
from support.harness import OURS, Launcher, Mailbox, finish, launch, run

from dlrover_run import exit_codes
from dlrover_run.processes import unix_sockets

CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")


def container_starts() -> bool:
    return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not container_starts(), reason="no user namespaces here")
def test_a_job_in_a_pid_namespace_is_listed_and_named_by_its_pid_here(tmp_path: Path, mailbox: Mailbox) -> None:
    name = f"beside-{os.getpid()}"
    inside = Launcher("contained", (*CONTAINER, *OURS.command))
    job = launch(
        mailbox, f"--rdzv-id={name}", mailbox.script("wait.py", "post()\nwait_for_signals()\n"), launcher=inside
    )
    try:
        mailbox.gather(1)
        rows = {row["job"]: row for row in json.loads(run(OURS, ["jobs", "--json"], cwd=tmp_path).out)}
        row = rows[name]
        launcher = psutil.Process(row["pid"])
        assert launcher.ppid() == job.pid
        assert row["state"] == "training"
        assert row["user"] == psutil.Process(job.pid).username()
        by_pid = run(OURS, ["status", "--json", str(launcher.pid)], cwd=tmp_path)
        assert json.loads(by_pid.out)["job"] == name
        assert run(OURS, ["stop", "--wait", str(launcher.pid)], cwd=tmp_path).code == exit_codes.SUCCESS
    finally:
        # unshare takes no SIGTERM, and kills its child when it is killed.
        job.kill()
        finish(job)


def test_an_agent_that_refuses_this_user_is_shown_with_its_pid_here(tmp_path: Path) -> None:
    """A listener that closes each connection, as an agent does whose user namespace has no name for this user. The name
    of its socket has the pid and the user of that namespace."""
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(f"\0{unix_sockets.PREFIX}4321-1-{os.urandom(8).hex()}")
        agent.listen()

        def refuse() -> None:
            with contextlib.suppress(OSError):
                # Commands of other tests come too.
                while True:
                    agent.accept()[0].close()

        refusing = threading.Thread(target=refuse)
        refusing.start()
        try:
            jobs = run(OURS, ["jobs"], cwd=tmp_path)
        finally:
            agent.shutdown(socket.SHUT_RDWR)
            refusing.join()
    (line,) = [line for line in jobs.out.splitlines() if f" {os.getpid()} " in line]
    assert "refused" in line
    assert "runs in another user namespace: ask it inside of its container" in jobs.err
