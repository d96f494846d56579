"""`dlrover-run logs` of a job of two nodes on this machine, from its first lines to its last, over a restart."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.harness import OURS, Mailbox, finish, launch, only_long, run, start

from dlrover_run import exit_codes
from dlrover_run.features.operate.commands.asker import REFUSED

BODY = """
import os
import signal
rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
go = False
def note(*_):
    global go
    go = True
signal.signal(signal.SIGUSR1, note)
print(f"first of {rank} in {restart}", flush=True)
post()
while not go:
    signal.sigtimedwait([], 0.05)
print(f"last of {rank} in {restart}", flush=True)
if restart == "0":
    if rank == "1":
        raise SystemExit(3)
    wait_for_signals()
"""


@pytest.mark.parametrize("logged", [False, *only_long(True)])
def test_the_output_of_a_worker_is_followed_over_a_restart_to_the_last_line(
    tmp_path: Path, mailbox: Mailbox, logged: bool
) -> None:
    name = f"logs-{os.getpid()}-{logged}"
    flags = ["--local-nodes=2", "--nproc-per-node=1", "--max-restarts=1", "--node-restarts=0", f"--rdzv-id={name}"]
    if logged:
        flags += ["--log-dir=logs", "--redirects=3"]
    job = launch(mailbox, *flags, mailbox.script("talk.py", BODY))
    following = None
    try:
        first = mailbox.gather(2)
        both = run(OURS, ["logs", name], cwd=tmp_path)
        assert both.code == 0, both.err
        assert sorted(both.out.splitlines()) == ["[rank 0]: first of 0 in 0", "[rank 1]: first of 1 in 0"]
        assert run(OURS, ["logs", name, "--rank=2"], cwd=tmp_path).code == REFUSED
        assert run(OURS, ["logs", name, "--rank=two"], cwd=tmp_path).code == exit_codes.BAD_COMMAND_LINE
        following = start(OURS, ["logs", "-f", name, "--rank=1"], cwd=tmp_path)
        assert following.stdout is not None
        assert following.stdout.readline() == "first of 1 in 0\n"
        os.kill(next(one["pid"] for one in first if one["rank"] == 1), signal.SIGUSR1)
        for worker in mailbox.gather(2):
            os.kill(worker["pid"], signal.SIGUSR1)
        assert finish(job).code == exit_codes.SUCCESS
        rest = finish(following)
        assert rest.out.splitlines() == ["last of 1 in 0", "first of 1 in 1", "last of 1 in 1"]
        assert rest.code == exit_codes.SUCCESS
    finally:
        for process in (job, following):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait()


def test_ctrl_c_ends_a_reader_without_a_traceback(tmp_path: Path, mailbox: Mailbox) -> None:
    name = f"logs-c-{os.getpid()}"
    job = launch(mailbox, f"--rdzv-id={name}", "--nproc-per-node=2", mailbox.script("talk.py", BODY))
    try:
        mailbox.gather(2)
        following = start(OURS, ["logs", "-f", name], cwd=tmp_path)
        assert following.stdout is not None
        following.stdout.readline()
        following.send_signal(signal.SIGINT)
        ended = finish(following)
        assert ended.code == exit_codes.SUCCESS
        assert "Traceback" not in ended.err
    finally:
        job.terminate()
        finish(job)


def test_a_worker_whose_output_passes_by_is_no_silent_success(tmp_path: Path, mailbox: Mailbox) -> None:
    """The standard output of a single worker whose launcher writes its two outputs to different places."""
    name = f"logs-none-{os.getpid()}"
    job = launch(mailbox, f"--rdzv-id={name}", mailbox.script("talk.py", BODY))
    try:
        mailbox.gather(1)
        asked = run(OURS, ["logs", name], cwd=tmp_path)
        assert (asked.code, asked.out) == (REFUSED, "")
        assert "none was written to a file or through the launcher's console" in asked.err
    finally:
        job.terminate()
        finish(job)
