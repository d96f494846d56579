"""Launches in unusual environments: closed streams, ignored signals, refused processes, a removed directory."""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path

import pytest
from harness import OURS, Launcher, run

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
import itertools, os, sys
from dlrover_run.command_line.entry_point import run
from dlrover_run.command_line.parser import DLROVER_RUN
fork, count = os.fork, itertools.count(1)
def refuse():
    if next(count) == int(sys.argv[1]):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = refuse
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
