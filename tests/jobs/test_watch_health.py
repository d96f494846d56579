"""A launcher that cannot look for hangs says so, on the console and in `status`."""

from __future__ import annotations

from support.harness import Mailbox, finish, launch

SITE = """
import socket
class Refused(socket.socket):
    def __init__(self, family=-1, *args, **kwargs):
        if family == socket.AF_NETLINK:
            raise OSError(93, "Protocol not supported")
        super().__init__(family, *args, **kwargs)
socket.socket = Refused
"""

SCRIPT = """
import os, subprocess, sys, time
job = os.environ['TORCHELASTIC_RUN_ID']
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    command = [sys.executable, "-m", "dlrover_run", "status", "--json", f"--rdzv-id={job}"]
    status = subprocess.run(command, capture_output=True, text=True)
    if "hangs are not found" in status.stdout:
        break
    time.sleep(0.2)
post(status=status.stdout + status.stderr)
"""


def test_without_sock_diag_one_line_and_the_status_say_so(mailbox: Mailbox) -> None:
    site = mailbox.directory / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    script = mailbox.script("train.py", SCRIPT)
    ended = finish(launch(mailbox, "--stall-action=restart", script, "60", env={"PYTHONPATH": str(site)}))
    assert ended.code == 0, ended.err
    why = "the kernel does not show connections (sock_diag: Protocol not supported)"
    assert ended.err.count(f"hangs are not found, and --stall-action=restart has no effect: {why}") == 1
    assert f"hangs are not found: {why}" in mailbox.gather(1)[0]["status"]


LAST_ONE = """
import os, subprocess, sys, threading, time
job = os.environ['TORCHELASTIC_RUN_ID']
def uploads():
    end = time.monotonic() + 60
    status = stacks = ""
    while time.monotonic() < end and not ("rank 0 has ended" in status and "_shutdown" in stacks):
        for_job = [sys.executable, "-m", "dlrover_run"], [f"--rdzv-id={job}"]
        status = subprocess.run([*for_job[0], "status", *for_job[1]], capture_output=True, text=True).stdout
        stacks = subprocess.run([*for_job[0], "stacks", *for_job[1]], capture_output=True, text=True).stdout
    post(status=status, stacks=stacks)
if os.environ["RANK"] == "1":
    threading.Thread(target=uploads, name="uploader").start()
"""


def test_a_worker_that_does_not_end_is_told_from_those_that_have_with_its_stack(mailbox: Mailbox) -> None:
    """Its main thread waits, while the interpreter ends, for a thread that is no daemon."""
    script = mailbox.script("train.py", LAST_ONE)
    ended = finish(launch(mailbox, "--nproc-per-node=2", script))
    assert ended.code == 0, ended.err
    (seen,) = mailbox.gather(1)
    assert "rank 0 has ended, the others run" in seen["status"]
    assert "_shutdown" in seen["stacks"]
