"""`dlrover-run logs` after a restart: what the workers wrote before it, and what is said where there is nothing new."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.harness import OURS, Finished, Mailbox, finish, launch, only_long, run

from dlrover_run import exit_codes
from dlrover_run.features.operate.commands.asker import REFUSED

BODY = """
import os
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    print(f"the loss of {os.environ['RANK']} is NaN", flush=True)
    post()
    signal.sigwait([signal.SIGUSR1])
    raise SystemExit(3)
post()
signal.sigwait([signal.SIGUSR1])
"""


@pytest.mark.parametrize("logged", [False, *only_long(True)])
def test_what_a_worker_wrote_before_the_restart_is_shown_and_named(
    tmp_path: Path, mailbox: Mailbox, logged: bool
) -> None:
    name = f"logs-before-{os.getpid()}-{logged}"

    def logs(*words: str) -> Finished:
        return run(OURS, ["logs", name, *words], cwd=tmp_path)

    flags = ["--nproc-per-node=2", "--max-restarts=1", f"--rdzv-id={name}"]
    if logged:
        flags += ["--log-dir=logs", "--redirects=3"]
    job = launch(mailbox, *flags, mailbox.script("lost.py", BODY))
    try:
        first = mailbox.gather(2)
        early = logs("--previous", "--rank=1")
        assert (early.code, early.out) == (REFUSED, "")
        assert "no output of rank 1 from before a restart: the job has not been restarted" in early.err
        os.kill(next(one["pid"] for one in first if one["rank"] == 1), signal.SIGUSR1)
        second = mailbox.gather(2)
        silent = logs("--rank=1")
        assert (silent.code, silent.out) == (REFUSED, "")
        again = f"dlrover-run logs --previous --rank=1 {name}"
        assert f"rank 1 has written nothing since the last restart: `{again}` prints" in silent.err
        assert logs("--previous", "--rank=1").out == "the loss of 1 is NaN\n"
        both = logs("-p")
        assert both.code == exit_codes.SUCCESS
        assert sorted(both.out.splitlines()) == ["[rank 0]: the loss of 0 is NaN", "[rank 1]: the loss of 1 is NaN"]
        assert logs("-p", "-f").code == exit_codes.BAD_COMMAND_LINE
        for worker in second:
            os.kill(worker["pid"], signal.SIGUSR1)
        assert finish(job).code == exit_codes.SUCCESS
    finally:
        if job.poll() is None:
            job.terminate()
            finish(job)
