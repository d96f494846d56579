"""Explanations of a worker's end never stand between it and the restart."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import Launcher, Mailbox, finish, launch, run

DIES_ONCE = """
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(3)
print("trained", flush=True)
"""

RAISES_ONCE = """
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("bad label 11")
print("trained", flush=True)
"""

PLANTED = """
import sys
from dlrover_run.workers import cause_collector, exits
from dlrover_run.observe.round_progress import RoundProgress
from dlrover_run.workers.startup_probe import StartupProbe
from dlrover_run.failures import causes, tracebacks
from dlrover_run.failures.oom_kills import OomKillCounters

def broken(*_, **__):
    raise LookupError("an explanation failed")

for owner, names in {
    exits: ("_full_disk", "read_error_file", "read_stderr"),
    cause_collector: ("find_absent_workers", "inspect_worker"),
    RoundProgress: ("script_ended",),
    StartupProbe: ("has_trained",),
    OomKillCounters: ("explain",),
    tracebacks: ("exception_lines", "last_failure"),
    causes: ("_describe_exit", "summarize_error", "may_be_oom_kill"),
}.items():
    for name in names:
        assert hasattr(owner, name), name
        setattr(owner, name, broken)
from dlrover_run.__main__ import run
sys.exit(run())
"""
"""A launcher in which every explanation fails."""


@pytest.mark.parametrize("script", [DIES_ONCE, RAISES_ONCE], ids=["dies", "raises"])
def test_a_restart_needs_no_explanation(tmp_path: Path, script: str) -> None:
    (tmp_path / "train.py").write_text(script)
    launcher = Launcher("dlrover-run", (sys.executable, "-c", PLANTED))
    # With an error file and the end of the output, so that each explanation is asked for.
    args = ("--nproc-per-node=1", "--max-restarts=1", "--log-dir=logs", "-t", "3", "train.py")
    done = run(launcher, args, cwd=tmp_path)
    assert (done.code, done.out.split()) == (0, ["[default0]:trained"]), done.err
    assert "restart 1 of 1" in done.err
    assert "internal error" not in done.err


def test_a_failed_job_whose_report_cannot_be_made_still_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(4)\n")
    report = "from dlrover_run.console import failure_report\nfailure_report.render_failure = broken\n"
    launcher = Launcher(
        "dlrover-run", (sys.executable, "-c", PLANTED.replace("from dlrover_run.__m", report + "from dlrover_run.__m"))
    )
    done = run(launcher, ("--nproc-per-node=1", "train.py"), cwd=tmp_path)
    assert (done.code, "this launcher exits with code 4" in done.err) == (4, True), done.err


def test_a_worker_that_dies_is_restarted_where_no_directory_can_be_written(tmp_path: Path) -> None:
    """As in OpenShift: a read-only root and no directory for temporary files."""
    inside = ("unshare", "--user", "--map-root-user", "--mount")
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no user may mount a file system on this machine")
    (tmp_path / "train.py").write_text(DIES_ONCE)
    shell = """
    for each in /tmp /var/tmp /usr/tmp; do [ ! -d $each ] || mount --bind $each $each || exit 90; done
    for each in /tmp /var/tmp; do mount -o remount,bind,ro $each || exit 91; done

    cd /proc && exec "$@"
    """
    launcher = Launcher("dlrover-run", (*inside, "sh", "-c", shell, "sh", sys.executable, "-m", "dlrover_run"))
    args = ("--nproc-per-node=1", "--max-restarts=1", "--start-method=spawn", tmp_path / "train.py")
    done = run(launcher, args, cwd=tmp_path, env={"TMPDIR": None, "TEMP": None, "TMP": None})
    assert (done.code, done.out.split()) == (0, ["trained"]), done.err


LIMIT = 400 << 20

LOSES_A_CHILD = """
import os, signal
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    sys.exit(0)
if os.environ["RANK"] == "0" and sys.argv[1] == "child":
    pid = os.fork()
    if pid == 0:
        open("/proc/self/oom_score_adj", "w").write("1000")
        greedy = []
        while True:
            greedy.append(bytearray(10_000_000))
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
post(pid=os.getpid(), rank=int(os.environ["RANK"]))
signal.pause()
"""


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A real control group of version 1 with LIMIT, below the one of this process."""
    own = {line.split(":")[1]: line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    group = Path("/sys/fs/cgroup/memory") / own.get("memory", "").strip("/") / f"dlrover-run-kills-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as problem:
        pytest.skip(f"no memory limit can be set here: {problem}")
    yield group
    deadline = time.monotonic() + 10
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    group.rmdir()


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("case", ["child", "none"])
def test_an_earlier_kill_for_memory_does_not_explain_a_kill_by_hand(
    mailbox: Mailbox, limited_group: Path, case: str
) -> None:
    """A data loader's child was killed for memory and its worker trains on; then someone kills another worker."""
    enter = str(limited_group / "cgroup.procs")
    script = mailbox.script("train.py", LOSES_A_CHILD)
    job = launch(
        mailbox,
        *("--nproc-per-node=2", "--max-restarts=1", script, case),
        preexec_fn=lambda: Path(enter).write_text(str(os.getpid())),
    )
    pids = {message["rank"]: message["pid"] for message in mailbox.gather(2)}
    # Longer than a kill counts as one of a moment ago; any longer time would do.
    time.sleep(4)
    os.kill(pids[1], signal.SIGKILL)
    done = finish(job)
    assert done.code == 0, done.err
    line = next(line for line in done.err.splitlines() if "restart 1 of 1" in line)
    assert re.search("rank 1 was killed by SIGKILL, not by the launcher", line), line
