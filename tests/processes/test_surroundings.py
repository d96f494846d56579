"""Launches in unusual environments: closed streams, ignored signals, refused processes, a removed directory."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from pathlib import Path

import psutil
import pytest
from support.harness import OURS, WAIT, Launcher, finish, run, start, until

from dlrover_run import exit_codes

STREAMS = """\
import os, sys
with open(sys.argv[1], "w") as file:
    file.write(" ".join(os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1)))
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(("method", "code"), [("spawn", 3), ("forkserver", 0)])
def test_closed_standard_streams_are_dev_null_to_the_workers(tmp_path: Path, method: str, code: int) -> None:
    script, seen = tmp_path / "streams.py", tmp_path / "seen"
    script.write_text(STREAMS)
    closed = Launcher("closed", ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *OURS.command))
    ended = run(closed, [f"--start-method={method}", "--max-restarts=1", script, seen, str(code)], cwd=tmp_path)
    assert ended.code == code
    assert seen.read_text() == "/dev/null /dev/null"


def test_a_parent_that_ignores_sigchld_has_no_effect(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import signal, sys; sys.exit(7 if signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL else 8)")
    ended = run(OURS, [script], cwd=tmp_path, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert ended.code == 7


NAMES = "import os, sys; sys.exit(7 if any(name.startswith('DLROVER_SURVIVOR_') for name in os.environ) else 8)"


def test_a_launcher_in_a_worker_passes_on_none_of_what_a_feature_gave_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NAMES)
    outer: dict[str, str | None] = {"DLROVER_SURVIVOR_LINE": "3", "DLROVER_SURVIVOR_TOKEN": "t"}
    assert run(OURS, [script], cwd=tmp_path, env=outer).code == 8


INTERRUPTED = """\
import os, signal, sys
class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name == "dlrover_run.command_line.entry_point":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
import dlrover_run.__main__
"""


def test_an_interrupt_during_the_import_of_the_launcher_prints_no_traceback(tmp_path: Path) -> None:
    ended = run(Launcher("interrupted", (sys.executable, "-c", INTERRUPTED)), [], cwd=tmp_path)
    assert (ended.code, ended.err) == (-signal.SIGINT, "")


REFUSED = """\
import itertools, os, subprocess, sys
from dlrover_run.command_line.entry_point import run
from dlrover_run.command_line.program import DLROVER_RUN
count = itertools.count(1)
def refusing(start):
    def refuse(*args, **options):
        if next(count) == int(sys.argv[1]):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(*args, **options)
    return refuse
os.fork, subprocess.Popen = refusing(os.fork), refusing(subprocess.Popen)
sys.exit(run(DLROVER_RUN, ["--no-python", "true"]))
"""


@pytest.mark.parametrize("which", ["1", "2"], ids=["agent", "relay"])
def test_a_process_that_the_system_refuses_names_the_limit(tmp_path: Path, which: str) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    refused = Launcher("refused", (sys.executable, "-c", REFUSED))
    ended = run(refused, [which], cwd=tmp_path, env={"TMPDIR": str(temporary)})
    assert ended.code == 71
    assert "`ulimit -u`" in ended.err
    assert ended.err.count("\n") == 1
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_working_directory_that_is_removed_before_and_during_the_job(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nif os.path.isdir(sys.argv[1]): os.rmdir(sys.argv[1])\nsys.exit(3)\n")
    place = tmp_path / "place"
    place.mkdir()
    away = {"TMPDIR": str(tmp_path)}
    ended = run(OURS, [f"--start-method={method}", "--max-restarts=1", script, place], cwd=place, env=away)
    assert ended.code == 3
    assert ("workers are spawned instead" in ended.err) == (method == "forkserver")
    place.mkdir()
    removed = Launcher("removed", ("sh", "-c", 'rmdir "$0" && exec "$@"', str(place), *OURS.command))
    assert run(removed, [f"--start-method={method}", script, place], cwd=place, env=away).code == 3


def test_too_few_descriptors_name_the_limit(tmp_path: Path) -> None:
    few = (64, 64)
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, few)}
    ended = run(OURS, ["--nproc-per-node=64", "--no-python", "true"], cwd=tmp_path, **limit)
    assert ended.code == 71
    assert "`ulimit -n` (it is 64)" in ended.err
    assert ended.err.count("\n") == 1


def customized(tmp_path: Path, code: str) -> dict[str, str | None]:
    """Variables with which every Python of a launch runs this first."""
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


NO_PIDFD = """\
import os
def refuse(*_):
    raise OSError({number}, "refused")
os.pidfd_open = refuse
"""

FAILS_ONCE = """\
import os, subprocess, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        sys.exit(3)
    subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=2).wait()
print("trained", flush=True)
"""


@pytest.mark.parametrize(("number", "method"), [(errno.EPERM, "spawn"), (errno.ENOSYS, "forkserver")])
def test_ends_are_noticed_where_the_kernel_refuses_pidfds(tmp_path: Path, number: int, method: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS_ONCE)
    flags = ["--nproc-per-node=2", "--max-restarts=1", f"--start-method={method}"]
    ended = run(OURS, [*flags, script], cwd=tmp_path, env=customized(tmp_path, NO_PIDFD.format(number=number)))
    # The sleep holds the standard error of the launch: it has been killed, or `run` would not have returned.
    assert (ended.code, ended.out.count("trained")) == (0, 2), ended.err
    assert ended.err.count("the kernel refuses pidfd_open") == 1
    assert "internal error" not in ended.err


