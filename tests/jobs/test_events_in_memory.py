"""What `why` and `events` answer for running jobs whose event logs cannot be read: from the memory of their agents."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import OURS, Finished, Launcher, Mailbox, finish, launch, only_long, run

FAILS_ONCE = """
import os
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if restart == 0:
    raise SystemExit(3 + (os.environ["WHICH"] == "b"))
post(restart=restart)
wait_for_signals()
"""

WAITS = "post()\nwait_for_signals()\n"

OTHER_FILES = ("unshare", "--mount")
"""A container with the network and the processes of the host: its files are its own."""

needs_mounts = pytest.mark.skipif(
    shutil.which("unshare") is None or bool(subprocess.run([*OTHER_FILES, "true"], capture_output=True).returncode),
    reason="a mount namespace needs root",
)


def ask(here: Path, *words: str) -> Finished:
    return run(OURS, words, cwd=here, env={"XDG_STATE_HOME": str(here / "state")})


def end(job: subprocess.Popen[str]) -> Finished:
    job.send_signal(signal.SIGTERM)
    return finish(job)


@pytest.mark.parametrize("place", ["unwritable", pytest.param("container", marks=needs_mounts), *only_long("null")])
def test_two_jobs_answer_from_memory(tmp_path: Path, mailbox: Mailbox, place: str) -> None:
    state = tmp_path / "state"
    state.mkdir()
    launcher, flags, env = OURS, [], {"XDG_STATE_HOME": str(state)}
    if place == "null":
        flags = ["--journal=/dev/null"]
    elif place == "unwritable":
        env = {"XDG_STATE_HOME": "/proc/nothing"}
    else:
        shell = f'mount -t tmpfs none {state} && exec "$@"'
        launcher = Launcher("dlrover-run", (*OTHER_FILES, "sh", "-c", shell, "sh", sys.executable, "-m", "dlrover_run"))
    script = mailbox.script("fails_once.py", FAILS_ONCE)
    jobs = {}
    for which in ("a", "b"):
        name = f"memory-{place}-{os.getpid()}-{which}"
        given = ["--max-restarts=1", f"--rdzv-id={name}", *flags, script]
        jobs[which] = name, launch(mailbox, *given, launcher=launcher, env={**env, "WHICH": which})
    try:
        mailbox.gather(2)
        for which, code in (("a", 3), ("b", 4)):
            name, _ = jobs[which]
            why = ask(tmp_path, "why", "--last-restart", name)
            assert (why.code, why.err) == (0, "")
            assert f"exited with code {code}" in why.out
            events = ask(tmp_path, "events", name)
            assert (events.code, events.err) == (0, "")
            lines = [line.split(maxsplit=4)[3:] for line in events.out.splitlines()[1:]]
            assert [line[0] for line in lines].count("round.formed") == 2
            assert sum(line[0] == "worker.failed" and f"code {code}" in line[1] for line in lines) == 1
        assert not list(state.iterdir()), "no log is visible here"
    finally:
        ended = [end(job).code for _, job in jobs.values()]
    assert ended == [143, 143]


def test_a_spare_in_memory_does_not_hide_a_job_with_a_log(tmp_path: Path, mailbox: Mailbox, free_port: int) -> None:
    """Each agent answers from its log, or else from memory."""
    name = f"memory-spare-{os.getpid()}"
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port}", f"--rdzv-id={name}"]
    script = mailbox.script("waits.py", WAITS)
    nodes = [
        launch(mailbox, *meeting, *journal, script, env={"XDG_STATE_HOME": str(tmp_path / "state")})
        for journal in ([], ["--journal=/dev/null"])
    ]
    spare = None
    try:
        mailbox.gather(2)
        spare = launch(mailbox, *meeting, "--journal=/dev/null", script, stderr=subprocess.PIPE)
        assert spare.stderr is not None
        while "this node was not asked for" not in (line := spare.stderr.readline()):
            assert line, "the spare has ended"
        why = ask(tmp_path, "why", name)
        assert (why.code, "no steps are counted" in why.err) == (0, True)
        assert "round 1 trains since" in why.out
        assert "waits to step in as a spare" in why.out
        events = ask(tmp_path, "events", name)
        shown = [line.split()[3] for line in events.out.splitlines()[1:]]
        assert shown.count("round.formed") == 2, "those of the node with a log, and of the node without"
        assert shown.count("node.waiting") >= 1
    finally:
        for node in (*nodes, spare):
            if node is not None:
                end(node)
