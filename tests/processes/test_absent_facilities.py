"""Facilities of the system that are absent or refused, each planted by a `sitecustomize`, one by a real mount: the job
goes on in the next best way, and at most one sentence says what is missing."""

from __future__ import annotations

import errno
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import OURS, WAIT, Launcher, environment, finish, only_long, run, start

PLANT = """\
import builtins, io, os, re
files, number = re.compile(os.environ["PLANTED"]), int(os.environ["PLANTED_ERRNO"])
def refusing(call):
    def refused(path=".", *rest, **options):
        text = "" if isinstance(path, int) else os.fsdecode(path)
        if files.search(text):
            raise OSError(number, os.strerror(number), text)
        return call(path, *rest, **options)
    return refused
builtins.open = io.open = refusing(builtins.open)
for name in ("open", "listdir", "scandir", "readlink"):
    setattr(os, name, refusing(getattr(os, name)))
os.path.exists = lambda path, exists=os.path.exists: not files.search(str(path)) and exists(path)
"""

DIES_ONCE = """\
import os, signal, subprocess, sys
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    print("left", subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
print("trained", flush=True)
"""

UNUSABLE = "/proc cannot be used"


def planted(folder: Path, files: str, number: int) -> dict[str, str | None]:
    """Variables of a launch for which these files do not exist, or are refused with that error."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(PLANT)
    return {"PYTHONPATH": str(folder), "PLANTED": files, "PLANTED_ERRNO": str(number), "PYTHONDONTWRITEBYTECODE": "1"}


def sentences(err: str) -> list[str]:
    """The launcher's lines but those of each restart."""
    return [
        line
        for line in err.splitlines()
        if "dlrover-run: " in line and not any(text in line for text in ("restart 1 of 1", "logs in"))
    ]