# As `sudo sleep 600 &` in a script: the kernel refuses the signal to a process of another user.
PROTECTED = """\
import os
def guarded(call):
    def refuse(pid, number):
        with open(f"/proc/{pid}/comm") as name:
            if name.read() == "sleep\\n":
                raise PermissionError(1, "Operation not permitted")
        call(pid, number)
    return refuse
os.kill, os.killpg = guarded(os.kill), guarded(os.killpg)
"""

LEAVES_ONE = """\
import os, subprocess, sys
if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    process = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=-3, stderr=-3)
    open("pid", "w").write(str(process.pid))
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_may_not_be_signalled_is_left_and_named_once(tmp_path: Path, code: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(LEAVES_ONE)
    flags = ["--nproc-per-node=2", "--max-restarts=1", script, str(code)]
    try:
        ended = run(OURS, flags, cwd=tmp_path, env=customized(tmp_path, PROTECTED))
    finally:
        left = int((tmp_path / "pid").read_text())
        os.kill(left, signal.SIGKILL)
    assert ended.code == 0, ended.err
    line = f"a process of another user was left running, because this user may not end it: {left} (sleep)"
    assert ended.err.count("another user") == 1
    assert line in ended.err
    assert "Traceback" not in ended.err


BECOMES_ANOTHERS = """\
import ctypes, os
# As the kernel does at the exec of a set-uid program.
ctypes.CDLL(None).prctl(1, 0)
print(os.getpid(), flush=True)
os.execvp("sleep", ["sleep", "600"])
"""


def test_a_worker_that_may_not_be_signalled_is_left_and_named(tmp_path: Path) -> None:
    """As `dlrover-run --no-python sudo ...`."""
    script = tmp_path / "train.py"
    script.write_text(BECOMES_ANOTHERS)
    launch = start(OURS, ["--shutdown-timeout=0.1", script], cwd=tmp_path, env=customized(tmp_path, PROTECTED))
    assert launch.stdout is not None
    worker = psutil.Process(int(launch.stdout.readline()))
    until_named(worker, "sleep")
    try:
        launch.send_signal(signal.SIGTERM)
        code = launch.wait(WAIT)
        assert worker.name() == "sleep"
    finally:
        worker.kill()
    ended = finish(launch)
    assert code == exit_codes.CANNOT_START
    assert "runs on: it belongs to another user (sudo?), and this user may not end it" in ended.err
    assert f"this user may not end it: {worker.pid} (sleep)" in ended.err
    assert "internal error" not in ended.err


def until_named(process: psutil.Process, name: str) -> None:
    """Return when a process has become another program: it closes what it holds at its exec."""
    until(lambda: process.name() == name, f"{process.pid} did not become {name}")


def test_children_from_before_the_launcher_live_on(tmp_path: Path) -> None:
    """`tensorboard & exec dlrover-run train.py`, as in the entry point of a container."""
    script = tmp_path / "train.py"
    script.write_text("print('trained')")
    entry = 'sleep 600 >/dev/null 2>&1 & echo $! > earlier; exec "$@"'
    ended = run(Launcher("exec", ("sh", "-c", entry, "sh", *OURS.command)), [script], cwd=tmp_path)
    earlier = psutil.Process(int((tmp_path / "earlier").read_text()))
    try:
        assert earlier.name() == "sleep"
    finally:
        earlier.kill()
    assert ended.code == 0, ended.err


def test_a_launcher_in_the_background_of_a_shell_takes_an_interrupt(tmp_path: Path) -> None:
    """A shell without job control starts it with SIGINT ignored, which its workers would inherit."""
    script = tmp_path / "train.py"
    script.write_text(
        "import signal, time; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "print('up', flush=True)\n"
        "try: time.sleep(600)\nexcept KeyboardInterrupt: print('saved', flush=True)\n"
    )
    ignored = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    launch = start(OURS, ["--shutdown-timeout=60", script], cwd=tmp_path, **ignored)
    assert launch.stdout is not None
    assert launch.stdout.readline() == "up\n"
    launch.send_signal(signal.SIGINT)
    ended = finish(launch)
    assert (ended.code, ended.out) == (128 + signal.SIGINT, "saved\n"), ended.err


def test_an_inner_job_has_numbers_of_its_own(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner.py", tmp_path / "outer.py"
    inner.write_text("import os; print('inner', os.environ['NODE_RANK'], os.environ['NODE_NUM'], flush=True)")
    launch = f"subprocess.run({[*OURS.command, str(inner)]!r}, check=True)"
    outer.write_text(f"import os, subprocess\nif os.environ['RANK'] == '1': {launch}")
    ended = run(OURS, ["--local-nodes=2", "--nproc-per-node=1", outer], cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "inner 0 1\n" in ended.out