@pytest.mark.parametrize("number", [errno.EACCES, *only_long(errno.ENOENT)])
@pytest.mark.parametrize(
    ("files", "method", "said"),
    [
        # The kernel was built without CONFIG_PROC_CHILDREN.
        (r"^/proc/.*/children$", "spawn", ""),
        (r"^/proc$", "spawn", ""),
        (r"^/proc/(self|\d+)/(io|wchan|schedstat|status|cmdline|maps|mem|cgroup|mountinfo)$", "spawn", ""),
        (r"^/proc/(net|meminfo|vmstat)|^/sys", "spawn", ""),
        (r"^/proc/self/environ$", "forkserver", ""),
        (r"^/proc/self/(task|fd)$", "forkserver", "workers are spawned instead"),
    ],
)
def test_a_job_restarts_without_files_of_proc(tmp_path: Path, files: str, method: str, said: str, number: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(DIES_ONCE)
    args = [f"--start-method={method}", "--nproc-per-node=2", "--max-restarts=1", "-t=3", "--log-dir=logs", script]
    ended = run(OURS, args, cwd=tmp_path, env=planted(tmp_path / "path", files, number))
    assert (ended.code, "Traceback" in ended.err) == (0, False), ended.err
    assert ended.out.count("trained") >= 2
    found = sentences(ended.err)
    assert len(found) == bool(said), found
    assert all(said in line for line in found)
    assert not Path("/proc", ended.out.partition("left ")[2].split()[0]).exists()


@pytest.mark.parametrize("files", [r"^/proc", *only_long(r"^/proc/self$", r"^/proc/(self|\d+)/stat$")])
def test_without_proc_a_job_restarts_and_one_line_says_what_is_missing(tmp_path: Path, files: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(DIES_ONCE.replace('"600"', '"3"'))
    args = ["--nproc-per-node=2", "--max-restarts=1", script]
    ended = run(OURS, args, cwd=tmp_path, env=planted(tmp_path / "path", files, errno.ENOENT))
    assert (ended.code, "Traceback" in ended.err) == (0, False), ended.err
    assert ended.out.count("trained") >= 2
    (line, *others) = [each for each in ended.err.splitlines() if "hangs are not found" not in each]
    assert UNUSABLE in line
    assert "restart 1 of 1" in others[0]


FUNCTION = """\
from dlrover_run import LaunchConfig, elastic_launch
def twice(number):
    return 2 * number
if __name__ == "__main__":
    elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, max_restarts=3), twice)(3)
"""


def test_a_function_that_workers_cannot_read_is_refused_in_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "call.py"
    script.write_text(FUNCTION)
    here = Launcher("function", (sys.executable, str(script)))
    ended = run(here, [], cwd=tmp_path, env=planted(tmp_path / "path", r"/fd/\d+$", errno.ENOENT))
    lines = [line for line in ended.err.splitlines() if "the workers cannot get the function" in line]
    # The launcher's line, and the exception that the caller gets.
    assert len(lines) == 2
    assert "mount proc at /proc" in lines[0]
    assert "restart 1" not in ended.err


@pytest.mark.parametrize("command", ["status", *only_long("stacks", "jobs", "logs", "stop", "why")])
def test_a_command_says_in_one_line_that_jobs_cannot_be_listed(tmp_path: Path, command: str) -> None:
    env = {**planted(tmp_path / "path", r"^/proc/net", errno.EACCES), "XDG_STATE_HOME": str(tmp_path)}
    ended = run(OURS, [command], cwd=tmp_path, env=env)
    # `status` and what reads of a job have a code for no job, as documented.
    assert (ended.code in (1, 3), ended.out) == (True, "")
    assert "the jobs of this machine cannot be listed: /proc/net/unix cannot be read" in ended.err
    assert ended.err.count("\n") == 1


NO_TERMINALS = """\
import os
def refused():
    raise OSError(int(os.environ["PLANTED_ERRNO"]), os.strerror(int(os.environ["PLANTED_ERRNO"])))
os.openpty = refused
"""


@pytest.mark.parametrize("number", [errno.ENOSPC, *only_long(errno.EPERM, errno.ENOENT)])
def test_workers_write_to_a_pipe_where_no_pseudo_terminal_can_be_opened(tmp_path: Path, number: int) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print('a terminal:', sys.stderr.isatty(), flush=True)")
    (tmp_path / "sitecustomize.py").write_text(NO_TERMINALS)
    master, slave = pty.openpty()
    env: dict[str, str | None] = {"PYTHONPATH": str(tmp_path), "PLANTED_ERRNO": str(number)}
    process = start(OURS, ["--nproc-per-node=2", script], cwd=tmp_path, env=env, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    while True:
        try:
            shown += os.read(master, 4096)
        except OSError:
            break
    os.close(master)
    text = shown.decode()
    assert finish(process).code == 0, text
    assert text.count("a terminal: False") == 2
    assert text.count("no pseudo-terminal can be opened") == 1
    assert os.strerror(number) in text


HIDES = """\
import ctypes, os, signal, time
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: as programs do that protect keys.
        os.write(writer, b"hidden")
        time.sleep(600)
    os.read(reader, 6)
    os.kill(os.getpid(), signal.SIGKILL)
print("trained", flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="a mount needs root")
def test_an_orphan_that_proc_hides_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HIDES)
    # Group 0 sees everything by default, and so does a capability of root.
    mount = "mount -t proc -o hidepid=2,gid=54321 proc /proc && exec setpriv --bounding-set=-all --inh-caps=-all"
    command = f"{mount} {sys.executable} -m dlrover_run --nproc-per-node=2 --max-restarts=1 {script}"
    ended = subprocess.run(
        ["unshare", "--mount", "bash", "-c", command],
        env=environment({"TMPDIR": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained") >= 2
    left = subprocess.run(["pgrep", "-f", str(script)], capture_output=True, text=True).stdout.split()
    for pid in left:
        os.kill(int(pid), 9)
    assert left == []
